"""Checks whether a gradient is consistent and fits the declared shape, in TensorFlow's order.

These checks depend on the caller's own arguments alone and run before the lock. So a malformed
gradient raises, stale or not. TensorFlow makes its checks 8 and 9 only if the gradient is fresh. So
the apply makes them: the extension makes check 8, and `CheckedRows.conflict` has the message of
check 9.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shmacc import _core
from shmacc._accumulators.taken import DenseTaken, SparseTaken
from shmacc._base.array_types import IndexArray, Shape, ValueArray
from shmacc._values import arguments
from shmacc._values.arguments import INT64_MAX, describe_shape
from shmacc._values.arrays import index_array, row_numbers, sums_array
from shmacc._values.dtypes import DType
from shmacc.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Sums:
    """A member's part of a partial: `values` and `row_counts` as in `SparsePartial`."""

    values: ValueArray
    count: int
    weight: int
    indices: IndexArray | None = None
    row_counts: IndexArray | None = None
    given: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """A sparse gradient or partial that has passed TensorFlow's checks 2 to 7.

    Attributes:
        indices: The row numbers.
        values: The rows.
        row_counts: For a partial: how often each row counts.
        ascending: Whether the indices are strictly ascending, and none negative.
        refusal: Why this library refuses a gradient that TensorFlow accepts; None: no reason.
        conflict: Why the gradient does not fit the declared shape, in TensorFlow's words (check 9):
            an error only if the gradient is fresh. None: it fits.
    """

    indices: IndexArray
    values: ValueArray
    row_counts: IndexArray | None
    ascending: bool
    refusal: str | None
    conflict: str | None

    def check(self) -> Self:
        """Return this gradient if it has passed all checks.

        Raises:
            InvalidArgumentError: There is a `refusal` or a `conflict`.
        """
        wrong = self.refusal or self.conflict
        if wrong is not None:
            raise InvalidArgumentError(wrong)
        return self


def sparse_sums(partial: Any, dtype: DType) -> Sums:
    """Return the sums of a sparse member's partial.

    Raises:
        InvalidArgumentError: `partial` is no sparse partial of this dtype, or its counts are wrong.
        ResourceExhaustedError: There is no memory for a contiguous copy.
    """
    _check_not_divided(partial)
    check_has(
        partial,
        "A partial of a sparse accumulator",
        *("indices", "values", "shape", "row_counts", "count"),
    )
    count, weight = count_and_weight(partial)
    values = sums_array(partial.values, dtype, "Values")
    indices = row_numbers(partial.indices, "partial.indices")
    counts = row_numbers(partial.row_counts, "partial.row_counts")
    given = given_shape(partial.shape)
    if count > 0 and (
        counts.shape != indices.shape
        or (counts.size and not (counts.min() >= 1 and counts.max() <= weight))
    ):
        raise InvalidArgumentError(
            "partial.row_counts must be one number for each row, 1 to partial.weight "
            "(without weights: partial.count)"
        )
    return Sums(values, count, weight, indices, counts, given)


def dense_sums(partial: Any, dtype: DType) -> Sums:
    """Return the sums of a dense member's partial.

    Raises:
        InvalidArgumentError: `partial` is no dense partial of this dtype.
        ResourceExhaustedError: There is no memory for a contiguous copy.
    """
    _check_not_divided(partial)
    check_has(partial, "A partial of a dense accumulator", "value", "count")
    count, weight = count_and_weight(partial)
    return Sums(sums_array(partial.value, dtype, "The value"), count, weight)


def partial_contributors(partial: Any) -> IndexArray | None:
    """Return the contributors of a partial, ascending; None if it has no contributors.

    Raises:
        InvalidArgumentError: They are not distinct integers from 0 to ``2**63 - 1``, or there are
            more of them than gradients in the partial.
    """
    who = distinct(getattr(partial, "contributors", None), "partial.contributors")
    if who is not None and len(who) > partial.count:
        raise InvalidArgumentError(
            f"partial.contributors are {len(who)}, more than partial.count, {partial.count}"
        )
    return who


def distinct(given: Any, what: str) -> IndexArray | None:
    """Return contributors in ascending order; None if there are none.

    Raises:
        InvalidArgumentError: They are not distinct integers from 0 to ``2**63 - 1``.
    """
    if given is None:
        return None
    who = np.sort(index_array(given, what), axis=None)
    if not who.size:
        return None
    if int(who[0]) < 0 or np.any(who[1:] == who[:-1]):
        raise InvalidArgumentError(f"{what} must be distinct and not negative")
    return who


def check_has(value: Any, what: str, *fields: str) -> None:
    """Refuse an object that does not have these attributes.

    Raises:
        InvalidArgumentError: The object lacks an attribute.
    """
    for field in fields:
        if not hasattr(value, field):
            raise InvalidArgumentError(
                f"{what} was expected, but {type(value).__name__} has no {field!r}"
            )


def count_and_weight(partial: Any) -> tuple[int, int]:
    """Return how many gradients a partial counts for, and the sum of their weights.

    Raises:
        InvalidArgumentError: A number is out of range, or count and weight contradict each other.
    """
    count = arguments.partial_count(partial.count)
    given = getattr(partial, "weight", None)
    weight = count if given is None else arguments.partial_weight(given)
    if weight < count or (weight > 0) != (count > 0):
        raise InvalidArgumentError(
            f"partial.weight, {weight}, must be at least partial.count, {count}"
        )
    return count, weight


def _check_not_divided(partial: object) -> None:
    if type(partial) in {SparseTaken, DenseTaken}:
        raise InvalidArgumentError(
            f"A partial was expected, but this {type(partial).__name__} is the result of a take, "
            "which is reduced already; take_partial hands out sums"
        )


def given_shape(shape: Any) -> tuple[int, ...] | None:
    """Return a ``grad_shape`` as a flat tuple (-1: unknown); None if it is None or ``[]``.

    Raises:
        InvalidArgumentError: The shape does not consist of integers.
    """
    if shape is None:
        return None
    # A tf.TensorShape has this method.
    if hasattr(shape, "as_list"):
        shape = shape.as_list()
    return tuple(index_array(shape, "grad_shape").ravel().tolist()) or None


def checked_rows(
    indices: IndexArray,
    values: ValueArray,
    given: tuple[int, ...] | None,
    declared: Shape,
    row_counts: IndexArray | None = None,
    *,
    exact: bool,
) -> CheckedRows:
    """Run all checks of a sparse gradient that do not depend on the round.

    Args:
        indices: The row numbers.
        values: The rows.
        given: The gradient's own ``grad_shape``.
        declared: The accumulator's declared shape.
        row_counts: For a partial: the count of each row. If given, indices must not repeat.
        exact: Whether values with more dimensions than declared are a `conflict`.

    Raises:
        InvalidArgumentError: TensorFlow's check 2 to 7 fails; the first that fails is reported.
    """
    values = _with_row_shape(indices, values, declared)
    ascending = _check_sparse(indices, values, given, declared)
    refusal = None if ascending else _bad_indices(indices, repeats=row_counts is None)
    if refusal is None and given is not None:
        refusal = _outside_of_given(indices, values.shape, given)
    conflict = _declared_conflict(values.shape, declared, exact=exact)
    return CheckedRows(indices, values, row_counts, ascending, refusal, conflict)


def _with_row_shape(indices: IndexArray, values: ValueArray, declared: Shape) -> ValueArray:
    """Return the values. If they are ``[]``, give them the declared shape of a row.

    So ``([], [])`` is a valid gradient, which an empty batch gives (pytorch#111422).
    """
    if not declared or None in declared[1:] or indices.shape != (0,) or values.shape != (0,):
        return values
    return values.reshape((0, *(dim or 0 for dim in declared[1:])))


def _check_sparse(
    indices: IndexArray, values: ValueArray, given: tuple[int, ...] | None, declared: Shape
) -> bool:
    """Run TensorFlow's checks 2 to 7; return whether indices ascend (`CheckedRows.ascending`)."""
    if indices.ndim != 1:
        raise InvalidArgumentError(
            f"Input indices should be vector but received shape: {describe_shape(indices.shape)}"
        )
    if values.ndim == 0:
        raise InvalidArgumentError("Values cannot be 0-dimensional.")
    if values.shape[0] != indices.size:
        raise InvalidArgumentError(
            f"Expected {indices.size} non-empty input values, got {values.shape[0]}"
        )
    if given is not None and declared is not None:
        _check_given_against_declared(given, declared)
    limit = declared[0] if declared else None
    ascending, over, negative = _core.check_rows(indices, INT64_MAX if limit is None else limit)
    # Without a limit, check_rows got INT64_MAX, and reports this row number, although it is valid.
    if over >= 0 and limit is not None:
        raise InvalidArgumentError(_over_limit(indices, over, limit))
    return ascending and negative < 0


def _bad_indices(indices: IndexArray, *, repeats: bool) -> str | None:
    negative = _core.check_rows(indices, INT64_MAX)[2]
    if negative >= 0:
        return f"Indices must not be negative; index of slice {negative} is {indices[negative]}"
    repeated = -1 if repeats else _core.repeated_row(indices)
    if repeated >= 0:
        return f"Indices of a partial must not repeat; that of slice {repeated} does"
    return None


def _outside_of_given(
    indices: IndexArray, values_shape: tuple[int, ...], given: tuple[int, ...]
) -> str | None:
    if given[0] != -1:
        over = _core.check_rows(indices, given[0])[1]
        if over >= 0:
            return _over_limit(indices, over, given[0])
    for i, (expected, got) in enumerate(zip(given[1:], values_shape[1:], strict=False), start=1):
        if expected not in {got, -1}:
            return (
                f"Shape mismatch: the given shape's dim {i} is {expected}, but the gradient's "
                f"values have {got}"
            )
    return None


def _over_limit(indices: IndexArray, at: int, limit: int) -> str:
    return (
        f"Shape mismatch: index of slice {at} exceeded limits of shape; "
        f"index is {indices[at]} exceeded {limit}"
    )


def _check_given_against_declared(given: tuple[int, ...], declared: tuple[int | None, ...]) -> None:
    if len(given) < len(declared):
        raise InvalidArgumentError(
            f"Shape mismatch: expected shape rank at least {len(declared)}, got {len(given)}"
        )
    for i, (expected, got) in enumerate(zip(declared, given, strict=False)):
        if expected is not None and got not in {expected, -1}:
            raise InvalidArgumentError(
                f"Shape mismatch: expected shape dim {i} to be {expected}, got {got}"
            )


def _declared_conflict(
    values_shape: tuple[int, ...], declared: Shape, *, exact: bool
) -> str | None:
    """Return the message of check 9; None if the values fit the declared shape."""
    if not declared:  # TensorFlow's SyncReplicasOptimizer declares rank 0, but rows have more
        return None
    if len(values_shape) < len(declared):
        return (
            f"Shape mismatch: expected values rank at least {len(declared)}, "
            f"got {len(values_shape)}"
        )
    if exact and len(values_shape) > len(declared):
        return f"Shape mismatch: expected values rank {len(declared)}, got {len(values_shape)}"
    for i, expected in enumerate(declared[1:], start=1):
        if expected is not None and values_shape[i] != expected:
            return (
                f"Shape mismatch: expected values dim {i} to be {expected}, got {values_shape[i]}"
            )
    return None


def check_dense(shape: tuple[int, ...], declared: Shape) -> None:
    """Check that a dense gradient fits the declared shape.

    Raises:
        InvalidArgumentError: The gradient does not fit.
    """
    if declared is None:
        return
    fits = len(shape) == len(declared) and all(
        expected is None or expected == got for expected, got in zip(declared, shape, strict=True)
    )
    if not fits:
        raise InvalidArgumentError(
            f"Shape mismatch: expected {describe_shape(declared)}, got {describe_shape(shape)}"
        )
