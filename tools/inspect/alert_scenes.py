"""Jobs that stand still, or hurt, for each reason that an alert is for; and a healthy one.

Each scene is some processes on a segment of the scene's name. `SCENES` says which alerts it must
raise; the healthy job must raise none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shmacc
from shmacc import errors, inspection

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS: Final = 50_000
WIDTH: Final = 16
FEW: Final = 100
CAPACITY: Final = 4
ANY_PAUSE: Final = 0.05  # seconds
PATIENCE: Final = 60.0
FILLED: Final = 0.95
DEATHS: Final = 5
ENOUGH: Final = 10  # rounds of a short job
HEADER: Final = 8192  # bytes
VERSION: Final = slice(8, 12)
# Not fork: a process that inherits nothing is what users start.
_CONTEXT: Final = multiprocessing.get_context("forkserver")
Accumulator = shmacc.SparseConditionalAccumulator


class Stage:
    """The processes of the scenes, all of which end with it."""

    def __init__(self) -> None:
        """Nobody yet."""
        self._cast: list[Any] = []
        self._files: list[Path] = []
        _CONTEXT.set_forkserver_preload(["numpy", "shmacc", __name__])

    def start(self, role: Callable[..., None], name: str, *arguments: Any) -> Any:
        """Start a process and wait until it is attached."""
        before = _attached(name)
        process = _CONTEXT.Process(target=_play, args=(role, name, *arguments), daemon=True)
        process.start()
        self._cast.append(process)
        wait_until(lambda: _attached(name) > before)
        return process

    def stop(self, process: Any) -> None:
        """Stop a process."""
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: "\nState:\tT" in Path(f"/proc/{process.pid}/status").read_text("ascii"))

    def kill(self, process: Any) -> None:
        """Kill a process."""
        process.kill()
        process.join()

    def write(self, path: Path, content: bytes) -> None:
        """Make a file that ends with the scenes."""
        self._files.append(path)
        path.write_bytes(content)

    def clear(self) -> None:
        """End everything."""
        for process in self._cast:
            with contextlib.suppress(ValueError):
                process.kill()
        for process in self._cast:
            process.join()
        for path in self._files:
            path.unlink(missing_ok=True)
        self._cast.clear()


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("A scene did not come about")
        time.sleep(0.005)


def make(name: str, *, capacity: int | None = None) -> None:
    """Make a segment that nobody has attached."""
    Accumulator(np.float32, [ROWS, WIDTH], name, capacity=capacity).close()


def _attached(name: str) -> int:
    try:
        return inspection.describe(name).stats.attached
    except errors.NotFoundError:
        return -1


def _doing(name: str, activity: str) -> int:
    processes = inspection.describe(name).processes
    return sum(each.alive and each.activity == activity for each in processes)


def _play(role: Callable[..., None], name: str, *arguments: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which leaves in order
    with shmacc.attach(name) as acc:
        role(acc, *arguments)


# -- roles ----------------------------------------------------------------------------------------


def applies(acc: Accumulator, rows: int = FEW, pause: float = 0.0) -> None:
    """Apply for ever, whatever the step."""
    indices, values = np.arange(rows), np.ones((rows, WIDTH), np.float32)
    while True:
        acc.apply_grad(indices, values, local_step=shmacc.NEVER_STALE)
        time.sleep(pause)


def applies_once(acc: Accumulator) -> None:
    """Apply a gradient, then do nothing."""
    _apply(acc)
    signal.pause()


def applies_old_gradients(acc: Accumulator) -> None:
    """Apply gradients that are stale."""
    while True:
        acc.apply_grad([1], np.ones((1, WIDTH), np.float32), local_step=-1)
        time.sleep(ANY_PAUSE)


def works(acc: Accumulator) -> None:
    """Be a worker of a synchronous job."""
    while True:
        step = acc.global_step
        _apply(acc, step)
        acc.wait_step(step)


def waits_for_the_step(acc: Accumulator) -> None:
    """Wait for a step that never comes."""
    acc.wait_step(10**9)


def takes(acc: Accumulator, number: int, pause: float = 0.0) -> None:
    """Take for ever."""
    while True:
        acc.take(number)
        time.sleep(pause)


def takes_once(acc: Accumulator) -> None:
    """Take, then compute for ever."""
    acc.take(1)
    signal.pause()


def has_a_round_open(acc: Accumulator) -> None:
    """Open a round, and stay in it."""
    with acc.round(1):
        signal.pause()


def fails(acc: Accumulator) -> None:
    """Be a worker with a bug."""
    _apply(acc)
    time.sleep(10 * ANY_PAUSE)  # it is seen to be attached
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  it is meant to fail
    raise ValueError("a bad batch")


def _apply(acc: Accumulator, step: int = shmacc.NEVER_STALE) -> None:
    acc.apply_grad([1, 2], np.ones((2, WIDTH), np.float32), local_step=step)


# -- scenes ---------------------------------------------------------------------------------------


def _chief_that_took(stage: Stage, name: str) -> Any:
    chief = stage.start(takes_once, name)
    worker = stage.start(applies_once, name)
    wait_until(lambda: inspection.describe(name).stats.takes == 1)
    stage.kill(worker)
    return chief


def _with_a_gradient(stage: Stage, name: str) -> None:
    make(name)
    worker = stage.start(applies_once, name)
    wait_until(lambda: inspection.describe(name).stats.num_accumulated == 1)
    stage.kill(worker)


def dead_chief(stage: Stage, name: str) -> None:
    """Workers wait for the step of a chief that was killed."""
    make(name)
    chief = _chief_that_took(stage, name)
    for _ in range(3):
        stage.start(waits_for_the_step, name)
    stage.kill(chief)


def absent_chief(stage: Stage, name: str) -> None:
    """Workers wait for the step of a chief that never came."""
    make(name)
    stage.start(waits_for_the_step, name)


def stopped_chief(stage: Stage, name: str) -> None:
    """Workers wait for the step of a chief that is stopped."""
    make(name)
    chief = _chief_that_took(stage, name)
    stage.start(waits_for_the_step, name)
    stage.stop(chief)


def hanging_chief(stage: Stage, name: str) -> None:
    """Workers wait for the step of a chief that lives, and does something else."""
    make(name)
    _chief_that_took(stage, name)
    stage.start(waits_for_the_step, name)


def no_room(stage: Stage, name: str) -> None:
    """Workers wait for the room that a chief which was killed would have made."""
    make(name, capacity=CAPACITY)
    chief = _chief_that_took(stage, name)
    stage.start(applies, name)
    wait_until(lambda: _doing(name, "waits for room") == 1)
    stage.kill(chief)


def too_few_workers(stage: Stage, name: str) -> None:
    """A take waits for more gradients than there are workers; one was killed."""
    make(name)
    stage.start(takes, name, 2)
    worker = stage.start(applies_once, name)
    wait_until(lambda: inspection.describe(name).stats.num_accumulated == 1)
    stage.kill(worker)


def absent_workers(stage: Stage, name: str) -> None:
    """A take waits for workers that never came."""
    make(name)
    stage.start(takes, name, 2)


def stopped_workers(stage: Stage, name: str) -> None:
    """A take waits for workers that are stopped."""
    make(name)
    stage.start(takes, name, 2)
    worker = stage.start(applies_once, name)
    wait_until(lambda: inspection.describe(name).stats.num_accumulated == 1)
    stage.stop(worker)


def stopped_taker(stage: Stage, name: str) -> None:
    """The gradients have arrived for a take that is stopped."""
    make(name)
    taker = stage.start(takes, name, 1)
    wait_until(lambda: _doing(name, "waits in the queue") == 1)
    stage.stop(taker)
    stage.start(applies_once, name)


def stopped_round(stage: Stage, name: str) -> None:
    """A process that has a round open is stopped."""
    _with_a_gradient(stage, name)
    chief = stage.start(has_a_round_open, name)
    wait_until(lambda: inspection.describe(name).round_holder is not None)
    stage.stop(chief)


def open_round(stage: Stage, name: str) -> None:
    """A round stays open: its process is busy with something."""
    _with_a_gradient(stage, name)
    stage.start(has_a_round_open, name)


def stopped_with_the_lock(stage: Stage, name: str) -> None:
    """A process is stopped in the middle of an apply."""
    make(name)
    _caught_with_the_lock(stage, name)


def dying_processes(stage: Stage, name: str) -> None:
    """Processes die in the middle of applies, again and again."""
    make(name)
    stage.start(applies, name, FEW, ANY_PAUSE)
    for _ in range(DEATHS):
        stage.kill(_caught_with_the_lock(stage, name))


def _caught_with_the_lock(stage: Stage, name: str) -> Any:
    process = stage.start(applies, name, ROWS)
    while True:
        stage.stop(process)
        seen = inspection.describe(name)
        if seen.lock.held and seen.lock.in_operation and seen.lock.pid == process.pid:
            return process
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.002)


def straggler(stage: Stage, name: str) -> None:
    """One of two workers sends nothing for a round."""
    make(name)
    stage.start(applies_once, name)
    stage.start(takes, name, 1)
    wait_until(lambda: inspection.describe(name).stats.takes == 1)
    stage.start(takes, name, 3)
    stage.start(applies_once, name)


def failing_worker(stage: Stage, name: str) -> None:
    """An exception ends a worker."""
    make(name)
    stage.start(takes, name, 1, ANY_PAUSE)
    stage.start(fails, name)


def stale_gradients(stage: Stage, name: str) -> None:
    """Most gradients are stale."""
    make(name)
    stage.start(applies_old_gradients, name)


def damaged(stage: Stage, name: str) -> None:
    """Something wrote over a segment."""
    stage.write(Path(inspection.resolve(name).path), b"no segment" * 1000)


def other_version(stage: Stage, name: str) -> None:
    """A segment was made by another version."""
    make(name)
    path = Path(inspection.resolve(name).path)
    with path.open("rb") as file:
        header = bytearray(file.read(HEADER))
    inspection.remove(name)
    header[VERSION] = (1).to_bytes(4, "little")
    stage.write(path, bytes(header))


def orphan(_stage: Stage, name: str) -> None:
    """Nobody uses a segment."""
    make(name)


def split(stage: Stage, name: str) -> None:
    """Somebody removed a segment's file under its users."""
    make(name)
    stage.start(applies_once, name)
    wait_until(lambda: inspection.describe(name).stats.num_accumulated == 1)
    Path(inspection.resolve(name).path).unlink()


def fill_memory(stage: Stage) -> None:
    """Hardly any shared memory is left: after all others, which need some."""
    space = inspection.shared_memory_space()
    size = int(space.free - (1 - FILLED) * space.total)
    stage.write(Path("/dev/shm/filler"), b"\0" * size)  # noqa: S108  that is where it is to be


STANDS_STILL: Final = "ShmaccStandsStill"
SCENES: Final[dict[Callable[[Stage, str], None], set[str]]] = {
    dead_chief: {STANDS_STILL, "ShmaccStepStandsStill"},
    absent_chief: {STANDS_STILL, "ShmaccStepStandsStill"},
    stopped_chief: {STANDS_STILL, "ShmaccStepStandsStill"},
    hanging_chief: {"ShmaccStepStandsStill"},
    no_room: {STANDS_STILL, "ShmaccNoRoom"},
    too_few_workers: {STANDS_STILL, "ShmaccTakeWaitsLong", "ShmaccNoProgress"},
    absent_workers: {STANDS_STILL, "ShmaccTakeWaitsLong", "ShmaccNoProgress"},
    stopped_workers: {STANDS_STILL, "ShmaccTakeWaitsLong", "ShmaccNoProgress"},
    stopped_taker: {STANDS_STILL, "ShmaccTakeWaitsLong", "ShmaccNoProgress"},
    stopped_round: {STANDS_STILL, "ShmaccRoundOpenLong"},
    open_round: {"ShmaccRoundOpenLong"},
    stopped_with_the_lock: {STANDS_STILL, "ShmaccLockHeldLong"},
    dying_processes: {"ShmaccProcessesDie"},
    straggler: {"ShmaccStraggler"},
    failing_worker: {"ShmaccProcessFailed"},
    stale_gradients: {"ShmaccMostGradientsDropped"},
    damaged: {"ShmaccDamaged"},
    other_version: {"ShmaccNotRead"},
    split: {"ShmaccSplit"},
    orphan: {"ShmaccOrphans"},
}


# -- health ---------------------------------------------------------------------------------------


class Healthy:
    """Jobs whose processes come and go, and that get on all the same."""

    def __init__(self, stage: Stage) -> None:
        """Start a synchronous job, and one with back-pressure."""
        self._stage = stage
        make("synchronous")
        make("back-pressure", capacity=CAPACITY)
        self._chief = stage.start(takes, "synchronous", 3)
        self._workers = [stage.start(works, "synchronous") for _ in range(4)]
        stage.start(takes, "back-pressure", 2, ANY_PAUSE)
        for _ in range(2):
            stage.start(applies, "back-pressure")
        self._jobs = 0

    def change(self, *, kill: bool) -> None:
        """Let a worker be replaced, or the chief, or a whole job come and go.

        Args:
            kill: Rather than end a process in order, kill it.
        """
        match random.randrange(3):
            case 0:
                gone = self._workers.pop(0)
                self._end(gone, kill=kill)
                self._workers.append(self._stage.start(works, "synchronous"))
            case 1:
                self._end(self._chief, kill=kill)
                self._chief = self._stage.start(takes, "synchronous", 3)
            case _:
                self._short_job()

    @staticmethod
    def _end(process: Any, *, kill: bool) -> None:
        process.kill() if kill else process.terminate()
        process.join()

    def _short_job(self) -> None:
        self._jobs += 1
        name = f"job-{self._jobs}"
        make(name)
        processes = [self._stage.start(takes, name, 2)]
        processes += [self._stage.start(works, name) for _ in range(2)]
        wait_until(lambda: inspection.describe(name).stats.takes > ENOUGH)
        for process in processes:
            self._end(process, kill=True)
        inspection.remove(name)
