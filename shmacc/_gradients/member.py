"""A member's part of gradients, partials and saved states, on its way to the extension."""

from typing import Any

from shmacc import _core
from shmacc._gradients import arrays, foreign, gradients
from shmacc._gradients.spec import MemberSpec, TensorSpec
from shmacc.errors import InvalidArgumentError

Part = tuple[Any, ...]
"""What the extension takes of a member: its number, count, weight, indices or None, values,
row_counts or None, whether the indices ascend."""


class Member:
    """One member's checks: from what a user gives to what the extension takes."""

    __slots__ = ("_dtype", "_number", "_plain_type", "_shape", "_sparse", "_spec")

    def __init__(self, number: int, spec: MemberSpec) -> None:
        self._number = number
        self._spec = spec
        self._sparse = spec.kind == "sparse"
        self._dtype = spec.dtype
        self._plain_type = spec.dtype.plain_type
        self._shape = spec.shape

    def tensor_spec(self) -> TensorSpec:
        return self._spec.tensor_spec()

    def part(self, value: Any, weight: int) -> Part:
        """Return a gradient of this member, checked."""
        if self._sparse:
            return self._rows(value, weight)
        if not _core.is_plain_dense(value, self._plain_type, self._shape):
            value = arrays.values_array(value, self._dtype, "The gradient")
            gradients.check_dense(value.shape, self._shape)
        if weight != 1:
            value = arrays.weighted(value, weight, self._dtype, "The gradient's values")
        return self._number, 1, weight, None, value, None, False

    def _rows(self, value: Any, weight: int) -> Part:
        if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "indices"):  # noqa: PLR2004
            grad_indices, grad_values = value
            given = None
        else:
            value = foreign.slices(value)
            gradients.check_has(
                value, "(indices, values), or something like IndexedSlices,", "indices", "values"
            )
            grad_indices, grad_values = value.indices, value.values
            given = gradients.given_shape(getattr(value, "dense_shape", None))
        values, indices, ascending = grad_values, grad_indices, None
        if given is None:
            ascending = _core.plain_rows_ascend(indices, values, self._plain_type, self._shape)
        if ascending is None:
            values = arrays.values_array(values, self._dtype, "values")
            indices = arrays.index_array(indices, "indices")
            ascending = gradients.check_rows(indices, values, given, self._shape, repeats=True)
        if weight != 1:
            values = arrays.weighted(values, weight, self._dtype, "values")
        return self._number, 1, weight, indices, values, None, ascending

    def partial(self, partial: Any, count: int, weight: int) -> Part:
        """Return a partial's part of this member; the whole partial has `count` and `weight`."""
        if self._sparse:
            sums = gradients.sparse_sums(partial, self._dtype)
            values = sums.values
            ascending = gradients.check_rows(
                sums.rows(), values, sums.given, self._shape, repeats=False
            )
        else:
            sums = gradients.dense_sums(partial, self._dtype)
            values, ascending = sums.values, False
            gradients.check_dense(values.shape, self._shape)
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
            values,
            sums.row_counts,
            ascending,
        )
