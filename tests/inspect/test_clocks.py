"""Ages are of a clock that nobody sets: whatever the wall clock says, and since when.

docs/inspect.md: "A segment that a job will use after a restart looks unused:
`clean --older-than 2h` spares it".
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.inspect_tool import (
    ask,
    header_of,
    idle,
    path_of,
    run,
    scribble,
    semaphore_of,
    start,
    wait_in_line,
)
from helpers.standing_still import kill
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, inspection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.apart import Crew

HOUR: Final = 3600
NAME: Final = "aged"
# The wall clock of a process, set by so many seconds. Everything else is the system's.
CLOCK: Final = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += atol(getenv("SET_BY"));
    return failed;
}
"""
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
set_by = pytest.mark.parametrize("seconds", [-2 * HOUR, 24 * HOUR])


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that sets it."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "clock.so")


@pytest.fixture(autouse=True)
def segment() -> Iterator[None]:
    """One that nobody has attached."""
    ConditionalAccumulator(np.float32, [2], NAME).close()
    yield
    inspection.remove(NAME, force=True)


def under(clock: str, seconds: int) -> dict[str, Any]:
    """What a process with such a clock has in its environment."""
    return {"LD_PRELOAD": clock, "SET_BY": str(seconds)}


MOMENTS: Final = {"created", "last_used", "attached_at", "last_seen", "since", "at"}


def ages(answer: Any, now: float) -> Iterator[float]:
    """How long ago every moment in an answer was, and every length of time in it."""
    if isinstance(answer, list):
        for each in answer:
            yield from ages(each, now)
    elif isinstance(answer, dict):
        for key, value in answer.items():
            if key in MOMENTS and value is not None:
                yield now - value
            elif key in {"age", "idle"}:
                yield value
            else:
                yield from ages(value, now)


@needs_compiler
@set_by
def test_what_died_a_moment_ago_is_not_old(clock: str, seconds: int, crew: Crew) -> None:
    kill(start(crew, idle, NAME))
    done = ask("clean", "--older-than", "1h", "--yes", **under(clock, seconds))
    assert done["removed"] == []
    (would,) = ask("clean", **under(clock, seconds))["would_remove"]
    found = list(ages(would, time.time() + seconds))
    assert found
    assert all(0 <= age < HOUR for age in found)


@needs_compiler
@set_by
@pytest.mark.parametrize("verb", ["list", "show"])
def test_every_age_is_that_of_the_boots_clock(
    clock: str, seconds: int, verb: str, crew: Crew
) -> None:
    start(crew, wait_in_line, NAME, 3)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    answer = ask(verb, NAME, **under(clock, seconds))
    found = list(ages(answer, time.time() + seconds))
    assert found
    assert all(0 <= age < HOUR for age in found)
    shown = ask("show", NAME, **under(clock, seconds))["processes"]
    assert {round((each["last_seen"] - time.time() - seconds) / HOUR) for each in shown} == {0}


@needs_compiler
@set_by
def test_metrics_of_waits_are_of_the_boots_clock(clock: str, seconds: int, crew: Crew) -> None:
    start(crew, wait_in_line, NAME, 3)
    until(lambda: len(inspection.describe(NAME).line) == 1)
    metrics = ask("metrics", NAME, **under(clock, seconds))["metrics"]
    found = [
        sample["value"]
        for metric in metrics
        if metric["name"].endswith("_seconds")
        for sample in metric["samples"]
    ]
    assert found
    assert all(0 <= value < HOUR for value in found)


_STALLS: Final = """
from shmacc import inspection
from shmacc.inspection import _nobody_takes
_nobody_takes._AFTER_TAKES = _nobody_takes.AT_THE_START = {patience}
import json
print(json.dumps([stall.kind for stall in inspection.describe({name!r}).summary.stalls]))
"""


def wait_for_the_step(name: str) -> None:
    """Wait for a step that never comes."""
    with shmacc.attach(name) as acc:
        acc.wait_step(10**6)


@needs_compiler
@set_by
def test_a_standstill_is_named_when_it_has_lasted_and_not_before(
    clock: str, seconds: int, crew: Crew
) -> None:
    start(crew, wait_for_the_step, NAME)
    until(lambda: inspection.describe(NAME).processes[0].activity == "waits for the step")

    def stalls(patience: float) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _STALLS.format(patience=patience, name=NAME)],
            env={**os.environ, **under(clock, seconds)},
            capture_output=True,
            text=True,
            check=True,
        )
        return list(json.loads(done.stdout))

    assert stalls(HOUR) == []
    assert stalls(0) == ["nobody_takes"]


@needs_compiler
@set_by
def test_leftover_semaphores_are_cleaned_whatever_the_clock_says(clock: str, seconds: int) -> None:
    semaphore = semaphore_of(NAME)
    path_of(NAME).unlink()
    assert ask("clean", "--yes", **under(clock, seconds))["removed"] == [semaphore.name]
    ConditionalAccumulator(np.float32, [2], NAME).close()


_TWO_LOOKS: Final = """
import os, shmacc
from shmacc import inspection
from shmacc_inspect.progress import Course
course = Course(inspection.resolve({name!r}))
course.look(inspection.Look())
os.environ["SET_BY"] = "7200"
print([len(course.look(inspection.Look()).events) for _ in range(2)])
"""


@needs_compiler
def test_events_are_told_once_though_the_clock_is_set(clock: str, crew: Crew) -> None:
    """`watch` tells those of the interval: they are known by their numbers, not by their times."""
    kill(start(crew, idle, NAME))
    with shmacc.attach(NAME):  # which finds the death
        pass
    until(lambda: len(inspection.describe(NAME).events) > 0)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _TWO_LOOKS.format(name=NAME)],
        env={**os.environ, **under(clock, 0)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [0, 0]


def test_times_that_version_2_0_0_has_written_are_read_as_such() -> None:
    """It kept the wall clock's, in the same fields."""
    path = path_of(NAME)
    made = time.time() - 3 * HOUR
    _made_at(path, int(made * 1e9))
    assert inspection.describe(NAME).summary.created == pytest.approx(made, abs=1e-3)


def test_what_is_of_an_earlier_boot_is_as_old_as_this_one() -> None:
    """In a /dev/shm on a disk, segments outlive a boot, whose clock begins anew."""
    _made_at(path_of(NAME), time.monotonic_ns() + 24 * HOUR * 10**9)
    (listed,) = ask("list", NAME)["segments"]
    assert time.time() - listed["created"] == pytest.approx(time.monotonic(), abs=60)


def _made_at(path: Path, moment: int) -> None:
    config = layout.Config.from_buffer_copy(header_of(path))
    config.created_ns = moment
    config.checksum = layout.checksum_of(config)
    scribble(path, 0, bytes(config))
    assert struct.calcsize("q") == layout.Config.created_ns.size
    assert run("list", NAME).returncode == 0
