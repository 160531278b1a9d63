"""Training campaigns: the parameters survive all workers and chiefs.

Workers apply one gradient a step. One chief at a time has a round, in which it updates the
parameters; the others stand by. All of them are killed, stopped and replaced at random. Now and
then the power fails: all workers are killed, and perhaps the segments are lost. Then the run goes
on from a file that a chief has saved; the process that loads it may be killed, too. In the end the
parameters, and every snapshot taken on the way, are those of an undisturbed run, to the bit.
"""

from __future__ import annotations

import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors
from shmacc_soak import model
from shmacc_soak.books import Books, Count
from shmacc_soak.crew import TAKERS, Crew

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from shmacc_soak.books import Findings

_GROUP, _PARAMS = "soak", "soak.parameters"
_TIMEOUT: Final = 0.25  # seconds of each wait, so that the request to stop is noticed
_BETWEEN_FAILURES: Final = 1.0  # seconds between two failures of all power, on the average
_LIFE_OF_A_LOADER: Final = 0.02  # mean seconds until the first is killed; later ones live longer
# Probabilities:
_RAISES: Final = 0.03  # a block raises before its update; likewise after it
_LOOKED_AT: Final = 0.2  # a chief looks at the parameters, after its update
_SAVED: Final = 0.05  # a chief saves everything
_REBOOTED: Final = 0.5  # the segments are lost in a failure, too
_TRIED: Final = 0.5  # workers run between two attempts to load


class _OopsError(Exception):
    """Raised in a round's block."""


def _attach() -> tuple[AccumulatorGroup, Parameters]:
    return AccumulatorGroup.attach(_GROUP), Parameters.attach(_PARAMS)


def work(worker: int) -> None:
    """Act as a worker, with the loop that the documentation shows."""
    group, params = _attach()
    with group, params:
        for step in group.steps():
            group.apply(model.gradient(worker, step, params), step, contributor=worker)


def lead(books: Books, slot: int, workers: int, path: Path) -> None:
    """Act as a chief, or stand by."""
    random.seed()
    group, params = _attach()
    with group, params:
        while not books.stopping:
            loads = int(books.loads[0])
            try:
                with group.round(workers, timeout=_TIMEOUT) as taken:
                    _update(books, slot, params, taken)
                    if random.random() < _SAVED:
                        shmacc.save(path, {"group": group, "params": params})
                        books.add(slot, Count.SAVES)
            except (errors.DeadlineExceededError, errors.FinishedError):
                pass
            except _OopsError:
                books.add(slot, Count.GIVEN_UP)
            except errors.FailedPreconditionError:
                if loads % 2 == 0 and loads == books.loads[0]:
                    raise
                books.add(slot, Count.NOT_LOADED)


def _update(books: Books, slot: int, params: Parameters, taken: Any) -> None:
    if taken.step >= model.STEPS - 1:
        books.stop()
        return
    _perhaps_raise()
    books.updating[slot] = 1
    try:
        updated = model.update(params, taken)
    finally:
        books.updating[slot] = 0
    books.add(slot, Count.UPDATES if updated else Count.FOUND_IN)
    if random.random() < _LOOKED_AT:
        books.check_parameters(slot, *params.snapshot())
    _perhaps_raise()


def _perhaps_raise() -> None:
    if random.random() < _RAISES:
        raise _OopsError


def load(books: Books, slot: int, path: Path) -> None:
    """Load the file, if there is one."""
    _create()
    group, params = _attach()
    with group, params:
        if path.exists():
            shmacc.load(path, {"group": group, "params": params})
            books.add(slot, Count.LOADS)


def _create() -> None:
    """Make the segments of a new run, unless they are there."""
    with Parameters(model.CONTENTS, _PARAMS, optimizer=model.OPTIMIZERS) as params:
        AccumulatorGroup(model.specs(params), _GROUP, reduction_type="SUM").close()


class Training:
    """A training run that lasts some seconds."""

    title = "parameters, updated by chiefs in rounds"

    def __init__(self, workers: int) -> None:
        """Make group and parameters; `run` removes them."""
        self._directory = tempfile.TemporaryDirectory(prefix="shmacc-soak-")
        path = Path(self._directory.name) / "checkpoint.npz"
        self._workers = range(workers)
        self._chiefs = range(workers, workers + TAKERS)
        self._loader = self._chiefs.stop
        self._books = books = Books(self._loader + 1)
        jobs = [partial(work, worker) for worker in self._workers]
        jobs += [partial(lead, books, slot, workers, path) for slot in self._chiefs]
        self._crew = Crew(books, [*jobs, partial(load, books, self._loader, path)])
        self._next_failure = 0.0
        _create()

    def run(self, seconds: float) -> Findings:
        """Train, then compare the parameters with the reference."""
        self._next_failure = time.monotonic() + random.expovariate(1 / _BETWEEN_FAILURES)
        self._crew.work(seconds, self._finish, self._perhaps_fail, self._loader)
        return self.audit()

    def _finish(self) -> None:
        self._books.stop()
        with AccumulatorGroup.attach(_GROUP) as group:
            group.finish()

    def _perhaps_fail(self) -> None:
        """Simulate a power failure now and then; the run goes on from the file.

        Only a load without workers is allowed, so they are killed first. Chiefs may stand by.
        """
        if time.monotonic() < self._next_failure:
            return
        rebooted = random.random() < _REBOOTED
        gone = [*self._workers, *(self._chiefs if rebooted else ())]
        self._books.loads[0] += 1
        self._kill(gone)
        if rebooted:
            for one in _attach():
                with one:
                    one.unlink()
        life = _LIFE_OF_A_LOADER
        while not self._is_loaded(random.expovariate(1 / life)):
            life *= 1.5
            if random.random() < _TRIED and self._is_there():
                self._start(self._workers)
                time.sleep(random.expovariate(1 / _LIFE_OF_A_LOADER))
                self._kill(self._workers)
        self._books.loads[0] += 1
        self._start(gone)
        self._next_failure = time.monotonic() + random.expovariate(1 / _BETWEEN_FAILURES)

    def _start(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._crew.start(slot)

    def _kill(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._crew.kill(slot)

    def _is_loaded(self, life: float) -> bool:
        """Start a loader, and kill it after `life` seconds; return whether it ended before."""
        self._crew.start(self._loader)
        ended = self._crew.wait(self._loader, time.monotonic() + life)
        self._books.add(self._loader, Count.IN_LOAD, self._crew.kill(self._loader))
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
        """Compare the parameters with the reference, and remove the segments."""
        self._directory.cleanup()
        books = self._books
        group, params = _attach()
        with group, params:
            step, arrays = params.snapshot()
            books.check_parameters(books.own, step, arrays)
            at = group.global_step
            right = step == at or (group.stats().update == "in" and step == at + 1)
            params.unlink()
            group.unlink()
        for what, number in {
            Count.SNAPSHOTS: int(np.count_nonzero(books.digests)),
            Count.ROUNDS: step,
            Count.TORN: self._wrong(),
            Count.MISCOUNTED: not right,
            **self._counted(arrays["ledger"][:step, 0]),
        }.items():
            books.add(books.own, what, number)
        return books.findings()

    def _counted(self, ledger: npt.NDArray[Any]) -> dict[Count, int]:
        """Read the ledger: which rounds and gradients are in the parameters, and how often."""
        digits = [model.digit(worker) for worker in self._workers]
        skipped = np.array([model.skips(step) for step in range(len(ledger))], bool)
        whole = np.where(skipped, 0.0, sum(digits))
        often = [ledger // digit % model.digit(1) for digit in digits]
        twice = (ledger == 2 * sum(digits)) | (skipped & (ledger != 0))
        never = ~skipped & (ledger == 0)
        others = (ledger != whole) & ~twice & ~never
        doubled = np.any([of_worker > 1 for of_worker in often], axis=0)
        return {
            Count.UPDATED_TWICE: int(np.count_nonzero(twice)),
            Count.NOT_UPDATED: int(np.count_nonzero(never)),
            Count.DOUBLED: int(np.count_nonzero(others & doubled)),
            Count.LOST: int(np.count_nonzero(others & ~doubled)),
        }

    def _wrong(self) -> int:
        """Count the snapshots that differ from the reference."""
        last = int(np.max(np.flatnonzero(self._books.digests), initial=0))
        seen = zip(
            self._books.digests[: last + 1], model.reference(len(self._workers)), strict=False
        )
        return sum(one not in {0, model.digest(arrays)} for one, arrays in seen)
