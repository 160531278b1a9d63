"""Checks and converts one member of a gradient, partial or saved state for the extension."""

from dataclasses import replace
from typing import Any

import numpy as np

from shmacc import _core
from shmacc._accumulators import gradient_checks
from shmacc._accumulators.gradient_checks import Rows, Sums, checked_rows
from shmacc._accumulators.members import AccumulatedMember
from shmacc._accumulators.taken import SparsePartial
from shmacc._base.array_types import ValueArray
from shmacc._base.signals import pass_on
from shmacc._values import arrays, foreign
from shmacc.errors import InvalidArgumentError

MemberGradient = tuple[Any, ...]
"""A member's gradient as the extension takes it: the member's number, count, weight, indices or
None, values, row_counts or None, whether the indices ascend."""


class MemberInput:
    """Checks a user's values for one member, and turns them into arguments of the extension.

    A single accumulator has one member. It passes plain gradients directly to the extension, which
    is faster (a group of one member takes 1.5 times as long), and uses this class for all others.
    """

    __slots__ = ("_dtype", "_exact", "_number", "_plain_type", "_shape", "_sparse")

    def __init__(self, number: int, spec: AccumulatedMember) -> None:
        self._number = number
        self._sparse = spec.kind == "sparse"
        self._dtype = spec.dtype
        self._plain_type = spec.dtype.plain_type
        self._shape = spec.shape
        # A gradient must have exactly the declared rank. Exception: TensorFlow's own tests apply
        # rows of more dimensions to a single accumulator whose shape leaves a dimension open.
        self._exact = bool(spec.name) or None not in (spec.shape or ())

    def gradient(self, value: Any, weight: int) -> MemberGradient:
        """Return this member's part of a group's gradient, checked."""
        if self._sparse:
            return self._of_rows(value, weight)
        plain = None
        if weight == 1:
            plain = _core.plain_dense(value, self._plain_type, self._shape)
        if plain is None:
            plain = self.dense(value, weight, "The gradient")
        return self._number, 1, weight, None, plain, None, False

    def _of_rows(self, value: Any, weight: int) -> MemberGradient:
        if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "indices"):  # noqa: PLR2004
            indices, values = value
            given = None
        else:
            value = foreign.slices(value)
            if isinstance(value, SparsePartial):
                raise arrays.is_partial("The gradient")
            gradient_checks.check_has(
                value, "(indices, values), or something like IndexedSlices,", "indices", "values"
            )
            indices, values = value.indices, value.values
            given = getattr(value, "dense_shape", None)
        plain = None
        if given is None and weight == 1:
            plain = _core.plain_rows(indices, values, self._plain_type, self._shape)
        if plain is None:
            rows = self.rows(indices, values, given, weight).check()
            plain = rows.indices, rows.values, rows.ascending
        indices, values, ascending = plain
        return self._number, 1, weight, indices, values, None, ascending

    def dense(self, value: Any, weight: int, what: str) -> ValueArray:
        """Return a dense gradient, checked; messages of errors call it `what`."""
        values = arrays.values_array(value, self._dtype, what)
        gradient_checks.check_dense(values.shape, self._shape)
        return arrays.weighted(values, weight, self._dtype, what)

    def rows(self, indices: Any, values: Any, given: Any, weight: int, prefix: str = "") -> Rows:
        """Return a sparse gradient, checked.

        Args:
            indices: Which rows.
            values: The rows.
            given: The gradient's own ``grad_shape``.
            weight: How often the gradient counts.
            prefix: Begins the names of the gradient's arrays in messages of errors.
        """
        values = arrays.values_array(values, self._dtype, f"{prefix}values")
        indices = arrays.row_numbers(indices, f"{prefix}indices")
        shape = gradient_checks.given_shape(given)
        values = arrays.weighted(values, weight, self._dtype, f"{prefix}values")
        if shape is None or len(shape) > 1 or np.ndim(given):
            return checked_rows(indices, values, shape, self._shape, exact=self._exact)
        # TensorFlow accepts a number as a shape, too; but most callers who pass one mean the step.
        meant = f" (the given shape is {given}, a number: a step is passed as local_step={given})"
        try:
            rows = checked_rows(indices, values, shape, self._shape, exact=self._exact)
        except InvalidArgumentError as error:
            pass_on(error)
            raise InvalidArgumentError(f"{error}{meant}") from None
        return replace(rows, refusal=rows.refusal and rows.refusal + meant)

    def sums(self, partial: Any) -> Sums:
        """Return a partial of this member; its shape is not checked against the declared one."""
        make = gradient_checks.sparse_sums if self._sparse else gradient_checks.dense_sums
        return make(partial, self._dtype)

    def rows_of_sums(self, sums: Sums) -> Rows:
        """Return the rows of a sparse partial, checked."""
        assert sums.indices is not None  # noqa: S101
        return checked_rows(
            sums.indices, sums.values, sums.given, self._shape, sums.row_counts, exact=self._exact
        )

    def array_of_sums(self, sums: Sums) -> ValueArray:
        """Return the array of a dense partial, checked."""
        gradient_checks.check_dense(sums.values.shape, self._shape)
        return sums.values

    def partial(self, partial: Any, count: int, weight: int) -> MemberGradient:
        """Return this member's part of a group's partial, which has this `count` and `weight`."""
        sums, ascending = self.sums(partial), False
        if self._sparse:
            ascending = self.rows_of_sums(sums).check().ascending
        else:
            self.array_of_sums(sums)
        if not (1 <= sums.count <= count and sums.weight <= weight):
            raise InvalidArgumentError(
                f"its count {sums.count} and weight {sums.weight} must be at least 1 and at most "
                f"the partial's, {count} and {weight}"
            )
        return (
            self._number,
            sums.count,
            sums.weight,
            sums.indices,
            sums.values,
            sums.row_counts,
            ascending,
        )
