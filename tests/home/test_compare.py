"""`make compare`: its ways train the same, and shmacc's training goes on after each death."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
from shmacc_bench.compare.crew import CHIEF
from shmacc_bench.compare.model import Task
from shmacc_bench.compare.training import EVERY, train

if TYPE_CHECKING:
    from shmacc_bench.compare.training import Run

TARGET = 0.3  # a third of what is to be learnt


@cache
def undisturbed(way: str) -> Run:
    return train(way, target=TARGET)


def losses_of(run: Run) -> dict[int, float]:
    return {step: loss for _, step, loss in run.losses}


@pytest.mark.parametrize("way", ["shmacc_asynchronous", "hogwild"])
def test_an_asynchronous_way_learns(way: str) -> None:
    run = undisturbed(way)
    assert run.stopped is None
    assert run.losses[-1][2] <= TARGET < Task().judge(Task().model())


@pytest.mark.parametrize("way", ["ddp", "queues"])
def test_synchronous_ways_compute_the_same(way: str) -> None:
    run = undisturbed(way)
    assert run.stopped is None
    assert losses_of(run) == pytest.approx(losses_of(undisturbed("shmacc_synchronous")), rel=1e-5)


@pytest.mark.parametrize("victim", [1, CHIEF])
def test_training_by_shmacc_goes_on_after_a_death(victim: int) -> None:
    run = train("shmacc_synchronous", target=TARGET, victim=victim)
    assert run.stopped is None
    assert run.killed is not None
    assert not run.began_again
    all_steps = losses_of(undisturbed("shmacc_synchronous"))
    seen = losses_of(run)
    assert seen == pytest.approx({step: all_steps[step] for step in seen}, rel=1e-5)
    # A chief that dies between update and judgement leaves that judgement out.
    assert len(all_steps) - len(seen) <= 1
    assert max(seen) == max(all_steps)
    assert all(step % EVERY == 0 for step in seen)
