"""The soak's training: parameters must stay right although workers and chiefs are killed.

Workers apply one gradient a step. One chief at a time has a round, in which it updates the
parameters; the other chiefs stand by. All processes are killed, stopped and replaced at random. Now
and then the power "fails": all workers are killed, and perhaps the segments are lost. Then the run
goes on from a file that a chief has saved; the process that loads the file may be killed, too.

A gradient is a function of its worker, of the step and of the parameters that it was computed
from. Each round has one gradient of each worker. So the parameters are a function of the step, and
one process alone can compute them: whatever was lost, doubled, torn or read too early shows in each
later step. Gradients are small integers, so that sums are the same in any order.

The array "ledger" has a row for each step. A round adds a digit for each worker to its step's row.
So the row shows which gradients were in the round, and how often it changed the parameters.
"""

import random
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from helpers.books import STEPS, Books, Count, Findings
from helpers.soak_campaigns import TAKERS, RandomKills

import shmacc
from shmacc import AccumulatorGroup, Parameters, TensorSpec, errors, optim

_ROWS, _WIDTH, _TOUCHED = 300, 8, 12
_DENSE: Final = 6000
_BASE: Final = 8  # base of the ledger's numbers, which have a digit for each worker
_SKIPPED: Final = 13  # one round in 13 is skipped
_GROUP, _PARAMS = "soak", "soak.parameters"
_TIMEOUT: Final = 0.25  # seconds of each wait, so that the request to stop is noticed
_BETWEEN_FAILURES: Final = 1.0  # seconds between two failures of all power, on the average
_LIFE_OF_A_LOADER: Final = 0.02  # mean seconds until the first loader is killed; others live longer
# Probabilities:
_RAISES: Final = 0.03  # a block raises before its update, and as often after it
_LOOKED_AT: Final = 0.2  # a chief looks at the parameters, after its update
_SAVED: Final = 0.05  # a chief saves everything
_REBOOTED: Final = 0.5  # a power failure loses the segments, too
_TRIED: Final = 0.5  # workers run between two attempts to load

CONTENTS: Final[dict[str, Any]] = {
    "rows": np.ones((_ROWS, _WIDTH), np.float32),
    "dense": np.zeros(_DENSE),
    "whole": np.zeros(16),
    "own": np.zeros(8, np.int64),  # has no optimizer: the chief computes its contents
    "ledger": TensorSpec((STEPS, 1), "float64"),
}
OPTIMIZERS: Final[dict[str, optim.Optimizer]] = {
    "rows": optim.Adagrad(0.5),
    "dense": optim.Adam(0.25),
    "whole": optim.SGD(1.0),
    "ledger": optim.SGD(1.0),
}


def specs(params: Parameters) -> dict[str, Any]:
    """Return the members of the group whose rounds update these parameters."""
    found: dict[str, Any] = params.member_specs(["rows", "ledger"])
    del found["own"]
    return found


def gradient(worker: int, step: int, arrays: Any) -> dict[str, Any]:
    """Return a worker's gradient of that step, as computed from these parameters."""
    rng = np.random.default_rng([worker, step])
    rows = rng.integers(0, _ROWS, _TOUCHED)
    seen = np.floor(arrays["rows"][rows]) % 3
    return {
        "rows": (rows, (rng.integers(-2, 2, (_TOUCHED, _WIDTH)) + seen).astype(np.float32)),
        "dense": np.full(_DENSE, worker + step % 3 - 1) + np.floor(arrays["dense"]) % 2,
        "whole": rng.integers(-3, 3, 16) + arrays["whole"] % 2,
        "ledger": ([step], [[-digit(worker)]]),
    }


def digit(worker: int) -> float:
    """Return what a worker adds to a step's row of the ledger."""
    return float(_BASE**worker)


def update(params: Parameters, taken: Any) -> bool:
    """Update the parameters by a round, or skip the round; return False if that was done before."""
    if skips(taken.step):
        return params.skip(taken)
    return params.update(taken, {"own": params["own"] * 3 + taken.step})


def skips(step: int) -> bool:
    """Whether the round of that step is skipped."""
    return step % _SKIPPED == _SKIPPED - 1


def digest(arrays: Any) -> int:
    """Return a number other than 0 that depends on every bit outside the ledger."""
    found = 1
    for name in CONTENTS:
        if name != "ledger":
            found = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), found)
    return found + 1


def check(books: Books, process: int, step: int, arrays: Any) -> None:
    """Note the digest of the parameters at this step; compare it with an earlier note, if any."""
    ledger, found = arrays["ledger"][:, 0], digest(arrays)
    torn = ledger[step:].any() or int(books.digests[step]) not in {0, found}
    books.add(process, Count.TORN, bool(torn))
    books.digests[step] = found


def reference(workers: int) -> Iterator[Parameters]:
    """Train parameters in this process alone; yield them at the start and after each round."""
    with (
        Parameters(CONTENTS, optimizer=OPTIMIZERS) as params,
        AccumulatorGroup(specs(params), reduction_type="SUM") as group,
    ):
        for step in range(STEPS):
            yield params
            for worker in range(workers):
                group.apply(gradient(worker, step, params), step)
            with group.round(workers) as taken:
                update(params, taken)


class _OopsError(Exception):
    """Leaves a round's block, which gives the round up."""


def _attach() -> tuple[AccumulatorGroup, Parameters]:
    return AccumulatorGroup.attach(_GROUP), Parameters.attach(_PARAMS)


def work(worker: int) -> None:
    """Act as a worker, with the loop that the documentation shows."""
    group, params = _attach()
    with group, params:
        for step in group.steps():
            group.apply(gradient(worker, step, params), step, contributor=worker)


def lead(books: Books, slot: int, workers: int, path: Path) -> None:
    """Act as a chief; stand by while another chief has the round."""
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
    if taken.step >= STEPS - 1:
        books.stop()
        return
    _perhaps_raise()
    books.updating[slot] = 1
    try:
        updated = update(params, taken)
    finally:
        books.updating[slot] = 0
    books.add(slot, Count.UPDATES if updated else Count.FOUND_IN)
    if random.random() < _LOOKED_AT:
        check(books, slot, *params.snapshot())
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
    """Make the segments of a new run if there are none."""
    with Parameters(CONTENTS, _PARAMS, optimizer=OPTIMIZERS) as params:
        AccumulatorGroup(specs(params), _GROUP, reduction_type="SUM").close()


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
        self._processes = RandomKills(books, [*jobs, partial(load, books, self._loader, path)])
        self._next_failure = 0.0
        _create()

    def run(self, seconds: float) -> Findings:
        """Train, then compare the parameters with the reference."""
        self._next_failure = time.monotonic() + random.expovariate(1 / _BETWEEN_FAILURES)
        self._processes.work(seconds, self._finish, self._perhaps_fail, self._loader)
        return self.audit()

    def _finish(self) -> None:
        self._books.stop()
        with AccumulatorGroup.attach(_GROUP) as group:
            group.finish()

    def _perhaps_fail(self) -> None:
        """Simulate a power failure now and then; the run goes on from the file.

        A load is allowed only without workers, so they are killed first. Chiefs may stand by.
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
            self._processes.start(slot)

    def _kill(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._processes.kill(slot)

    def _is_loaded(self, life: float) -> bool:
        """Start a loader, kill it after `life` seconds; return whether it had finished by then."""
        self._processes.start(self._loader)
        ended = self._processes.ends(self._loader, time.monotonic() + life)
        self._books.add(self._loader, Count.IN_LOAD, self._processes.kill(self._loader))
        return ended

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
            check(books, books.own, step, arrays)
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
        digits = [digit(worker) for worker in self._workers]
        skipped = np.array([skips(step) for step in range(len(ledger))], bool)
        whole = np.where(skipped, 0.0, sum(digits))
        often = [ledger // one % digit(1) for one in digits]
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
        seen = zip(self._books.digests[: last + 1], reference(len(self._workers)), strict=False)
        return sum(one not in {0, digest(arrays)} for one, arrays in seen)
