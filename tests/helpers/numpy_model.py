"""Models the dense and the sparse accumulator in NumPy: computes expected answers the obvious way.

Nothing here is shared with the library: no segment, no hash, no kernel, no lock. Sums of integers
are Python integers, rows are a dictionary, and checks run in the order that the library must keep.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from helpers.elements import Element

Array = npt.NDArray[Any]
Shape = tuple[int | None, ...] | None

INT64_MAX: Final = 2**63 - 1


class Refused(Exception):  # noqa: N818 - it stands for the error that the library must raise
    """The name of the error class that the library must raise; the message, if it is fixed."""

    def __init__(self, kind: str, message: str | None = None) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message


def invalid(message: str | None = None) -> Refused:
    return Refused("InvalidArgumentError", message)


def text(shape: Shape) -> str:
    """Return a shape as TensorFlow prints it: an unknown dimension is a question mark."""
    return "[" + ",".join("?" if d is None else str(d) for d in shape or ()) + "]"


@dataclass(frozen=True)
class Outcome:
    """What a take must return; a dense take has no indices, row counts or shape."""

    count: int
    step: int
    values: Array
    indices: Array | None = None
    row_counts: Array | None = None
    shape: Array | None = None


@dataclass
class Model:
    """What the dense and the sparse model share: steps, counts, sealing and the arithmetic."""

    element: Element
    declared: Shape
    reduction: str
    step: int = 0
    count: int = 0
    sealed: bool = False
    applied: int = 0
    dropped: int = 0

    def set_global_step(self, step: int) -> None:
        """Set the step, even to a lower one; accumulated gradients stay."""
        self.step = step

    def advance_step(self, step: int) -> int:
        """If `step` is higher: set it, drop the gradients, unseal. Return how many were dropped."""
        if step <= self.step:
            return 0
        dropped = self.count
        self.step, self.sealed = step, False
        self._empty()
        return dropped

    def unseal(self) -> None:
        self.sealed = False

    def take(self, num_required: int) -> Outcome:
        """Return the result, drop the gradients, go to the next step; an error changes nothing."""
        if num_required <= 0:
            raise invalid(f"Argument num_required must be positive, but was {num_required}")
        self._need(num_required)
        if self.step == INT64_MAX:
            raise Refused("OutOfRangeError")
        outcome = self._outcome(divided=True)
        self._empty()
        self.step += 1
        return outcome

    def take_partial(self, num_required: int, *, seal: bool = False) -> Outcome:
        """Return the undivided sums and drop the gradients; the step stays."""
        if num_required < 0:
            raise invalid()
        self._need(num_required)
        outcome = self._outcome(divided=False)
        self._empty()
        self.sealed = self.sealed or seal
        return outcome

    def _need(self, num_required: int) -> None:
        if self.count < num_required:
            raise Refused("DeadlineExceededError")

    def _fresh(self, local_step: int) -> bool:
        return local_step >= self.step and not self.sealed

    def _admits(self, local_step: int, contributions: int) -> bool:
        if not self._fresh(local_step):
            self.dropped += contributions
            return False
        return True

    def _outcome(self, *, divided: bool) -> Outcome:
        raise NotImplementedError

    def _empty(self) -> None:
        self.count = 0

    def widened(self, values: Array) -> Array:
        """Convert values to the type that is summed: Python integers, or the sums' dtype."""
        plain = values.view(self.element.plain) if self.element.quantised else values
        return plain.astype(object) if self.element.integral else plain.astype(self.element.sums)

    def add(self, total: Array, more: Array) -> Array:
        """Add elementwise; refuse an integer sum that does not fit in 64 bits."""
        with np.errstate(all="ignore"):
            result: Array = np.asarray(total + more, dtype=total.dtype)
        if self.element.integral and result.size:
            limits = np.iinfo(self.element.sums)
            if min(result.flat) < limits.min or max(result.flat) > limits.max:
                raise Refused("OutOfRangeError")
        return result

    def finished(self, sums: Array, divisor: int) -> Array:
        """Divide once, and round once to the dtype that callers get."""
        if self.element.integral:
            return self._finished_integers(sums, divisor)
        with np.errstate(all="ignore"):
            if self.reduction != "SUM" and sums.size:
                if sums.dtype.kind == "c":
                    parts = np.ascontiguousarray(sums).reshape(-1)
                    real = parts.view(parts.real.dtype)
                    sums = (real / real.dtype.type(divisor)).view(sums.dtype).reshape(sums.shape)
                else:
                    sums = np.asarray(sums / sums.dtype.type(divisor), dtype=sums.dtype)
            return np.asarray(sums.astype(self.element.dtype))

    def _finished_integers(self, sums: Array, divisor: int) -> Array:
        limits = np.iinfo(self.element.plain)
        result = np.empty(sums.shape, dtype=self.element.plain)
        for where, total in np.ndenumerate(sums):
            value = total
            if self.reduction != "SUM":
                value = abs(total) // divisor * (1 if total >= 0 else -1)
            if not limits.min <= value <= limits.max:
                raise Refused("OutOfRangeError")
            result[where] = value
        return result.view(self.element.dtype) if self.element.quantised else result


@dataclass
class DenseModel(Model):
    """The dense accumulator: one array, or nothing."""

    total: Array | None = None

    def apply_grad(self, grad: Array, local_step: int) -> bool:
        return self._apply(self.widened(grad), 1, local_step)

    def apply_partial(self, partial: Outcome, local_step: int) -> bool:
        """Add another accumulator's sums."""
        sums = partial.values
        return self._apply(
            sums.astype(object) if self.element.integral else sums, partial.count, local_step
        )

    def _apply(self, grad: Array, contributions: int, local_step: int) -> bool:
        if self.declared is not None and not (
            len(self.declared) == grad.ndim
            and all(d in (None, n) for d, n in zip(self.declared, grad.shape, strict=True))
        ):
            raise invalid(f"Shape mismatch: expected {text(self.declared)}, got {text(grad.shape)}")
        if not self._admits(local_step, contributions):
            return False
        if self.total is None:
            self.total = grad.copy()
        elif self.total.shape != grad.shape:
            raise invalid(
                f"Shape mismatch: expected {text(self.total.shape)}, got {text(grad.shape)}"
            )
        else:
            self.total = self.add(self.total, grad)
        self.count += contributions
        self.applied += contributions
        return True

    def _outcome(self, *, divided: bool) -> Outcome:
        total = self.total
        if total is None:
            return Outcome(0, self.step, np.zeros((0,), dtype=self.element.sums))
        values = self.finished(total, self.count) if divided else total.astype(self.element.sums)
        return Outcome(self.count, self.step, values)

    def _empty(self) -> None:
        super()._empty()
        self.total = None


def _rows(array: Array) -> list[Array]:
    # Iterating over a vector would give bare numbers without its dtype.
    return [array[i : i + 1].reshape(array.shape[1:]) for i in range(len(array))]


@dataclass
class SparseModel(Model):
    """The sparse accumulator: a dictionary of rows, and the number of gradients in each row."""

    rows: dict[int, tuple[Array, int]] = field(default_factory=dict)
    inner: tuple[int, ...] | None = None

    def apply_grad(
        self, indices: Array, values: Array, given: Array | None, local_step: int
    ) -> bool:
        """Add one gradient; rows with the same index are first summed in order, and count once."""
        self._check_arguments(indices, values, given, fresh=self._fresh(local_step))
        if not self._admits(local_step, 1):
            return False
        self._check_round(values.shape)
        merged: dict[int, tuple[Array, int]] = {}
        for index, row in zip(indices.tolist(), _rows(self.widened(values)), strict=True):
            merged[index] = (self.add(merged[index][0], row) if index in merged else row, 1)
        self._merge(merged, values.shape[1:], 1)
        return True

    def apply_partial(self, partial: Outcome, local_step: int) -> bool:
        """Add another accumulator's rows with their counts."""
        assert partial.indices is not None
        assert partial.row_counts is not None
        sums = partial.values.astype(object) if self.element.integral else partial.values
        self._check_arguments(partial.indices, sums, None, fresh=self._fresh(local_step))
        if not self._admits(local_step, partial.count):
            return False
        self._check_round(sums.shape)
        merged = {
            index: (row, contributions)
            for index, row, contributions in zip(
                partial.indices.tolist(), _rows(sums), partial.row_counts.tolist(), strict=True
            )
        }
        self._merge(merged, sums.shape[1:], partial.count)
        return True

    def _merge(
        self, merged: dict[int, tuple[Array, int]], inner: tuple[int, ...], contributions: int
    ) -> None:
        rows = dict(self.rows)
        for index, (row, touched) in merged.items():
            if index in rows:
                total, before = rows[index]
                rows[index] = (self.add(total, row), before + touched)
            else:
                rows[index] = (row.copy(), touched)
        self.rows, self.inner = rows, inner
        self.count += contributions
        self.applied += contributions

    def _check_arguments(
        self, indices: Array, values: Array, given: Array | None, *, fresh: bool
    ) -> None:
        """Make the checks that need only the arguments; TensorFlow's checks come first."""
        self._check_ranks(indices, values)
        shape = [] if given is None else [int(d) for d in given.reshape(-1)]
        declared = self.declared or ()
        if shape:
            self._check_given(shape, declared)
        if declared and declared[0] is not None:
            for position, index in enumerate(indices.tolist()):
                if index >= declared[0]:
                    raise invalid(
                        f"Shape mismatch: index of slice {position} exceeded limits of shape; "
                        f"index is {index} exceeded {declared[0]}"
                    )
        if fresh:
            self._check_declared(values.shape)
        if (indices < 0).any():
            raise invalid()
        if shape and (
            any(g not in (-1, n) for g, n in zip(shape[1:], values.shape[1:], strict=False))
            or (shape[0] != -1 and (indices >= shape[0]).any())
        ):
            raise invalid()

    @staticmethod
    def _check_ranks(indices: Array, values: Array) -> None:
        if indices.ndim != 1:
            raise invalid(
                f"Input indices should be vector but received shape: {text(indices.shape)}"
            )
        if values.ndim == 0:
            raise invalid("Values cannot be 0-dimensional.")
        if len(values) != len(indices):
            raise invalid(f"Expected {len(indices)} non-empty input values, got {len(values)}")

    def _check_given(self, shape: list[int], declared: tuple[int | None, ...]) -> None:
        if len(shape) < len(declared):
            raise invalid(
                f"Shape mismatch: expected shape rank at least {len(declared)}, got {len(shape)}"
            )
        for i, (want, got) in enumerate(zip(declared, shape, strict=False)):
            if want is not None and got not in (-1, want):
                raise invalid(f"Shape mismatch: expected shape dim {i} to be {want}, got {got}")

    def _check_declared(self, shape: tuple[int, ...]) -> None:
        declared = self.declared or ()
        if len(shape) < len(declared):
            raise invalid(
                f"Shape mismatch: expected values rank at least {len(declared)}, got {len(shape)}"
            )
        if declared and None not in declared and len(shape) > len(declared):
            raise invalid(f"Shape mismatch: expected values rank {len(declared)}, got {len(shape)}")
        self._check_dims(declared[1:], shape[1:])

    def _check_round(self, shape: tuple[int, ...]) -> None:
        if self.count and self.inner is not None:
            if len(self.inner) != len(shape) - 1:
                raise invalid(
                    f"Shape mismatch: expected values rank {len(self.inner) + 1}, got {len(shape)}"
                )
            self._check_dims(self.inner, shape[1:])

    @staticmethod
    def _check_dims(wanted: tuple[int | None, ...], inner: tuple[int, ...]) -> None:
        for i, (want, got) in enumerate(zip(wanted, inner, strict=False), start=1):
            if want not in (None, got):
                raise invalid(f"Shape mismatch: expected values dim {i} to be {want}, got {got}")

    def _outcome(self, *, divided: bool) -> Outcome:
        inner = self.inner or ()
        sums = np.dtype(object) if self.element.integral else self.element.sums
        dtype = self.element.dtype if divided else self.element.sums
        order = sorted(self.rows)
        values = np.empty((len(order), *inner), dtype=dtype)
        for slot, index in enumerate(order):
            total, touched = self.rows[index]
            total = np.asarray(total, dtype=sums)
            divisor = touched if self.reduction == "MEAN" else self.count
            values[slot] = self.finished(total, divisor) if divided else total.astype(dtype)
        first = self.declared[0] if self.declared else None
        return Outcome(
            self.count,
            self.step,
            values,
            np.array(order, dtype=np.int64),
            np.array([self.rows[i][1] for i in order], dtype=np.int64),
            np.array([-1 if first is None else first, *inner], dtype=np.int64),
        )

    def _empty(self) -> None:
        super()._empty()
        self.rows, self.inner = {}, None
