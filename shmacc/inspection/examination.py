"""A close look into a segment: its rows, its values, and every invariant that can be verified.

Nothing here takes the lock. Bytes are copied out, and it is then seen whether the committed state
was the same before and after, with no operation running: only then is the picture a still one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shmacc import _core, dtypes, names
from shmacc.errors import DataLossError, NotFoundError, PermissionDeniedError, ShmaccError
from shmacc.inspection.segments import REGIONS, describe, open_view, resolve
from shmacc.names import SegmentName
from shmacc.records import IndexArray, ValueArray

_T = TypeVar("_T")
_ATTEMPTS = 5
_SLOTS_REGION = REGIONS.index("slots")
_ROWS_REGION = REGIONS.index("rows 0")
_INDEX_REGION = REGIONS.index("index 0")
_BUCKET = np.dtype([("tags", "<u2", 10), ("stamp", "<u4"), ("slots", "<u4", 10)])


@dataclass(frozen=True, slots=True)
class RowCount:
    """A row and how many gradients of this round touched it."""

    row: int
    count: int


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """The round's sums, without taking anything.

    Attributes:
        numbers: How many there are.
        norm: Euclidean norm of the finite ones.
        largest: Largest magnitude of a finite one.
        nan: How many are NaN.
        infinite: How many are infinite.
        still: False if gradients kept arriving while they were read.
    """

    numbers: int
    norm: float
    largest: float
    nan: int
    infinite: int
    still: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong.

    Attributes:
        subject: The file or part of it.
        problem: What is wrong.
        remedy: What to do.
    """

    subject: str
    problem: str
    remedy: str


def most_touched(name: str, how_many: int) -> tuple[tuple[RowCount, ...], bool]:
    """The rows of a sparse accumulator that most gradients touched, and whether they stood still.

    Raises:
        NotFoundError: There is no segment of that name.
        DataLossError: It is damaged.
        PermissionDeniedError: It is not this user's to read.
    """
    with open_view(resolve(name)) as handle:
        (rows, counts), still = _still(handle, lambda state: _slots(handle, state))
    order = np.lexsort((rows, -counts))[:how_many]
    return tuple(RowCount(int(rows[i]), int(counts[i])) for i in order), still


def summarise_values(name: str) -> ValueSummary:
    """Norm, largest, NaN and infinite numbers of the round's sums; errors as `most_touched`."""
    with open_view(resolve(name)) as handle:
        dtype = dtypes.by_number(handle.config()["dtype"])
        if dtype is None:
            raise DataLossError(f"{name}: unknown dtype")
        sums, still = _still(handle, lambda state: _sums(handle, state, dtype))
    numbers = sums.view(dtype.partial)
    finite = np.abs(numbers[np.isfinite(numbers)].astype(np.complex128))
    return ValueSummary(
        numbers=numbers.size,
        norm=float(np.sqrt(np.sum(finite**2))),
        largest=float(finite.max()) if finite.size else 0.0,
        nan=int(np.count_nonzero(np.isnan(numbers))),
        infinite=int(np.count_nonzero(np.isinf(numbers))),
        still=still,
    )


def check(name: str) -> tuple[Finding, ...]:
    """Verifies every invariant of a segment that can be verified; changes nothing.

    Raises:
        NotFoundError: There is no segment of that name.
    """
    segment_name = resolve(name)
    try:
        with open_view(segment_name) as handle:
            return tuple(_check(segment_name, handle))
    except NotFoundError:
        raise
    except PermissionDeniedError as error:
        return (Finding(segment_name.system_name, str(error), "run as its owner or root"),)
    except ShmaccError as error:
        remedy = "stop its users, then `shmacc-inspect remove --force`"
        return (Finding(segment_name.system_name, str(error), remedy),)


def _check(name: SegmentName, handle: _core.Handle) -> list[Finding]:
    subject = name.system_name
    findings = []
    description = describe(name.system_name)
    if handle.config()["name"] != name.shared_name and "~" not in name.shared_name:
        findings.append(
            Finding(
                subject,
                f"says that its name is {handle.config()['name']!r}",
                "the file was renamed; remove it",
            )
        )
    if description.lock.queue is None:
        findings.append(
            Finding(
                names.semaphore_name(subject, description.token)[1:],
                "the semaphore is missing: waits for the lock take up to 20 ms",
                "the next process that attaches makes it again",
            )
        )
    elif description.lock.queue > 2:  # noqa: PLR2004  two releasers may both post (lock.hpp)
        findings.append(
            Finding(subject, "the semaphore's value is too high", "harmless; it wears off")
        )
    if description.lock.in_operation and not description.lock.held:
        findings.append(
            Finding(
                subject,
                "an operation was cut short by a death",
                "none needed: the next operation undoes it",
            )
        )
    if handle.unlinked:
        findings.append(
            Finding(subject, "it was given up, but its name is still there", "remove it")
        )
    dead = [process.pid for process in description.processes if not process.alive]
    if dead:
        findings.append(
            Finding(
                subject,
                f"entries of dead processes: {', '.join(map(str, dead))}",
                "none needed: they are swept when the next process attaches or waits",
            )
        )
    if description.summary.kind == "sparse":
        problems, still = _still(handle, lambda state: _check_table(handle, state))
        findings += [
            Finding(subject, problem, "remove the segment") for problem in problems if still
        ]
    return findings


def _check_table(handle: _core.Handle, state: dict[str, Any]) -> list[str]:
    problems = []
    rows, counts = _slots(handle, state)
    if rows.size and (int(rows.min()) < 0 or np.unique(rows).size != rows.size):
        problems.append("a row is negative or stands in the table twice")
    if counts.size and (int(counts.min()) < 1 or int(counts.max()) > state["count"]):
        problems.append("a row's count is not between 1 and the number of gradients")
    if state["rows"]:
        region = _INDEX_REGION + state["index"]
        raw = handle.read(region, 0, state["index_buckets"] * _core.BUCKET_BYTES)
        buckets = np.frombuffer(raw, dtype=_BUCKET)
        current = buckets[buckets["stamp"] == state["index_stamp"]]
        slots = np.unique(current["slots"][current["tags"] != 0])
        missing = state["rows"] - int(np.count_nonzero(slots < state["rows"]))
        if missing:
            problems.append(f"{missing} rows cannot be found through the index")
    return problems


def _slots(handle: _core.Handle, state: dict[str, Any]) -> tuple[IndexArray, IndexArray]:
    raw = handle.read(_SLOTS_REGION, 0, state["rows"] * _core.SLOT_BYTES)
    pairs: IndexArray = np.frombuffer(raw, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _sums(handle: _core.Handle, state: dict[str, Any], dtype: dtypes.DType) -> ValueArray:
    rows = state["rows"] if handle.config()["kind"] == 1 else min(state["count"], 1)
    size = rows * state["row_elements"] * dtype.sums.itemsize
    return np.frombuffer(handle.read(_ROWS_REGION + state["buffer"], 0, size), dtype=dtype.sums)


def _still(handle: _core.Handle, look: Callable[[dict[str, Any]], _T]) -> tuple[_T, bool]:
    """What `look` sees, tried again a few times if the segment changed meanwhile."""
    for attempt in range(_ATTEMPTS):
        before = handle.state()
        seen = look(before)
        after = handle.state()
        still = after["generation"] == before["generation"] and not (
            before["in_operation"] or after["in_operation"]
        )
        if still or attempt == _ATTEMPTS - 1:
            return seen, still
    raise AssertionError  # pragma: no cover  the loop returns
