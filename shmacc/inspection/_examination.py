"""Examines a segment's rows and values."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmacc import _core
from shmacc import _dtypes as dtypes
from shmacc import _layout as layout
from shmacc._records import IndexArray, ValueArray
from shmacc.errors import DataLossError, InvalidArgumentError
from shmacc.inspection._records import RowCount, ValueSummary
from shmacc.inspection._segments import open_view, resolve
from shmacc.inspection._stillness import look_still

_PIECE = 2**24  # bytes of values that are read at once


def most_touched(name: str, how_many: int) -> tuple[tuple[RowCount, ...], bool]:
    """Return the rows that most gradients touched, and whether they were stable meanwhile.

    Raises:
        NotFoundError: There is no segment of that name.
        DataLossError: It is damaged.
        PermissionDeniedError: It is not this user's to read.
    """
    with open_view(resolve(name)) as view:
        (rows, counts), still = look_still(view, lambda state: read_slots(view, state))
    order = np.lexsort((rows, -counts))[:how_many]
    return tuple(RowCount(int(rows[i]), int(counts[i])) for i in order), still


def summarise_values(name: str) -> ValueSummary:
    """Summarise the round's sums: norm, largest, NaN, infinite.

    Raises:
        InvalidArgumentError: It is no accumulator, but shared arrays.
        Everything else as for `most_touched`.
    """
    with open_view(resolve(name)) as view:
        if view.config()["kind"] == layout.KINDS["arrays"]:
            raise InvalidArgumentError(f"{name!r} is the name of shared arrays, which have no sums")
        dtype = dtypes.by_number(view.config()["dtype"])
        if dtype is None:
            raise DataLossError(f"{name}: unknown dtype")
        tally, still = look_still(view, lambda state: _tally(view, state, dtype))
    return ValueSummary(
        numbers=tally.numbers,
        norm=tally.largest * math.sqrt(tally.squares),
        largest=tally.largest,
        nan=tally.nan,
        infinite=tally.infinite,
        still=still,
    )


@dataclass(slots=True)
class _Tally:
    """Sums over numbers that come piece by piece.

    `squares` are those of the magnitudes divided by the largest one, so that they do not overflow.
    """

    numbers: int = 0
    squares: float = 0.0
    largest: float = 0.0
    nan: int = 0
    infinite: int = 0

    def add(self, numbers: ValueArray) -> None:
        real = numbers if numbers.dtype.kind == "c" else numbers.astype(np.float64)
        magnitudes = np.abs(real).astype(np.float64)
        finite = magnitudes[np.isfinite(magnitudes)]
        largest = float(finite.max(initial=self.largest))
        if largest > 0:
            self.squares *= (self.largest / largest) ** 2
            self.squares += float(np.sum((finite / largest) ** 2))
        self.largest = largest
        self.numbers += numbers.size
        self.nan += int(np.count_nonzero(np.isnan(numbers)))
        self.infinite += int(np.count_nonzero(np.isinf(numbers)))


def _tally(view: _core.View, state: dict[str, Any], dtype: dtypes.DType) -> _Tally:
    sparse = view.config()["kind"] == layout.KINDS["sparse"]
    rows = state["rows"] if sparse else min(state["count"], 1)
    size = rows * state["row_elements"] * dtype.sums.itemsize
    region = layout.REGIONS["rows 0"] + state["buffer"]
    if size > view.allocated_bytes:
        raise DataLossError("The segment is damaged: it claims more values than it occupies bytes")
    tally = _Tally()
    for offset in range(0, size, _PIECE):
        piece = view.read(region, offset, min(_PIECE, size - offset))
        tally.add(np.frombuffer(piece, dtype=dtype.sums).view(dtype.partial))
    return tally


def read_slots(view: _core.View, state: dict[str, Any]) -> tuple[IndexArray, IndexArray]:
    """Return the table's rows in order of first touch, and how many gradients touched each."""
    raw = view.read(layout.REGIONS["slots"], 0, state["rows"] * layout.SLOT_BYTES)
    pairs: IndexArray = np.frombuffer(raw, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
