"""Calls that wait for parameters wait until their timeout, and then change nothing."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.lock_holder import held
from helpers.support import LONG

import shmacc
from shmacc import AccumulatorGroup, GroupTaken, Parameters, errors, optim
from shmacc._parameters import checkpoints


@pytest.fixture
def params() -> Iterator[Parameters]:
    """Yield parameters with one array."""
    with Parameters({"a": np.zeros(3)}, "params", optimizer=optim.SGD(1, 0.5)) as made:
        yield made
        made.unlink()


@pytest.fixture
def group(params: Parameters) -> Iterator[AccumulatorGroup]:
    """Yield a group with a gradient for the array."""
    with AccumulatorGroup(params.member_specs(), "group", unlink_on_close=True) as made:
        made.apply({"a": np.ones(3)}, 0)
        yield made


def test_an_update_waits_for_a_stopped_process_until_its_timeout(
    params: Parameters, group: AccumulatorGroup
) -> None:
    """The process may have been stopped in a snapshot or a restore."""
    with group.round(1) as taken:
        with held("params"):
            for call in (params.update, params.skip):
                with pytest.raises(errors.DeadlineExceededError, match="nothing was changed"):
                    call(taken, timeout=0.05)
            assert group.stats().update is None
            assert (params.step, params["a"].tolist()) == (0, [0] * 3)
        assert params.update(taken, timeout=LONG)
    assert (params.step, params["a"].tolist()) == (1, [-1] * 3)


def test_a_save_gives_up_if_rounds_keep_ending(
    params: Parameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round may end each time before `save` has read all its parts."""
    looks = itertools.count()
    monkeypatch.setattr(checkpoints, "_age", lambda _: next(looks))
    with pytest.raises(errors.DeadlineExceededError, match="Rounds ended"):
        shmacc.save(tmp_path / "checkpoint.npz", {"params": params}, timeout=0)
    assert next(looks) == 2
    with pytest.raises(errors.FailedPreconditionError, match="Rounds ended"):
        shmacc.save(tmp_path / "checkpoint.npz", {"params": params})
    assert not list(tmp_path.iterdir())


def test_an_update_times_out_if_a_stopped_process_holds_the_groups_lock(
    params: Parameters, group: AccumulatorGroup
) -> None:
    with group.round(1) as taken:
        with held("group"), pytest.raises(errors.DeadlineExceededError):
            params.update(taken, timeout=0.05)
        assert (params.step, params["a"].tolist()) == (0, [0] * 3)
        assert params.update(taken)
    assert params["a"].tolist() == [-1] * 3


def test_a_child_cannot_use_its_parents_round(params: Parameters, group: AccumulatorGroup) -> None:
    def update_the_parents(params: Parameters, taken: GroupTaken) -> None:
        with pytest.raises(errors.FailedPreconditionError, match="another process's"):
            params.update(taken)

    with group.round(1) as taken:
        run_apart(update_the_parents, params, taken)
        assert params.step == 0
        assert params.update(taken)


def test_a_coroutines_block_has_one_update(params: Parameters, group: AccumulatorGroup) -> None:
    async def lead() -> None:
        async with group.round_async(1) as taken:
            assert params.update(taken)
            with pytest.raises(errors.FailedPreconditionError, match="has made its update"):
                params.update(taken)

    asyncio.run(lead())
    assert (params.step, group.global_step) == (1, 1)


def test_an_update_after_advance_step_fails(params: Parameters, group: AccumulatorGroup) -> None:
    ended = pytest.raises(errors.FailedPreconditionError, match="ended before its block")
    with ended, group.round(1) as taken:
        group.advance_step(4)
        with pytest.raises(errors.FailedPreconditionError, match="ended before its update"):
            params.update(taken)
    assert (params.step, params["a"].tolist()) == (0, [0] * 3)


def test_other_parameters_cannot_make_a_second_update_in_a_block(
    params: Parameters, group: AccumulatorGroup
) -> None:
    with Parameters({"a": np.zeros(3)}, optimizer=optim.SGD(1)) as others:
        with group.round(1) as taken:
            assert params.update(taken)
            with pytest.raises(errors.FailedPreconditionError, match="has made its update"):
                others.update(taken)
        assert others.step == 0
