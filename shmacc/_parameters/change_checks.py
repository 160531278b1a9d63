"""The record of a change of parameters, and the checks that arrays and tables share."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from shmacc import _core
from shmacc._accumulators.member_gradient import MemberInput
from shmacc._accumulators.members import AccumulatedMember
from shmacc._accumulators.taken import DenseTaken, SparseTaken
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._base.signals import pass_on
from shmacc._parameters.members import ParameterMember, ParameterTable
from shmacc._values import arrays, foreign
from shmacc._values.arguments import describe_shape
from shmacc._values.dtypes import DType
from shmacc.errors import InvalidArgumentError, ResourceExhaustedError, ShmaccError


class Asked(NamedTuple):
    """The changes that an update makes besides the round's gradients, by array or table.

    Attributes:
        values: New contents.
        gradients: Gradients that replace the round's.
        remove: Ids whose rows are removed.
        forget: Rows whose last update is more than this number of steps old are removed.
    """

    values: Mapping[str, Any] = {}
    gradients: Mapping[str, Any] = {}
    remove: Mapping[str, Any] = {}
    forget: Mapping[str, Any] = {}

    @classmethod
    def checked(cls, **given: object) -> Self:
        """Return what was given, without None; InvalidArgumentError if a value is no mapping."""
        for name, value in given.items():
            if value is not None and not isinstance(value, Mapping):
                raise InvalidArgumentError(
                    f"{name} must be a mapping from the names of arrays or tables, but was a "
                    f"{type(value).__name__}"
                )
        return cls(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


class ArrayChange(NamedTuple):
    """A change of an array, as the extension reads it.

    Attributes:
        number: The number of the array.
        rate: The learning rate, if the values are gradients; None: they are new contents.
        rows: The rows to change, ascending; None: all.
        values: The bytes of the values, in C order. A restored array has the bytes of each region.
        corrections: Adam's two bias corrections; None: computed from the array's number of updates.
    """

    number: int
    rate: float | None
    rows: IndexArray | None
    values: list[ValueArray]
    corrections: tuple[float, float] | None = None


class TableChange(NamedTuple):
    """A change of a table, as the extension reads it. All ids ascend.

    Attributes:
        number: The number of the table.
        rate: The same as for an array.
        ids: The ids of the rows to change.
        values: The bytes of these rows, in C order; a restored table's rows include slots.
        removed: Ids whose rows are removed after the other changes; None: all ids but `ids`.
        steps: The last steps of the rows; None: the round's step.
        updated_before: Rows whose last step is below this are removed, too, unless `ids` or `kept`
            has them; None: no such rows are removed.
        kept: Ids that `updated_before` does not remove.
        corrections: The same as for an array.
    """

    number: int
    rate: float | None
    ids: IndexArray
    values: ValueArray
    removed: IndexArray | None
    steps: IndexArray | None
    updated_before: int | None
    kept: IndexArray
    corrections: tuple[float, float] | None = None


Change = ArrayChange | TableChange


def learning_rate(array: ParameterMember, rate: float | None) -> float:
    """Return this rate; if it is None, return the rate of the array's optimizer.

    Raises:
        InvalidArgumentError: The array has no optimizer, or its dtype cannot represent the rate.
    """
    if array.optimizer is None:
        raise InvalidArgumentError(
            f"{array.noun.capitalize()} {array.name!r} has no optimizer, so its gradient can "
            f"change nothing: give its new contents in values, or leave it out, as by "
            f"taken.without({array.name!r})"
        )
    if rate is None:
        return array.optimizer.learning_rate
    info = np.finfo(array.dtype.numpy)
    array.optimizer.check_rate(rate, float(info.tiny), float(info.max))
    return rate


def gradient(array: ParameterMember, given: Any) -> SparseTaken | DenseTaken:
    """Check and convert the chief's own gradient as an apply would, and return it.

    If a row is given several times, its values are added up, in their order.

    Raises:
        InvalidArgumentError: The gradient does not fit the array, or the array has no optimizer.
        ResourceExhaustedError: There is no memory for the conversion.
    """
    # Check this first: if there is no optimizer, a message about the shape would mislead.
    learning_rate(array, None)
    rows = isinstance(array, ParameterTable) or foreign.is_rows(given)
    shape = (None, *array.shape) if isinstance(array, ParameterTable) else array.shape
    if rows and not shape:
        raise InvalidArgumentError(f"Array {array.name!r} is a number, and has no rows")
    what = f"The gradient of {array.noun} {array.name!r}"
    kind = "sparse" if rows else "dense"
    member = MemberInput(0, AccumulatedMember(array.name, kind, array.dtype, shape, "SUM"))
    try:
        if not rows:
            value = member.dense(given, 1, "The gradient")
            return DenseTaken(_own(value, what), 1, 0)
        checked = member.checked_rows(given, 1)
    except ShmaccError as error:
        pass_on(error)
        raise type(error)(f"{what}: {error}") from error.__cause__
    indices, values = checked.indices, checked.values
    if checked.ascending:
        values = _own(values, what)
    else:
        width = values.shape[1:]
        indices, values = _core.merged_rows(indices, values, array.dtype.numpy == np.float64)
        values = values.reshape(len(indices), *width)
    dims = np.array([-1 if dim is None else dim for dim in shape], np.int64)
    return SparseTaken(indices, values, dims, np.ones(len(indices), np.int64), 1, 0)


def ascending(
    rows: IndexArray, values: ValueArray, repeated_text: str
) -> tuple[IndexArray, ValueArray]:
    """Return rows and values in ascending order; InvalidArgumentError if a row occurs twice."""
    if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], np.ascontiguousarray(values[order])
        repeated = rows[1:][rows[1:] == rows[:-1]]
        if len(repeated):
            raise InvalidArgumentError(repeated_text.format(repeated[0]))
    return rows, values


def check_vector(rows: IndexArray, what: str) -> None:
    """Raise InvalidArgumentError unless row numbers or ids are a vector."""
    if rows.ndim != 1:
        what = what[0].upper() + what[1:]
        raise InvalidArgumentError(
            f"{what} must be a vector, but have shape {describe_shape(rows.shape)}"
        )


def owned(given: Any, dtype: DType, what: str) -> ValueArray:
    """Return values in the array's dtype, in memory of their own."""
    return _own(arrays.converted(given, dtype, what).view(dtype.numpy), what)


def _own(values: ValueArray, what: str) -> ValueArray:
    """Return the values; copy a view, which may be of arrays that the update changes."""
    try:
        return values if values.flags.owndata else values.copy()
    except MemoryError as error:
        pass_on(error)
        raise ResourceExhaustedError(f"This process has no memory for a copy of {what}") from error


def rows_like(values: ValueArray, shape: tuple[int, ...]) -> ValueArray:
    """Return the values. As in a gradient, ``[]`` may stand for no rows, and gets the shape."""
    return values.reshape(shape) if not shape[0] and values.shape == (0,) else values


def check_like(
    array: ParameterMember, values: ValueArray, shape: tuple[int, ...], what: str
) -> None:
    """Raise InvalidArgumentError unless values have this shape and the array's dtype."""
    if values.dtype != array.dtype.numpy:
        raise InvalidArgumentError(
            f"{what} {array.name!r} must have dtype {array.dtype.name}, but has {values.dtype}"
        )
    if values.shape != shape:
        raise InvalidArgumentError(
            f"{what} {array.name!r} must have shape {describe_shape(shape)}, but has "
            f"{describe_shape(values.shape)}"
        )
