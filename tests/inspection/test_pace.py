"""`show` and `metrics` report how rounds spent their time, and for which process they waited."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Crew, Pipe
from helpers.inspect_tool import ask, path_of, run, scribble
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, inspection

PAUSE: Final = 0.1  # seconds: many ticks of the coarse clock
TICK: Final = 0.02


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    with ConditionalAccumulator(np.float32, [2], "acc") as it:
        yield it
        it.unlink()


def pace() -> inspection.Pace:
    return inspection.describe("acc").pace


def apply_when_told(contributor: int | None, *, pipe: Pipe) -> None:
    """Apply once for each step that the test sends."""
    acc: Any = shmacc.attach("acc")
    with acc:
        pipe.say()
        while (step := pipe.hear()) is not None:
            acc.apply_grad(np.ones(2, np.float32), local_step=step, contributor=contributor)
            pipe.say()


def take(count: int, how: str = "at once", *, pipe: Pipe) -> None:
    """Take when told, and end the block when told again."""
    acc: Any = shmacc.attach("acc")
    with acc:
        pipe.say()
        while pipe.hear():
            if how == "at once":
                acc.take_grad(count)
            else:
                with acc.round(count):
                    pipe.say()
                    pipe.hear()
            pipe.say()


@pytest.mark.parametrize("how", ["in a block", "at once"])
def test_each_second_counts_in_one_phase(acc: ConditionalAccumulator, crew: Crew, how: str) -> None:
    blocks = how == "in a block"
    chief = crew.start(take, 1, how)
    chief.hear()
    assert pace() == inspection.Pace(0, 0, 0, (), 0, 0, 0)
    began = time.monotonic()
    for step in range(3):
        chief.say("take")
        until(lambda: acc.stats().waiting == 1)
        time.sleep(PAUSE)  # the round waits for a gradient
        acc.apply_grad(np.ones(2, np.float32), local_step=step)
        chief.hear()
        if blocks:
            time.sleep(2 * PAUSE)
            chief.say()
            chief.hear()
        if step < 2:
            time.sleep(3 * PAUSE)
    most = time.monotonic() - began
    spent = pace()
    chief.say(None)
    assert spent.waiting >= 3 * PAUSE - TICK
    assert spent.block >= 3 * 2 * PAUSE - TICK if blocks else spent.block == 0
    assert spent.between >= 2 * 3 * PAUSE - TICK
    assert spent.waiting + spent.block + spent.between <= most + TICK
    shown = run("show", "acc").stdout
    assert re.search(
        r"^time .*% waiting for gradients, .*% in blocks of rounds, ", shown, re.MULTILINE
    )
    phases = {
        sample["labels"]["phase"]: sample["value"]
        for metric in ask("metrics", "acc")["metrics"]
        for sample in metric["samples"]
        if metric["name"] == "shmacc_round_seconds"
    }
    assert phases == {name: getattr(spent, name) for name in ("waiting", "block", "between")}


def test_a_block_that_was_given_up_counts_as_between_rounds(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(np.ones(2, np.float32), local_step=0)
    with suppress(KeyError), acc.round(1):
        time.sleep(PAUSE)
        raise KeyError
    with acc.round(1):
        pass
    assert pace().between >= PAUSE - TICK
    assert pace().block < PAUSE - TICK


@pytest.mark.parametrize("named", [True, False])
def test_the_contributors_that_rounds_wait_for_are_named(
    acc: ConditionalAccumulator, crew: Crew, named: bool
) -> None:
    """Of 3 workers, one is late in 4 rounds, and another in 1 round."""
    workers = [crew.start(apply_when_told, number if named else None) for number in range(3)]
    chief = crew.start(take, 3)
    for process in (*workers, chief):
        process.hear()
    for step in range(5):
        late = 1 if step == 2 else 2
        chief.say("take")
        until(lambda: acc.stats().waiting == 1)
        for worker in (*(one for one in workers if one is not workers[late]), workers[late]):
            if worker is workers[late]:
                time.sleep(PAUSE)
            worker.say(step)
            worker.hear()
        chief.hear()
    first, second = pace().late
    for process in (*workers, chief):
        process.say(None)
    who = [2, 1] if named else [workers[2].pid, workers[1].pid]
    assert [of.contributor if named else of.pid for of in (first, second)] == who
    assert [of.rounds for of in (first, second)] == [4, 1]
    assert first.seconds >= 4 * (PAUSE - TICK)
    assert second.seconds >= PAUSE - TICK
    label = "2" if named else f"pid {workers[2].pid}"
    assert f" {label}: " in run("show", "acc").stdout
    samples = [
        (sample["labels"]["contributor"], sample["value"])
        for metric in ask("metrics", "acc")["metrics"]
        for sample in metric["samples"]
        if metric["name"] == "shmacc_late_rounds"
    ]
    assert samples[0] == (label, 4.0)


def test_the_most_often_late_contributors_are_kept(acc: ConditionalAccumulator, crew: Crew) -> None:
    """A contributor that is late often is not lost among others that are late once."""
    chief = crew.start(take, 2)
    chief.hear()
    process = crew.start(apply_when_told, 0)
    process.hear()
    for step in range(40):
        late = 1000 if step % 2 else step
        chief.say("take")
        until(lambda: acc.stats().waiting == 1)
        process.say(step)
        process.hear()
        time.sleep(0.02)
        acc.apply_grad(np.ones(2, np.float32), local_step=step, contributor=1 + late)
        chief.hear()
    chief.say(None)
    process.say(None)
    found = pace().late
    assert len(found) <= 16
    assert (found[0].contributor, found[0].rounds) == (1001, 20)
    names = [metric["name"] for metric in ask("metrics", "acc")["metrics"]]
    samples = ask("metrics", "acc")["metrics"][names.index("shmacc_late_seconds")]["samples"]
    assert len(samples) == 5


def test_the_largest_age_of_gradients_without_a_step_is_shown(acc: ConditionalAccumulator) -> None:
    """This age is the number of updates since the process's previous gradient."""

    def apply(local_step: int) -> None:
        acc.apply_grad(np.ones(2, np.float32), local_step=local_step)

    apply(shmacc.NEVER_STALE)  # nobody knows when its parameters were read
    for steps in (1, 3, 2):
        acc.set_global_step(acc.global_step + steps)
        apply(shmacc.NEVER_STALE)
    apply(acc.global_step)  # a checked gradient lacks no update
    found = pace()
    assert (found.unchecked, found.unchecked_steps, found.most_unchecked_steps) == (3, 6, 3)
    assert "3 gradients with NEVER_STALE lack at most 2.0 updates" in run("show", "acc").stdout


def test_forged_numbers_of_pace_break_no_verb(acc: ConditionalAccumulator) -> None:
    for content in (b"\0", b"\xff", b"\x7f", b"\x80"):
        scribble(path_of("acc"), layout.PACE, content * (layout.HEADER_USED - layout.PACE))
        for _ in range(2):
            acc.apply_grad(np.ones(2, np.float32), local_step=shmacc.NEVER_STALE)
        with acc.round(2):
            pass
        assert run("show", "acc").returncode == run("metrics", "acc").returncode == 0
