"""A round whose update has begun is final: its gradients stay until the update is committed."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.stepping_tracer import Mark, Traced, on_one_core, refusal
from helpers.support import LONG, until, update_once
from helpers.training import training

import shmacc
from shmacc import NEVER_STALE, AccumulatorGroup, Parameters, _core, errors, inspection, optim

traced = pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}")


@pytest.fixture(params=[1, 2], ids=["one lane", "two lanes"])
def group(request: pytest.FixtureRequest) -> Iterator[AccumulatorGroup]:
    """Yield a group that sums the gradients of one array and has two gradients."""
    with Parameters({"a": np.zeros(3)}, "params", optimizer=optim.SGD(1)) as params:
        with AccumulatorGroup(
            params.member_specs(), "group", reduction_type="SUM", lanes=request.param
        ) as made:
            made.apply({"a": np.ones(3)}, 0)
            made.apply({"a": np.ones(3)}, 0)
            yield made
            made.unlink()
        params.unlink()


@pytest.fixture
def params(group: AccumulatorGroup) -> Iterator[Parameters]:
    """Yield the parameters that belong to the group."""
    del group
    with Parameters.attach("params") as attached:
        yield attached


def begin(group: AccumulatorGroup, params: Parameters) -> None:
    """Run a chief's block that raises after its update."""
    with contextlib.suppress(ZeroDivisionError), group.round(1) as taken:
        params.update(taken)
        raise ZeroDivisionError


def test_an_error_after_update_keeps_the_round(group: AccumulatorGroup, params: Parameters) -> None:
    begin(group, params)
    assert (params.step, group.global_step, group.num_accumulated()) == (1, 0, 2)
    assert not group.apply({"a": np.ones(3)}, 0)
    stats = group.stats()
    assert (stats.round_pid, stats.update, stats.update_pid) == (None, "in", os.getpid())
    assert stats.update_since is not None
    with group.round(99, timeout=0) as taken:
        np.testing.assert_array_equal(taken["a"].value, [2] * 3)
        assert params.update(taken) is False
        with pytest.raises(errors.FailedPreconditionError, match="has made its update"):
            params.update(taken)
    assert (params.step, group.global_step, group.num_accumulated()) == (1, 1, 0)
    np.testing.assert_array_equal(params["a"], [-2] * 3)


def test_a_death_after_update_keeps_the_round(group: AccumulatorGroup, params: Parameters) -> None:
    def update_and_wait(*, pipe: Pipe) -> None:
        with (
            AccumulatorGroup.attach("group") as own,
            Parameters.attach("params") as theirs,
            own.round(1) as taken,
        ):
            theirs.update(taken)
            pipe.turn()

    with Apart(update_and_wait).ready() as chief:
        assert not group.apply({"a": np.ones(3)}, 0)
        chief.kill()
    assert not group.apply({"a": np.ones(3)}, 0)
    with group.round(99, timeout=LONG) as taken:
        assert params.update(taken) is False
    assert (params.step, group.global_step) == (1, 1)


def test_advance_step_consumes_a_final_round(group: AccumulatorGroup, params: Parameters) -> None:
    begin(group, params)
    before = group.stats()
    assert group.advance_step(0) == 0
    assert group.advance_step(3) == 0
    now = group.stats()
    assert (now.taken, now.takes, now.discarded) == (before.taken + 2, before.takes + 1, 0)
    assert group.global_step == 3
    assert group.apply({"a": np.ones(3)}, 3)


def test_a_final_round_refuses_changes(group: AccumulatorGroup, params: Parameters) -> None:
    begin(group, params)
    for call in (
        lambda: group.set_global_step(5),
        lambda: group.take_partial(0),
        lambda: group.take_partial(1, seal=True),
        group.unseal,
    ):
        with pytest.raises(errors.FailedPreconditionError, match="an update of parameters"):
            call()
    assert (group.global_step, group.num_accumulated()) == (0, 2)


@traced
def test_a_round_cannot_be_taken_or_skipped_before_its_update_is_committed(
    group: AccumulatorGroup, params: Parameters
) -> None:
    _begun_only(group, params)
    for call in (lambda: group.advance_step(1), lambda: group.take(1, timeout=0)):
        with pytest.raises(errors.FailedPreconditionError, match="an update of parameters"):
            call()
    with pytest.raises(errors.FailedPreconditionError, match="an update of"), group.round(1):
        pass
    assert (group.global_step, group.num_accumulated()) == (0, 2)
    with group.round(1) as taken:
        assert params.update(taken)
    np.testing.assert_array_equal(params["a"], [-2] * 3)
    assert group.global_step == 1


@traced
def test_a_final_round_can_be_skipped(group: AccumulatorGroup, params: Parameters) -> None:
    _begun_only(group, params)
    with group.round(1) as taken:
        assert params.skip(taken)
    np.testing.assert_array_equal(params["a"], [0] * 3)
    assert (params.step, group.global_step) == (1, 1)


def test_a_gradient_of_a_later_step_waits(group: AccumulatorGroup, params: Parameters) -> None:
    begin(group, params)
    with ThreadPoolExecutor() as pool:
        later = pool.submit(group.apply, {"a": np.ones(3)}, NEVER_STALE)
        until(lambda: inspection.describe("group").processes[0].activity != "idle")
        assert group.take(1, timeout=LONG).count == 2
        assert later.result(LONG) is True
    assert group.num_accumulated() == 1


def test_a_waiting_take_gets_the_final_round(group: AccumulatorGroup, params: Parameters) -> None:
    with ThreadPoolExecutor() as pool:
        with contextlib.suppress(ZeroDivisionError), group.round(1) as taken:
            waiting = pool.submit(group.take, 99, timeout=LONG)
            until(lambda: group.stats().waiting == 1)
            params.update(taken)
            raise ZeroDivisionError
        assert waiting.result(LONG).count == 2
    assert group.global_step == 1


def _begun_only(group: AccumulatorGroup, params: Parameters) -> None:
    """Leave a round whose chief dies after its update began and before the commit."""
    del params
    real = _core.update

    def act(mark: Mark) -> None:
        def marked(*args: Any) -> bool:
            mark()
            return real(*args)

        _core.update = marked  # type: ignore[assignment]
        with (
            AccumulatorGroup.attach("group") as own,
            Parameters.attach("params") as theirs,
            own.round(1) as taken,
        ):
            theirs.update(taken)

    with on_one_core(), Traced(act) as chief:
        chief.run_to_mark()
        while group.stats().update is None:
            chief.step()
        chief.kill()
    assert group.stats().update == "begun"


@traced
def test_a_save_with_unrelated_parameters_keeps_a_final_round(
    group: AccumulatorGroup, params: Parameters, tmp_path: Path
) -> None:
    """Other parameters may be at a later step; they do not show whether the round is updated."""
    _begun_only(group, params)
    with training({"b": np.zeros(3)}, optim.SGD(1)) as (others, theirs):
        update_once(others, theirs, {"b": np.ones(3)})
        what: dict[str, Any] = {"group": group, "params": params, "others": others}
        shmacc.save(tmp_path / "all.npz", what)
        shmacc.load(tmp_path / "all.npz", what)
    assert (group.global_step, group.num_accumulated(), params.step) == (0, 2, 0)
    assert group.take(1).count == 2
