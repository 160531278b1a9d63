"""Training campaigns: workers and chiefs follow a run whose parameters survive them all.

Workers follow the steps, and apply one gradient each; chiefs have rounds, in which they update the
parameters; one of them at a time, the others stand by. Now and then all power fails: all workers
are killed, and perhaps the segments are gone, too; then the run goes on from a file that a chief
has saved, which a process loads that may be killed as well. Everybody else is killed, stopped and
replaced all the while. At the end the parameters are those of a run without any of that, to the
bit; and so is every snapshot that was taken on the way.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors
from shmacc_soak import model
from shmacc_soak.audit import Findings
from shmacc_soak.books import shared
from shmacc_soak.processes import Processes

if TYPE_CHECKING:
    import numpy.typing as npt

    from shmacc_soak.campaign import Effort

_GROUP, _PARAMS = "soak", "soak.parameters"
_TIMEOUT: Final = 0.25  # of all waits, so that the request to stop is noticed
_PAUSE: Final = 0.002  # seconds
_STOP_SHARE: Final = 0.1  # the share of stops among stops and kills
_BETWEEN_FAILURES: Final = 1.0  # seconds between two failures of all power, on the average
_LIFE_OF_A_LOADER: Final = 0.02  # seconds; it is longer with each attempt
# So often:
_RAISES: Final = 0.03  # a block raises, before its update and after it
_LOOKED_AT: Final = 0.2  # a chief looks at the parameters, after its update
_SAVED: Final = 0.05  # it saves everything
_REBOOTED: Final = 0.5  # a failure takes the segments, too
_TRIED: Final = 0.5  # workers work in between two attempts to load


class _OopsError(Exception):
    """In a round's block."""


class Tally(IntEnum):
    """What a process counts."""

    UPDATES = 0
    FOUND_IN = 1  # rounds that were in the parameters already
    RAISED = 2  # blocks
    SAVES = 3
    LOADS = 4
    REFUSED = 5  # updates, for the parameters were loaded in part
    TORN = 6  # snapshots that are not what they were before at that step


class Books:
    """The accounts of one campaign, which outlive its processes."""

    def __init__(self, processes: int) -> None:
        self.digests = shared(model.STEPS, np.int64)
        self.updating = shared(processes, np.uint8)  # a chief that is in an update
        self.tally = {what: shared(processes, np.int64) for what in Tally}
        self.loads = shared(1, np.int64)  # begun; odd: one is to be made
        self.stop = shared(1, np.uint8)

    def check(self, slot: int, step: int, arrays: Any) -> None:
        """Note what the parameters are at that step, or compare."""
        ledger = arrays["ledger"][:, 0]
        found = model.digest(arrays)
        torn = ledger[step:].any() or int(self.digests[step]) not in {0, found}
        self.tally[Tally.TORN][slot] += bool(torn)
        self.digests[step] = found


def _attach() -> tuple[AccumulatorGroup, Parameters]:
    return AccumulatorGroup.attach(_GROUP), Parameters.attach(_PARAMS)


def work(worker: int) -> None:
    """Be a worker: the loop of the documentation."""
    group, params = _attach()
    with group, params:
        for step in group.steps():
            group.apply(model.gradient(worker, step, params), step, contributor=worker)


def lead(books: Books, slot: int, workers: int, path: Path) -> None:
    """Be a chief, or stand by."""
    random.seed()
    group, params = _attach()
    with group, params:
        while not books.stop[0]:
            loads = int(books.loads[0])
            try:
                with group.round(workers, timeout=_TIMEOUT) as taken:
                    _update(books, slot, params, taken)
                    if random.random() < _SAVED:
                        shmacc.save(path, {"group": group, "params": params})
                        books.tally[Tally.SAVES][slot] += 1
            except (errors.DeadlineExceededError, errors.FinishedError):
                pass
            except _OopsError:
                books.tally[Tally.RAISED][slot] += 1
            except errors.FailedPreconditionError:
                if loads % 2 == 0 and loads == books.loads[0]:
                    raise
                books.tally[Tally.REFUSED][slot] += 1


def _update(books: Books, slot: int, params: Parameters, taken: Any) -> None:
    step = taken.step
    if step >= model.STEPS - 1:
        books.stop[0] = 1
        return
    _perhaps_raise()
    books.updating[slot] = 1
    try:
        if model.skips(step):
            updated = params.skip(taken)
        else:
            updated = params.update(taken, {"own": model.own(params, step)})
    finally:
        books.updating[slot] = 0
    books.tally[Tally.UPDATES if updated else Tally.FOUND_IN][slot] += 1
    if random.random() < _LOOKED_AT:
        books.check(slot, *params.snapshot())
    _perhaps_raise()


def _perhaps_raise() -> None:
    if random.random() < _RAISES:
        raise _OopsError


def load(books: Books, slot: int, path: Path) -> None:
    """Go on from the file, if there is one."""
    _create()
    group, params = _attach()
    with group, params:
        if path.exists():
            shmacc.load(path, {"group": group, "params": params})
            books.tally[Tally.LOADS][slot] += 1


def _create() -> None:
    """Make the segments, as they are at the run's beginning, unless they are there."""
    with Parameters(model.CONTENTS, _PARAMS, optimizer=model.OPTIMIZERS) as params:
        specs = params.member_specs(model.SPARSE)
        del specs["own"]
        AccumulatorGroup(specs, _GROUP, reduction_type="SUM").close()


class Training:
    """A run, for some seconds."""

    title = "parameters, updated by chiefs in rounds"

    def __init__(self, effort: Effort) -> None:
        """Make group and parameters; `run` removes them."""
        self._effort = effort
        self._directory = tempfile.TemporaryDirectory(prefix="shmacc-soak-")
        path = Path(self._directory.name) / "checkpoint.npz"
        size = effort.workers + effort.takers + 1
        self._loader = size - 1
        self._books = books = Books(size)
        jobs = [partial(work, worker) for worker in range(effort.workers)]
        jobs += [
            partial(lead, books, slot, effort.workers, path)
            for slot in range(effort.workers, self._loader)
        ]
        self._processes = Processes([*jobs, partial(load, books, self._loader, path)])
        self._in_updates = self._cut_loads = 0
        _create()

    def run(self, seconds: float) -> Findings:
        """Carry it out, and hold the parameters against the reference."""
        processes, end = self._processes, time.monotonic() + seconds
        failure = time.monotonic() + random.expovariate(1 / _BETWEEN_FAILURES)
        try:
            self._start(range(self._loader))
            while time.monotonic() < end and not self._books.stop[0]:
                time.sleep(random.expovariate(1 / self._effort.pause))
                processes.continue_those_due()
                self._hit(random.randrange(self._loader))
                if time.monotonic() > failure:
                    self._fail()
                    failure = time.monotonic() + random.expovariate(1 / _BETWEEN_FAILURES)
            while processes.any_stopped:
                time.sleep(_PAUSE)
                processes.continue_those_due()
            self._books.stop[0] = 1
            with AccumulatorGroup.attach(_GROUP) as group:
                group.finish()
            processes.wait_for_all()
        finally:
            for slot in range(len(processes)):
                processes.kill(slot)
        return self.audit()

    def _start(self, slots: range) -> None:
        for slot in slots:
            self._processes.start(slot)

    def _hit(self, slot: int) -> None:
        if not (random.random() < _STOP_SHARE and self._processes.stop_for_a_while(slot)):
            self._kill(slot)
            self._processes.start(slot)

    def _kill(self, slot: int) -> None:
        if self._processes.kill(slot):
            self._in_updates += int(self._books.updating[slot])
            self._books.updating[slot] = 0

    def _fail(self) -> None:
        """All power fails; the run goes on from the file.

        A load is for a run's beginning: there are no workers meanwhile. Chiefs may stand by.
        """
        workers, chiefs = range(self._effort.workers), range(self._effort.workers, self._loader)
        rebooted = random.random() < _REBOOTED
        self._books.loads[0] += 1
        for slot in [*workers, *(chiefs if rebooted else ())]:
            self._kill(slot)
        if rebooted:
            for one in _attach():
                with one:
                    one.unlink()
        life = _LIFE_OF_A_LOADER
        while not self._is_loaded(random.expovariate(1 / life)):
            life *= 1.5
            if random.random() < _TRIED and self._is_there():
                self._start(workers)
                time.sleep(random.expovariate(1 / _LIFE_OF_A_LOADER))
                for slot in workers:
                    self._kill(slot)
        self._books.loads[0] += 1
        self._start(workers)
        if rebooted:
            self._start(chiefs)

    def _is_loaded(self, life: float) -> bool:
        """Start a loader that is killed at the end of its life; whether it has ended before."""
        processes = self._processes
        processes.start(self._loader)
        deadline = time.monotonic() + life
        ended = None
        while ended is None and time.monotonic() < deadline:
            processes.continue_those_due()
            ended = processes.wait(self._loader, min(deadline, time.monotonic() + _PAUSE))
        processes.failed += ended is False
        self._cut_loads += processes.kill(self._loader)
        return ended is not None

    @staticmethod
    def _is_there() -> bool:
        try:
            for one in _attach():
                one.close()
        except errors.NotFoundError:
            return False
        return True

    def audit(self) -> Findings:
        """Remove group and parameters, and hold what they were against the reference."""
        self._directory.cleanup()
        group, params = _attach()
        with group, params:
            step, arrays = params.snapshot()
            self._books.check(self._loader, step, arrays)
            at = group.global_step
            miscounted = not (step == at or (group.stats().update == "in" and step == at + 1))
            params.unlink()
            group.unlink()
        counted = self._counted(arrays["ledger"][:step, 0])
        tally = {what: int(self._books.tally[what].sum()) for what in Tally}
        counts = {
            "processes killed": self._processes.kills,
            "processes stopped for a while": self._processes.stops,
            "rounds given up": tally[Tally.RAISED],
            "snapshots looked at": int(np.count_nonzero(self._books.digests)),
            "rounds in trained parameters": step,
            "updates of parameters": tally[Tally.UPDATES],
            "  that were in already": tally[Tally.FOUND_IN],
            "  processes killed in one": self._in_updates,
            "files saved": tally[Tally.SAVES],
            "files loaded": tally[Tally.LOADS],
            "  processes killed in that": self._cut_loads,
            "  updates refused meanwhile": tally[Tally.REFUSED],
            "torn": tally[Tally.TORN] + self._wrong(),
            "miscounted": int(miscounted),
            "failed": self._processes.failed,
        }
        return Findings(Counter(counts | counted))

    def _counted(self, ledger: npt.NDArray[Any]) -> dict[str, int]:
        """Read the ledger: which rounds and gradients are in the parameters, and how often."""
        digits = [model.digit(worker) for worker in range(self._effort.workers)]
        skipped = np.array([model.skips(step) for step in range(len(ledger))], bool)
        whole = np.where(skipped, 0.0, sum(digits))
        often = [ledger // digit % model.digit(1) for digit in digits]
        twice = (ledger == 2 * sum(digits)) | (skipped & (ledger != 0))
        never = ~skipped & (ledger == 0)
        others = (ledger != whole) & ~twice & ~never
        doubled = np.any([of_worker > 1 for of_worker in often], axis=0)
        return {
            "updated twice": int(np.count_nonzero(twice)),
            "not updated": int(np.count_nonzero(never)),
            "doubled": int(np.count_nonzero(others & doubled)),
            "lost": int(np.count_nonzero(others & ~doubled)),
        }

    def _wrong(self) -> int:
        """How many of the snapshots are not the reference's."""
        reference, wrong = model.Reference(self._effort.workers), 0
        last = int(np.max(np.flatnonzero(self._books.digests), initial=0))
        for step in range(last + 1):
            seen = int(self._books.digests[step])
            wrong += seen not in {0, model.digest(reference.arrays)}
            reference.advance()
        return wrong
