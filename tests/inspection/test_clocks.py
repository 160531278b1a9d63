"""Ages do not depend on the wall clock. `clean --older-than` counts from a segment's last use.

docs/inspect.md: "A segment that a job will use after a restart looks unused:
`clean --older-than 2h` spares it".
"""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers import standing_still as job
from helpers.apart import Crew
from helpers.inspect_tool import ask, header_of, path_of, scribble, semaphore_of
from helpers.support import run_to_end, until

import shmacc
from shmacc import ConditionalAccumulator, inspection

HOUR: Final = 3600
# Shifts the wall clock of a process by SET_BY seconds. All other clocks stay right.
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
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "clock.so")


@pytest.fixture(autouse=True)
def segment() -> Iterator[None]:
    ConditionalAccumulator(np.float32, [2], job.NAME).close()
    yield
    if path_of(job.NAME).exists():
        inspection.remove(job.NAME, force=True)


def under(clock: str, seconds: int) -> dict[str, Any]:
    """Return the environment of a process whose wall clock is shifted."""
    return {"LD_PRELOAD": clock, "SET_BY": str(seconds)}


def python(script: str, environment: dict[str, str]) -> Any:
    done = run_to_end(
        [sys.executable, "-P", "-c", f"name = {job.NAME!r}\n{script}"],
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout)


MOMENTS: Final = {"created", "last_used", "attached_at", "last_seen", "since", "at"}


def ages(answer: Any, now: float) -> Iterator[float]:
    """Yield every age and every length of time in an answer."""
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
def test_ages_are_right_when_the_wall_clock_is_wrong(clock: str, seconds: int, crew: Crew) -> None:
    taker = job.begin(crew, job.take(3))
    until(lambda: len(inspection.describe(job.NAME).queue) == 1)
    how = under(clock, seconds)
    shown, metrics = ask("show", job.NAME, **how), ask("metrics", job.NAME, **how)["metrics"]
    times = [each["samples"] for each in metrics if each["name"].endswith("_seconds")]
    assert times
    assert all(0 <= sample["value"] < HOUR for samples in times for sample in samples)
    of_processes = {
        round((each["last_seen"] - time.time() - seconds) / HOUR) for each in shown["processes"]
    }
    assert of_processes == {0}
    job.kill(taker)
    assert ask("clean", "--older-than", "1h", "--yes", **how)["removed"] == []
    (would,) = ask("clean", **how)["would_remove"]
    for answer in (shown, ask("list", job.NAME, **how), would):
        found = list(ages(answer, time.time() + seconds))
        assert found
        assert all(0 <= age < HOUR for age in found)
    # A semaphore without its segment is removed, too, whatever the clock says.
    semaphore = semaphore_of(job.NAME)
    path_of(job.NAME).unlink()
    assert ask("clean", "--yes", **how)["removed"] == [semaphore.name]


_STALLS: Final = """
import json
from shmacc import inspection
from shmacc.inspection import _stall_facts
found = []
for patience in (3600, 0):
    _stall_facts.AFTER_TAKES = _stall_facts.AT_THE_START = patience
    found.append([stall.kind for stall in inspection.describe(name).summary.stalls])
print(json.dumps(found))
"""


@needs_compiler
@set_by
def test_standstills_ignore_a_wrong_wall_clock(clock: str, seconds: int, crew: Crew) -> None:
    job.begin(crew, job.wait_for_ever)
    until(lambda: job.doing("waits for the step") == 1)
    assert python(_STALLS, under(clock, seconds)) == [[], ["nobody_takes"]]


_TWO_LOOKS: Final = """
import os
from shmacc import inspection
from shmacc_inspect.progress import Course
course = Course(inspection.resolve(name))
course.look(inspection.Look())
os.environ["SET_BY"] = "7200"
print([len(course.look(inspection.Look()).events) for _ in range(2)])
"""


@needs_compiler
def test_events_are_shown_once_when_the_wall_clock_is_set(clock: str, crew: Crew) -> None:
    """`watch` identifies events by their numbers, not by their times."""
    job.kill(job.begin(crew, job.pause))
    with shmacc.attach(job.NAME):  # attaching finds the death
        pass
    until(lambda: len(inspection.describe(job.NAME).events) > 0)
    assert python(_TWO_LOOKS, under(clock, 0)) == [0, 0]


def test_a_dead_process_did_not_take_before_it_attached(crew: Crew) -> None:
    """Takes are timed by a coarse clock, in units of 67 ms."""
    with shmacc.attach(job.NAME) as acc:
        for _ in range(3):
            job.apply(acc)
            crew.start(
                job.do, job.NAME, job.take(1), lambda _: os.kill(os.getpid(), signal.SIGKILL)
            ).wait()
    with shmacc.attach(job.NAME):  # attaching records the deaths
        pass
    departed = inspection.describe(job.NAME).departed
    assert len(departed) == 3
    for each in departed:
        assert each.last_took is not None
        assert each.last_took >= each.attached_at


def test_a_segment_from_before_the_boot_is_as_old_as_the_boot() -> None:
    """A /dev/shm on a disk survives a boot, but the clock since boot starts again at 0."""
    _made_at(time.monotonic_ns() + 24 * HOUR * 10**9)
    (listed,) = ask("list", job.NAME)["segments"]
    assert time.time() - listed["created"] == pytest.approx(time.monotonic(), abs=60)


def _made_at(moment: int) -> None:
    config = layout.Config.from_buffer_copy(header_of(path_of(job.NAME)))
    config.created_ns = moment
    config.checksum = layout.checksum_of(config)
    scribble(path_of(job.NAME), 0, bytes(config))


def test_older_than_counts_from_the_last_use(crew: Crew, namespace: str) -> None:
    up = time.monotonic()  # a segment's times count from this boot
    _made_at(int(0.1 * up * 1e9))
    older = "--older-than", f"{int(0.7 * up)}s"
    (leftover,) = inspection.leftovers(namespace=namespace)
    assert leftover.age > 0.9 * up > 0.1 * up > leftover.idle
    assert ask("clean", *older)["would_remove"] == []
    moment = struct.pack("<q", int(0.2 * up * 1e9))
    for entry in range(2):
        place = layout.region("participants") + entry * 128
        for field in (layout.Participant.attached_ns, layout.Participant.seen_ns):
            scribble(path_of(job.NAME), place + field.offset, moment)
    (would,) = ask("clean", *older)["would_remove"]
    assert 0.8 * up < would["idle"] < would["age"]
    (listed,) = ask("list", job.NAME)["segments"]
    assert time.time() - listed["last_used"] == pytest.approx(would["idle"], abs=60)
    job.once(crew, lambda _: None)  # a process that leaves normally has used it
    assert inspection.leftovers(namespace=namespace)[0].idle < 0.1 * up
    assert ask("clean", *older, "--yes")["removed"] == []


def _in_a_time_namespace(offset: int) -> tuple[str, ...]:
    before = "unshare", "--time", "--fork", "--monotonic", str(offset), "--boottime", str(offset)
    tried = subprocess.run([*before, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs time namespaces: {tried.stderr.decode()}")
    return before


_USER: Final = """
import sys, shmacc
with shmacc.attach(sys.argv[1]) as acc:
    acc.apply_grad([1, 2])
    print("applied", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("offset", [100_000, 5_000_000, -60])
def test_times_are_right_across_time_namespaces(offset: int) -> None:
    """The segment's user, the command, or both may run where the clock since boot is shifted."""
    before = _in_a_time_namespace(offset)
    for of_user, of_command in ((before, ()), ((), before), (before, before)):
        command = [*of_user, sys.executable, "-P", "-c", _USER, job.NAME]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as user:
            assert user.stdin is not None
            assert user.stdout is not None
            assert user.stdout.readline() == "applied\n"
            shown = ask("show", job.NAME, before=of_command)
            for age in ages(shown, time.time()):
                assert -1 < age < HOUR
            (process,) = shown["processes"]
            assert process["pid_is_here"]
            assert process["condition"] in {"sleeping", "running"}
            assert "attach" in process["command"]
            assert abs(process["started"] - process["attached_at"]) < HOUR
            assert ask("clean", "--older-than", "1h", before=of_command)["would_remove"] == []
            user.stdin.close()
