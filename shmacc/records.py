"""What goes in and comes out: slices, takes, partials, counters."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]


class IndexedSlices:
    """Some rows of a tensor, as ``tf.IndexedSlices``.

    Args:
        values: Shape ``(n, ...)``: the rows.
        indices: Shape ``(n,)``: which rows they are.
        dense_shape: The shape of the whole tensor, or None.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        """Keeps the three as they are."""
        self.values = values
        self.indices = indices
        self.dense_shape = dense_shape

    def __repr__(self) -> str:
        """Says the three."""
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape!r})"
        )


class SparseGradient(NamedTuple):
    """What a sparse ``take_grad`` returns, as TensorFlow's op does.

    Attributes:
        indices: int64, shape ``(n,)``, ascending, each row once.
        values: The accumulator's dtype, shape ``(n, ...)``.
        shape: int64: the declared first dimension (-1 if unknown), then those of ``values``.
    """

    indices: IndexArray
    values: ValueArray
    shape: IndexArray


@dataclass(frozen=True, slots=True, eq=False)
class SparseTaken:
    """A take of a sparse accumulator.

    Attributes:
        indices: int64, shape ``(n,)``, ascending, each row once.
        values: Shape ``(n, ...)``: reduced; in a partial, sums (float32 for the half types, 64
            bits for integers).
        shape: int64: the declared first dimension (-1 if unknown), then those of ``values``.
        row_counts: int64, shape ``(n,)``: how many gradients touched each row.
        count: How many gradients were reduced.
        step: The global step that this take closed (a partial: the step it belongs to).
    """

    indices: IndexArray
    values: ValueArray
    shape: IndexArray
    row_counts: IndexArray
    count: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class DenseTaken:
    """A take of a dense accumulator.

    Attributes:
        value: The round's shape: reduced; in a partial, sums (float32 for the half types, 64 bits
            for integers).
        count: How many gradients were reduced.
        step: The global step that this take closed (a partial: the step it belongs to).
    """

    value: ValueArray
    count: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class SparsePartial(SparseTaken):
    """Sums of a sparse accumulator, not divided, to be applied to another one."""


@dataclass(frozen=True, slots=True, eq=False)
class DensePartial(DenseTaken):
    """Sums of a dense accumulator, not divided, to be applied to another one."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A segment's counters at one instant.

    ``applied == taken + discarded + num_accumulated`` at all times.

    Attributes:
        applied: Gradients accepted since the segment was made.
        dropped: Gradients refused, as stale or because of a seal.
        discarded: Gradients accepted, then dropped by ``advance_step``.
        taken: Gradients handed out by takes.
        takes: Takes that handed something out (a partial of nothing included).
        num_accumulated: Gradients waiting to be taken.
        rows: Distinct rows that they touch (sparse; dense: 0).
        global_step: The accumulator's step.
        sealed: Whether applies are refused.
        waiting: Takes that wait in line, of living processes.
        attached: Living processes that have the segment open.
        recoveries: Operations cut short by a death, and undone.
        applied_bytes: Bytes of the values of accepted gradients, in the type that sums are kept in.
    """

    applied: int
    dropped: int
    discarded: int
    taken: int
    takes: int
    num_accumulated: int
    rows: int
    global_step: int
    sealed: bool
    waiting: int
    attached: int
    recoveries: int
    applied_bytes: int

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Stats":
        """From what the extension reports."""
        return cls(
            applied=state["applied"],
            dropped=state["dropped"],
            discarded=state["discarded"],
            taken=state["taken"],
            takes=state["takes"],
            num_accumulated=state["count"],
            rows=state["rows"],
            global_step=state["step"],
            sealed=state["sealed"],
            waiting=state["waiting"],
            attached=state["attached"],
            recoveries=state["recoveries"],
            applied_bytes=state["applied_bytes"],
        )
