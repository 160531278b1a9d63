"""Helpers that many test modules share: exact comparison, refusals, waiting."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Never

import numpy as np
import pytest
from helpers.numpy_model import Array, Outcome

import shmacc
from shmacc import testing
from shmacc._base import names

SANITIZED: Final = "libasan" in os.environ.get("LD_PRELOAD", "")

# Generous, because a test machine may be starved; no passing test ever waits for this long.
LONG: Final = 600.0 if "san.so" in os.environ.get("LD_PRELOAD", "") else 60.0

# The bound for "at once"; a wait that is not interrupted would last longer.
SOON: Final = 1.0
ATTEMPTS: Final = 10

# Where Linux keeps POSIX shared memory.
SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - no temporary file

# Whether tests judge all instants of an operation, which takes an hour, or only a sample.
EVERY_INSTANT: Final = bool(os.environ.get("SHMACC_EVERY_INSTANT"))

START_METHODS: Final = ("fork", "spawn", "forkserver")


class AlarmError(Exception):
    """What a signal's handler raises."""


def alarm(*_: object) -> Never:
    """Raise `AlarmError`, as a signal's handler or in place of a function."""
    raise AlarmError


class Repeating(dict[str, Any]):
    """A mapping that gives each item twice, like a careless multi-dict."""

    def items(self) -> Any:
        return [*super().items(), *super().items()]


def run_to_end(
    command: Sequence[str | Path],
    *,
    status: int | None = 0,
    timeout: float | None = LONG,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must have this status (None: any); keep its output."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout, **how
    )
    assert status in {None, done.returncode}, done.stdout + done.stderr
    return done


def until(condition: Callable[[], bool], seconds: float = LONG) -> None:
    """Return as soon as the condition holds; fail if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came to hold"
        time.sleep(0.0005)


def soon(measure: Callable[[], float], bound: float = SOON) -> None:
    """Check that one of a few attempts stays below a bound: a busy machine may delay some."""
    measured: list[float] = []
    while not measured or (min(measured) >= bound and len(measured) < ATTEMPTS):
        measured.append(measure())
    assert min(measured) < bound, measured


def slept() -> float:
    """Return the seconds that this thread has slept, plus a constant: subtract two results.

    Time on a core, and time spent waiting for a core, is left out: it depends on the load.
    """
    try:
        on_core, for_core, _ = Path("/proc/thread-self/schedstat").read_text("ascii").split()
    except FileNotFoundError:  # the kernel does not count this time
        return time.monotonic()
    return time.monotonic() - (int(on_core) + int(for_core)) * 1e-9


def stop(*pids: int) -> None:
    """Stop processes; return only when all their threads stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(map(_stands_still, pids)))


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Keep processes stopped within the block."""
    try:
        stop(*pids)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            if (
                thread.joinpath("stat").read_text("ascii", "replace").rpartition(")")[2][1]
                not in "TtZX"
            ):
                return False
    return True


def path_of(name: str) -> Path:
    return Path(names.segment_name(name).path)


def left_behind() -> tuple[str, ...]:
    """Return the names in shared memory that this test has left."""
    return testing.leaked_names(names.current_namespace())


def state_of(one: Any) -> dict[str, bytes]:
    """Return an object's whole state as bytes, for an exact comparison."""
    return {key: saved.tobytes() for key, saved in one.state().items()}


def everything(both: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the states of these objects in one dict, as a save writes them."""
    states = {name: state_of(one) for name, one in both.items()}
    return {
        f"{name}.{key}": saved for name, state in states.items() for key, saved in state.items()
    }


def update_once(params: Any, group: Any, gradient: Any, *values: Any, **more: Any) -> bool:
    """Apply one gradient, and update parameters by its round; return whether they were updated."""
    assert group.apply(gradient, group.global_step)
    with group.round(1, timeout=LONG) as taken:
        return bool(params.update(taken, *values, **more))


def same_bits(got: Any, want: Array) -> None:
    """Assert equal dtype, shape and bytes; all NaNs count as equal."""
    assert isinstance(got, np.ndarray)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert _bits(got) == _bits(want), f"{got!r} is not {want!r}"


def _bits(array: Array) -> bytes:
    plain = np.ascontiguousarray(array)
    if plain.dtype.kind == "c":
        plain = plain.reshape(-1).view(plain.real.dtype)
    if plain.dtype.names is None and plain.dtype.kind not in "iu":
        plain = np.where(np.isnan(plain), plain.dtype.type(np.nan), plain)
    return plain.tobytes()


def same_outcome(got: Any, want: Outcome) -> None:
    """Assert that a ``Taken`` or ``Partial`` equals the model's outcome."""
    assert got.count == want.count
    assert got.step == want.step
    if want.indices is None:
        if want.count:
            same_bits(got.value, want.values)
        return
    assert want.row_counts is not None
    assert want.shape is not None
    same_bits(got.indices, want.indices)
    same_bits(np.asarray(got.row_counts, dtype=np.int64), want.row_counts)
    if want.count:
        same_bits(got.values, want.values)
        same_bits(got.shape, want.shape)


def outcome(acc: Any, apply: Callable[[], bool]) -> Any:
    """Return the result of an apply to an empty accumulator: its error, or the new state."""
    acc.advance_step(acc.global_step + 1)
    try:
        added = apply()
    except shmacc.errors.ShmaccError as error:
        return type(error), str(error), acc.num_accumulated()
    state = {key: np.asarray(value).tolist() for key, value in acc.state().items()}
    del state["step"]
    return added, repr(state)


def same_taken(got: Any, want: Any) -> None:
    """Assert that two takes or partials, of an accumulator or a group, are equal."""
    assert (got.count, got.weight, got.step) == (want.count, want.weight, want.step)
    same_bits(got.contributors, want.contributors)
    if isinstance(want, Mapping):
        assert set(got) == set(want)
        for name, member in want.items():
            same_taken(got[name], member)
        return
    for field in ("indices", "values", "value", "shape", "row_counts"):
        assert hasattr(got, field) == hasattr(want, field)
        if hasattr(want, field):
            same_bits(getattr(got, field), getattr(want, field))


@contextmanager
def refused(message: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an InvalidArgumentError, with exactly this message if it is not None."""
    with pytest.raises(shmacc.errors.InvalidArgumentError) as caught:
        yield caught
    if message is not None:
        assert str(caught.value) == message


@contextmanager
def nothing_changes(acc: Any) -> Iterator[None]:
    """Check that everything visible, the sums included, is the same after the block."""
    before = _seen(acc)
    yield
    assert _seen(acc) == before


def _seen(acc: Any) -> Any:
    stats = acc.stats()
    counters = (acc.num_accumulated(), acc.global_step, stats.applied, stats.dropped, stats.waiting)
    partial = acc.take_partial(0)
    if partial.count == 0:
        return counters, None
    # Put the sums back for the next look; a sealed accumulator would refuse them.
    assert acc.apply_partial(partial, shmacc.NEVER_STALE)
    stats = acc.stats()
    fields = ("value",) if hasattr(partial, "value") else ("indices", "values", "row_counts")
    content = [getattr(partial, name).tolist() for name in fields]
    return (*counters[:2], stats.dropped), content
