"""Checks of a gradient against itself and the declared shape, in TensorFlow's order.

These checks depend on the caller's own arguments alone and run before the lock; so a malformed
gradient raises whether it is stale or not. The checks that depend on the round (rows 8 and 9 of
TensorFlow's) are left to the apply, when the gradient is known to be fresh: `declared_conflict`
only words row 9, and the extension checks row 8.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shmacc import _core
from shmacc._gradients import arguments
from shmacc._gradients.arguments import INT64_MAX, Shape, describe_shape
from shmacc._gradients.arrays import index_array, sums_array
from shmacc._gradients.dtypes import DType
from shmacc._records.taken import DenseTaken, IndexArray, SparseTaken, ValueArray
from shmacc.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Sums:
    """What a partial has of a member: `values` and `row_counts` as in `SparsePartial`."""

    values: ValueArray
    count: int
    weight: int
    indices: IndexArray | None = None
    row_counts: IndexArray | None = None
    given: tuple[int, ...] | None = None

    def rows(self) -> IndexArray:
        """Return the indices of a sparse member's."""
        assert self.indices is not None  # noqa: S101
        return self.indices


def sparse_sums(partial: Any, dtype: DType) -> Sums:
    """Return the sums of a sparse member's partial.

    Raises:
        InvalidArgumentError: It is no such partial, or its counts are inconsistent.
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
    indices = index_array(partial.indices, "partial.indices")
    counts = index_array(partial.row_counts, "partial.row_counts")
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
        InvalidArgumentError: It is no such partial.
        ResourceExhaustedError: There is no memory for a contiguous copy.
    """
    _check_not_divided(partial)
    check_has(partial, "A partial of a dense accumulator", "value", "count")
    count, weight = count_and_weight(partial)
    return Sums(sums_array(partial.value, dtype, "The value"), count, weight)


def partial_contributors(partial: Any) -> IndexArray | None:
    """Return the contributors of a partial, ascending; None: it has none.

    Raises:
        InvalidArgumentError: They are no distinct integers from 0 to ``2**63 - 1``.
    """
    return distinct(getattr(partial, "contributors", None), "partial.contributors")


def distinct(given: Any, what: str) -> IndexArray | None:
    """Return contributors in ascending order; None: there are none.

    Raises:
        InvalidArgumentError: They are no distinct integers from 0 to ``2**63 - 1``.
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
        InvalidArgumentError: It lacks one.
    """
    for field in fields:
        if not hasattr(value, field):
            raise InvalidArgumentError(
                f"{what} was expected, but {type(value).__name__} has no {field!r}"
            )


def count_and_weight(partial: Any) -> tuple[int, int]:
    """Return of how many gradients a partial is, and their weight.

    Raises:
        InvalidArgumentError: They are no such numbers, or disagree.
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
    """Return a ``grad_shape``, flattened; None or ``[]`` is "not given", -1 is "unknown".

    Raises:
        InvalidArgumentError: It does not consist of integers.
    """
    if shape is None:
        return None
    if hasattr(shape, "as_list"):
        shape = shape.as_list()
    return tuple(index_array(shape, "grad_shape").ravel().tolist()) or None


def check_sparse(
    indices: IndexArray, values: ValueArray, given: tuple[int, ...] | None, declared: Shape
) -> bool:
    """Run rows 2 to 7 of TensorFlow's checks.

    Returns:
        Whether the indices are strictly ascending, and none negative.

    Raises:
        InvalidArgumentError: The first check that fails.
    """
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
    if over >= 0 and limit is not None:
        raise InvalidArgumentError(_over_limit(indices, over, limit))
    return ascending and negative < 0


def check_rows(
    indices: IndexArray,
    values: ValueArray,
    given: tuple[int, ...] | None,
    declared: Shape,
    *,
    repeats: bool,
) -> bool:
    """Run all checks of a sparse gradient that need no round.

    Arguments as for `own_refusal`. Returns whether the indices are strictly ascending.

    Raises:
        InvalidArgumentError: The first check that fails.
    """
    ascending = check_sparse(indices, values, given, declared)
    refusal = own_refusal(
        indices, values, given, ascending=ascending, repeats=repeats
    ) or declared_conflict(values.shape, declared)
    if refusal is not None:
        raise InvalidArgumentError(refusal)
    return ascending


def own_refusal(
    indices: IndexArray,
    values: ValueArray,
    given: tuple[int, ...] | None,
    *,
    ascending: bool,
    repeats: bool,
) -> str | None:
    """Return why a gradient that TensorFlow accepts is of no use; None if it is of use.

    Args:
        indices: Indices that `check_sparse` has passed.
        values: Values that it has passed.
        given: The gradient's own ``grad_shape``.
        ascending: The result of `check_sparse`.
        repeats: Whether indices may repeat; those of a partial do not, since each row has a count.
    """
    if not ascending:
        negative = _core.check_rows(indices, INT64_MAX)[2]
        if negative >= 0:
            return f"Indices must not be negative; index of slice {negative} is {indices[negative]}"
        repeated = -1 if repeats else _core.repeated_row(indices)
        if repeated >= 0:
            return f"Indices of a partial must not repeat; that of slice {repeated} does"
    if given is None:
        return None
    if given[0] != -1:
        over = _core.check_rows(indices, given[0])[1]
        if over >= 0:
            return _over_limit(indices, over, given[0])
    for i, (expected, got) in enumerate(zip(given[1:], values.shape[1:], strict=False), start=1):
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


def declared_conflict(values_shape: tuple[int, ...], declared: Shape) -> str | None:
    """Return row 9's error, in TensorFlow's words; None if the values fit the declared shape."""
    if declared is None:
        return None
    if len(values_shape) < len(declared):
        return (
            f"Shape mismatch: expected values rank at least {len(declared)}, "
            f"got {len(values_shape)}"
        )
    for i, expected in enumerate(declared[1:], start=1):
        if expected is not None and values_shape[i] != expected:
            return (
                f"Shape mismatch: expected values dim {i} to be {expected}, got {values_shape[i]}"
            )
    return None


def check_dense(shape: tuple[int, ...], declared: Shape) -> None:
    """Check that a dense gradient fits the declared shape.

    Raises:
        InvalidArgumentError: It does not.
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
