"""Parameters and the group of their gradients belong together; using either with another fails.

A group that an earlier run left could give new parameters gradients of the old parameters, or no
gradients if that run had finished. A group may also accumulate a loss or a count, which is no
parameter; then the update is called without this member.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.support import update_once

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    Parameters,
    TensorSpec,
    _core,
    errors,
    optim,
)

PARAMS, GROUP = "model.params", "model.grads"


@pytest.fixture(autouse=True)
def _unlinked() -> Iterator[None]:
    yield
    for name in (PARAMS, GROUP):
        with contextlib.suppress(errors.NotFoundError), shmacc.attach(name) as left:
            left.unlink()


def made(rows: int = 3, **how: Any) -> Parameters:
    """Make parameters with this number of rows."""
    return Parameters({"w": np.zeros(rows)}, PARAMS, optimizer=optim.SGD(1.0), **how)


def run(params: Parameters, group: AccumulatorGroup, rounds: int) -> None:
    """Train for this number of rounds, and leave a gradient."""
    for _ in range(rounds):
        assert update_once(params, group, {"w": np.ones(3)})
    group.apply({"w": np.ones(3)}, group.global_step)


def both_named() -> Any:
    """Expect an error that names both the group and the parameters."""
    return pytest.raises(errors.FailedPreconditionError, match=rf"{GROUP}'.*than '{PARAMS}'")


@pytest.mark.parametrize(("rounds", "rows"), [(0, 3), (6, 3), (6, 4)])
def test_the_constructor_refuses_a_group_of_replaced_parameters(rounds: int, rows: int) -> None:
    with made() as params, AccumulatorGroup(params.member_specs(), GROUP) as group:
        run(params, group, rounds)
    with made(rows, if_exists="replace") as params:
        specs = params.member_specs() if rows == 3 else {"w": params.member_specs()["w"]}
        of_shape = pytest.raises(errors.InvalidArgumentError, match="shape of member 'w'")
        with both_named() if rows == 3 else of_shape:
            AccumulatorGroup(specs, GROUP)
        with AccumulatorGroup(specs, GROUP, if_exists="replace") as group:
            assert update_once(params, group, {"w": np.ones(rows)})


def test_a_group_of_a_finished_run_is_refused_too() -> None:
    """A training loop over such a group would end at once."""
    with made() as params, AccumulatorGroup(params.member_specs(), GROUP) as group:
        run(params, group, 2)
        group.finish()
    with made(if_exists="replace") as params, both_named():
        AccumulatorGroup(params.member_specs(), GROUP)


@pytest.mark.parametrize("specs", ["member_specs", "specs of its own"])
def test_an_update_refuses_another_parameters_group(specs: str) -> None:
    """The group's specs may come from `member_specs` or be written out."""
    with made() as params:
        own = params.member_specs() if specs == "member_specs" else {"w": TensorSpec((3,), "f8")}
        with AccumulatorGroup(own, GROUP) as group:
            run(params, group, 1)
    with (
        made(if_exists="replace") as params,
        AccumulatorGroup.attach(GROUP) as group,
        group.round(1) as taken,
    ):
        for call in params.update, params.skip:
            with both_named():
                call(taken)
        assert (params.step, params["w"].tolist()) == (0, [0.0] * 3)


def test_an_unused_group_may_be_used_with_new_parameters() -> None:
    """A program may be restarted before it has trained anything."""
    for _ in range(2):
        with made(if_exists="replace") as params:
            AccumulatorGroup(params.member_specs(), GROUP).close()
    with made() as params, AccumulatorGroup(params.member_specs(), GROUP) as group:
        run(params, group, 1)
    with (
        made() as params,
        AccumulatorGroup(params.member_specs(), GROUP) as group,
        group.round(1) as taken,
    ):
        assert params.update(taken)


def test_a_group_of_two_parameters_is_refused_and_not_made() -> None:
    """The group would belong to one of the two, and refuse the other's updates."""
    with made() as params, Parameters({"v": np.zeros(3)}, optimizer=optim.SGD(1)) as others:
        with pytest.raises(errors.InvalidArgumentError, match=rf"'{PARAMS}'.*make a group of each"):
            AccumulatorGroup(params.member_specs() | others.member_specs(), GROUP)
        with pytest.raises(errors.NotFoundError):
            shmacc.attach(GROUP)
        again = Parameters.attach(PARAMS)
        AccumulatorGroup(params.member_specs() | again.member_specs()).close()
        again.close()


def test_loading_a_checkpoint_of_both_makes_new_ones_belong_together(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    with made() as params, AccumulatorGroup(params.member_specs(), GROUP) as group:
        run(params, group, 2)
        shmacc.save(path, {"params": params, "group": group})
    with made(if_exists="replace") as params, AccumulatorGroup.attach(GROUP) as group:
        shmacc.load(path, {"params": params, "group": group})
        with group.round(1) as taken:
            assert params.update(taken)
        assert params["w"].tolist() == [-3.0] * 3


@pytest.fixture
def params() -> Iterator[Parameters]:
    """Yield parameters with a table and a vector."""
    with Parameters({"t": np.zeros((4, 2)), "v": np.zeros(3)}, optimizer=optim.SGD(1)) as made:
        yield made


@pytest.fixture
def group(params: Parameters) -> Iterator[AccumulatorGroup]:
    """Yield a group with gradients of both and two members that are no parameters."""
    specs = params.member_specs(["t"]) | {"loss": TensorSpec((), "f8"), "more": TensorSpec((3,))}
    with AccumulatorGroup(specs) as made:
        full = {"t": ([1], np.ones((1, 2))), "v": np.ones(3), "loss": 0.5, "more": np.ones(3)}
        made.apply(full, 0)
        yield made


def test_an_update_with_a_loss_names_a_remedy(params: Parameters, group: AccumulatorGroup) -> None:
    with group.round(1) as taken:
        with pytest.raises(
            errors.InvalidArgumentError, match=r"no array 'loss'.*taken\.without\('loss'\)"
        ):
            params.update(taken)
        assert group.stats().update is None
        assert params.update({name: taken[name] for name in taken if name in params})
        assert taken["loss"].value == 0.5
    assert (params["t"][1].tolist(), params["v"].tolist()) == ([-1, -1], [-1] * 3)
    assert params.step == 1


@pytest.mark.parametrize("call", ["update", "skip"])
def test_an_update_may_omit_members(params: Parameters, group: AccumulatorGroup, call: str) -> None:
    with group.round(1) as taken:
        assert getattr(params, call)({"v": taken["v"]})
        with pytest.raises(errors.FailedPreconditionError, match="has made its update"):
            getattr(params, call)({"t": taken["t"]})
    assert not params["t"].any()
    assert bool(params["v"].any()) == (call == "update")


def test_a_member_may_have_another_arrays_gradient() -> None:
    with (
        Parameters({"v": np.zeros(3, np.float32)}, optimizer=optim.SGD(2)) as others,
        AccumulatorGroup({"more": TensorSpec((3,))}) as group,
    ):
        group.apply({"more": np.ones(3)}, 0)
        with group.round(1) as taken:
            assert others.update({"v": taken["more"]})
        assert others["v"].tolist() == [-2] * 3


class Ending:
    """Another thread's round, which ends after an update has looked at it `looks` times."""

    def __init__(self, given: object, looks: int) -> None:
        self._given = [given] * looks

    @property
    def given(self) -> object:
        return self._given.pop() if self._given else None


@pytest.mark.parametrize("looks", range(4))
def test_another_threads_round_may_end_while_an_update_looks_for_its_own(
    params: Parameters, group: AccumulatorGroup, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConditionalAccumulator("f8", (3,)) as other:
        other.apply_grad(np.ones(3))
        with other.round(1) as taken:
            [block] = _core.open_rounds()
            assert block.given is taken
        assert block.given is None
    with group.round(1) as taken:
        own = _core.open_rounds()
        rounds = lambda: [Ending(group.snapshot(), looks), *own]  # noqa: E731
        monkeypatch.setattr(_core, "open_rounds", rounds)
        wrong: Any
        for wrong in ({"v": None}, {"v": np.ones(3)}, None):
            with pytest.raises(errors.FailedPreconditionError, match="not of a round"):
                params.update(wrong)
        assert params.update({"v": taken["v"]})


def test_an_update_needs_just_one_open_round(params: Parameters, group: AccumulatorGroup) -> None:
    def refused(taken: Mapping[str, Any]) -> None:
        for call in params.update, params.skip:
            with pytest.raises(
                errors.FailedPreconditionError, match=r"(not|does not say) of .*round"
            ):
                call(taken)

    with ConditionalAccumulator("f8", (3,)) as other:
        other.apply_grad(np.ones(3))
        with group.round(1) as taken, other.round(1) as single:
            refused({})
            refused({"t": taken["t"], "v": single})
            refused({"v": np.ones(3)})
            refused({"t": taken["t"], "v": group.snapshot()["v"]})
            left = {"v": taken["v"]}
            params.skip(taken)
    refused(left)


def _update_while_its_block_goes() -> tuple[int, str]:
    """Update in a callback of a weak reference to a round's block that Python is destroying."""
    seen: list[tuple[int, str]] = []

    def update() -> None:
        with pytest.raises(errors.FailedPreconditionError) as caught:
            params.update(taken)
        seen.append((len(_core.open_rounds()), str(caught.value)))

    with made() as params, AccumulatorGroup(params.member_specs(), GROUP) as group:
        group.apply({"w": np.ones(3)}, 0)
        block = group.round(1)
        taken = block.__enter__()
        weakref.finalize(block, update)
        del block
        assert update_once(params, group, {"w": np.ones(3)})  # both gradients: the round has ended
        assert params["w"].tolist() == [-1] * 3
    [only] = seen
    return only


def test_an_update_does_not_find_a_round_whose_block_is_being_destroyed() -> None:
    found, complaint = run_apart(_update_while_its_block_goes)
    assert found == 0
    assert "not of a round that this process has open" in complaint
