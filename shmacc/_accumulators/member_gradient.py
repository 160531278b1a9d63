"""Checks and converts one member of a gradient, partial or saved state for the extension."""

from dataclasses import replace
from typing import Any

import numpy as np

from shmacc import _core
from shmacc._accumulators import gradient_checks
from shmacc._accumulators.gradient_checks import CheckedRows, Sums, checked_rows
from shmacc._accumulators.members import AccumulatedMember
from shmacc._accumulators.taken import SparsePartial
from shmacc._base import layout
from shmacc._base.array_types import ValueArray
from shmacc._base.signals import pass_on
from shmacc._core import MemberGradient
from shmacc._values import arrays, foreign
from shmacc.errors import InvalidArgumentError


class MemberInput:
    """Checks a user's values for one member, and turns them into arguments of the extension.

    A single accumulator has one member. It uses this class only for gradients that need conversion;
    others go directly to the extension (a group of one member takes 1.5 times as long).
    """

    __slots__ = (
        *("_dtype", "_exact", "_number", "_plain_type", "_reduction", "_shape", "_sparse", "_sum"),
    )

    def __init__(self, number: int, spec: AccumulatedMember) -> None:
        self._number = number
        self._sum, self._reduction = spec.dtype.sum_code, layout.REDUCTIONS[spec.reduction]
        self._sparse = spec.kind == "sparse"
        self._dtype = spec.dtype
        self._plain_type = spec.dtype.plain_type
        self._shape = spec.shape
        # A gradient must have exactly the declared rank. Exception: TensorFlow's own tests apply
        # rows of more dimensions to a single accumulator whose shape leaves a dimension open.
        self._exact = bool(spec.name) or None not in (spec.shape or ())

    def gradient(self, value: Any, weight: int) -> MemberGradient:
        """Check and return this member's part of a group's gradient."""
        plain = None
        if not self._sparse:
            if weight == 1:
                plain = _core.plain_dense(
                    self._number, self._sum, self._reduction, value, self._plain_type, self._shape
                )
            return plain or self.of_array(self.dense(value, weight, "The gradient"), 1, weight)
        indices, values, given = _parts(value)
        if given is None and weight == 1:
            plain = _core.plain_rows(
                self._number,
                self._sum,
                self._reduction,
                indices,
                values,
                self._plain_type,
                self._shape,
            )
        return plain or self.of_rows(self.rows(indices, values, given, weight).check(), 1, weight)

    def checked_rows(self, value: Any, weight: int) -> CheckedRows:
        """Check a sparse gradient in a form that groups accept, and return it."""
        return self.rows(*_parts(value), weight).check()

    def of_rows(self, rows: CheckedRows, count: int, weight: int) -> MemberGradient:
        """Return checked rows for the extension, with the count and weight of their gradients."""
        return _core.sparse_gradient(
            self._number,
            self._sum,
            self._reduction,
            rows.indices,
            rows.values,
            rows.row_counts,
            rows.ascending,
            count,
            weight,
        )

    def of_array(self, value: ValueArray, count: int, weight: int) -> MemberGradient:
        """Return a checked dense value for the extension, like `of_rows` for rows."""
        return _core.dense_gradient(self._number, self._sum, self._reduction, value, count, weight)

    def dense(self, value: Any, weight: int, what: str) -> ValueArray:
        """Return a checked dense gradient. Error messages call it `what`."""
        values = arrays.values_array(value, self._dtype, what)
        gradient_checks.check_dense(values.shape, self._shape)
        return arrays.weighted(values, weight, self._dtype, what)

    def rows(
        self, indices: Any, values: Any, given: Any, weight: int, prefix: str = ""
    ) -> CheckedRows:
        """Check and return a sparse gradient.

        Args:
            indices: The row numbers.
            values: The rows.
            given: The gradient's own ``grad_shape``.
            weight: How often the gradient counts.
            prefix: The beginning of the names of the gradient's arrays in error messages.
        """
        values = arrays.values_array(values, self._dtype, f"{prefix}values")
        indices = arrays.row_numbers(indices, f"{prefix}indices")
        shape = gradient_checks.given_shape(given)
        values = arrays.weighted(values, weight, self._dtype, f"{prefix}values")
        if shape is None or len(shape) > 1 or np.ndim(given):
            return checked_rows(indices, values, shape, self._shape, exact=self._exact)
        # TensorFlow accepts a number as a shape. But most callers who pass a number mean the step.
        meant = f" (the given shape is {given}, a number: a step is passed as local_step={given})"
        try:
            rows = checked_rows(indices, values, shape, self._shape, exact=self._exact)
        except InvalidArgumentError as error:
            pass_on(error)
            raise InvalidArgumentError(f"{error}{meant}") from None
        return replace(rows, refusal=rows.refusal and rows.refusal + meant)

    def sums(self, partial: Any) -> Sums:
        """Return the sums of this member's partial, without a check of the declared shape."""
        make = gradient_checks.sparse_sums if self._sparse else gradient_checks.dense_sums
        return make(partial, self._dtype)

    def rows_of_sums(self, sums: Sums) -> CheckedRows:
        """Check and return the rows of a sparse partial."""
        assert sums.indices is not None  # noqa: S101
        return checked_rows(
            sums.indices, sums.values, sums.given, self._shape, sums.row_counts, exact=self._exact
        )

    def array_of_sums(self, sums: Sums) -> ValueArray:
        """Check and return the array of a dense partial."""
        gradient_checks.check_dense(sums.values.shape, self._shape)
        return sums.values

    def partial(self, partial: Any, count: int, weight: int) -> MemberGradient:
        """Return this member's part of a group's partial, which has this `count` and `weight`."""
        sums = self.sums(partial)
        made = (
            self.of_rows(self.rows_of_sums(sums).check(), sums.count, sums.weight)
            if self._sparse
            else self.of_array(self.array_of_sums(sums), sums.count, sums.weight)
        )
        if not (1 <= sums.count <= count and sums.weight <= weight):
            raise InvalidArgumentError(
                f"its count {sums.count} and weight {sums.weight} must be at least 1 and at most "
                f"the partial's, {count} and {weight}"
            )
        return made


def _parts(value: Any) -> tuple[Any, Any, Any]:
    """Return the indices, values and own shape (or None) of a sparse gradient."""
    # A named tuple with a field `indices` may have its fields in another order.
    if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "indices"):  # noqa: PLR2004
        indices, values = value
        return indices, values, None
    value = foreign.slices(value)
    if isinstance(value, SparsePartial):
        raise arrays.is_partial("The gradient")
    gradient_checks.check_has(
        value, "(indices, values), or something like IndexedSlices,", "indices", "values"
    )
    return value.indices, value.values, getattr(value, "dense_shape", None)
