"""New parameters with an earlier run's group raise an error, and so does the reverse."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.support import LONG, update_once

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    Parameters,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
    optim,
)

STEPS: Final = 10
MEMBERS: Final = {"w": TensorSpec((3,), "f8"), "loss": TensorSpec((), "f8")}

# Accumulators whose members are written out, and not made by `member_specs`.
OLD: Final[dict[str, Callable[[], Any]]] = {
    "a group": lambda: AccumulatorGroup(MEMBERS, "g"),
    "dense": lambda: ConditionalAccumulator("f8", (3,), "g"),
    "sparse": lambda: SparseConditionalAccumulator("f8", (3,), "g"),
}


def new_parameters(name: str = "p", **options: Any) -> Parameters:
    options.setdefault("if_exists", "replace")
    return Parameters({"w": np.zeros(3)}, name, optimizer=optim.SGD(1.0), **options)


def train(kind: str, *, finish: bool = True) -> None:
    """Train for ten rounds, and keep the names."""
    with new_parameters() as params, OLD[kind]() as acc:
        for step in range(STEPS):
            if kind == "a group":
                acc.apply({"w": np.ones(3), "loss": 1.0}, step)
            elif kind == "sparse":
                acc.apply_grad([0, 1, 2], np.ones(3), local_step=step)
            else:
                acc.apply_grad(np.ones(3), step)
            with acc.round(1, timeout=LONG) as taken:
                params.update({"w": taken["w"] if kind == "a group" else taken})
        if finish:
            acc.finish()


def chief(acc: Any) -> None:
    try:
        while True:
            with acc.round(1, timeout=LONG):
                pass
    except errors.FinishedError:
        pass


async def _all_async(acc: Any) -> list[int]:
    return [step async for step in acc.steps_async(timeout=LONG)]


async def _round_async(acc: Any) -> None:
    async with acc.round_async(1, timeout=LONG):
        pass


# Without an error, each loop would end at once, and the program would exit with status 0.
LOOPS: Final[dict[str, Callable[[Any], Any]]] = {
    "running": lambda acc: acc.running,
    "steps": lambda acc: list(acc.steps(timeout=LONG)),
    "steps_async": lambda acc: asyncio.run(_all_async(acc)),
    "round": chief,
    "take": lambda acc: acc.take(1, timeout=LONG),
    "wait_step": lambda acc: acc.wait_step(STEPS, timeout=LONG),
    "round_async": lambda acc: asyncio.run(_round_async(acc)),
    "take_async": lambda acc: asyncio.run(acc.take_async(1, timeout=LONG)),
}


@pytest.mark.parametrize("kind", OLD)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_finished_runs_group_is_refused_with_new_parameters(kind: str, loop: str) -> None:
    run_apart(train, kind)
    with new_parameters() as params, OLD[kind]() as acc:
        assert (params.step, acc.global_step) == (0, STEPS)
        with pytest.raises(errors.FailedPreconditionError) as told:
            LOOPS[loop](acc)
        for said in ("'g'", "finished", "step 10", "'p'", "step 0", 'if_exists="replace"'):
            assert said in str(told.value)
        acc.unlink()
        params.unlink()


@pytest.mark.parametrize("by", ["attach", "a new name", "the parameters last"])
def test_a_finished_runs_group_is_refused_however_it_was_opened(by: str) -> None:
    run_apart(train, "a group")
    with ExitStack() as stack:
        if by == "the parameters last":
            group = stack.enter_context(AccumulatorGroup(MEMBERS, "g"))
        if by == "attach":
            new_parameters().close()
            params = stack.enter_context(Parameters.attach("p"))
        else:
            params = stack.enter_context(new_parameters("p2" if by == "a new name" else "p"))
        if by != "the parameters last":
            group = stack.enter_context(AccumulatorGroup.attach("g"))
        with pytest.raises(errors.FailedPreconditionError, match="untrained"):
            list(group.steps())
        group.unlink()
        params.unlink()
        if by == "a new name":
            shmacc.inspection.remove("p")


def test_correct_uses_are_not_refused(tmp_path: Path) -> None:
    run_apart(train, "a group")
    with closing(Parameters.attach("p")) as params, AccumulatorGroup(MEMBERS, "g") as group:
        assert not group.running  # these are the parameters that the group trained
        assert list(group.steps()) == []
        shmacc.save(tmp_path / "end", {"params": params, "group": group})
        with new_parameters("other", unlink_on_close=True):
            assert not group.running
    with new_parameters() as params, AccumulatorGroup(MEMBERS, "g") as group:
        shmacc.load(tmp_path / "end", {"params": params, "group": group})  # train on
        assert group.running
        assert (params.step, group.global_step) == (STEPS, STEPS)
        group.finish()
        assert not group.running
        group.unlink()
        params.unlink()


def test_a_finished_run_can_be_continued() -> None:
    run_apart(train, "a group")
    with closing(Parameters.attach("p")) as params, AccumulatorGroup(MEMBERS, "g") as group:
        group.restore(group.state())
        assert group.running
        for step in group.steps(timeout=LONG):
            update_once(params, group, {"w": np.ones(3)})
            if step == STEPS + 2:
                group.finish()
        assert params.step == STEPS + 3
        assert params["w"].tolist() == [-STEPS - 3.0] * 3
        group.unlink()
        params.unlink()


def test_another_model_may_be_trained_in_the_same_process() -> None:
    run_apart(train, "a group")
    with Parameters({"other": np.zeros(3)}) as others, AccumulatorGroup.attach("g") as group:
        assert others.step == 0
        assert not group.running
        group.unlink()
    shmacc.inspection.remove("p")


def test_an_unfinished_runs_group_is_refused_with_new_parameters() -> None:
    """The first update fails, because the group's gradients belong to other parameters."""
    run_apart(lambda: train("a group", finish=False))
    with new_parameters() as params, AccumulatorGroup(MEMBERS, "g") as group:
        assert group.running
        group.apply({"w": np.ones(3)}, group.global_step)
        with (
            pytest.raises(errors.FailedPreconditionError, match="belongs to other parameters"),
            group.round(1) as taken,
        ):
            params.update(taken)
        group.unlink()
        params.unlink()


def test_the_round_of_another_group_is_refused_and_changes_nothing() -> None:
    """For example, rounds of a generator and of a discriminator may both be open."""
    with (
        new_parameters("generator") as one,
        new_parameters("discriminator") as other,
        AccumulatorGroup(other.member_specs()) as group,
    ):
        group.apply({"w": np.ones(3)}, 0)
        with group.round(1) as taken:
            with pytest.raises(errors.FailedPreconditionError, match="'generator': update those"):
                one.update(taken)
            assert (one.step, one["w"].tolist()) == (0, [0.0] * 3)
            other.update(taken)
        assert other["w"].tolist() == [-1.0] * 3
        one.unlink()
        other.unlink()


def test_old_parameters_are_refused_with_a_new_group() -> None:
    run_apart(train, "a group")
    with closing(Parameters.attach("p")) as params:
        with AccumulatorGroup(MEMBERS, "g", if_exists="replace", unlink_on_close=True) as group:
            group.apply({"w": np.ones(3)}, group.global_step)
            with (
                pytest.raises(errors.FailedPreconditionError, match="step"),
                group.round(1) as taken,
            ):
                params.update({"w": taken["w"]})
        params.unlink()
