"""What an update or a restore makes of parameters, checked, as the extension takes it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shmacc import optim
from shmacc._accumulators import saving
from shmacc._gradients import arguments, arrays
from shmacc._gradients.arguments import describe_shape
from shmacc._gradients.handlers import pass_on
from shmacc._gradients.spec import MemberSpec
from shmacc._records.array_types import IndexArray, ValueArray
from shmacc._records.taken import DenseTaken, SparseTaken
from shmacc.errors import InvalidArgumentError, ResourceExhaustedError


@dataclass(frozen=True, slots=True)
class Array:
    """An array of parameters.

    It has regions: 0 is the array, the others are its optimizer's slots.
    """

    number: int
    spec: MemberSpec
    optimizer: optim.Optimizer | None

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's."""
        return self.spec.dtype.numpy

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(dim or 0 for dim in self.spec.shape or ())

    @property
    def slots(self) -> tuple[optim.Slot, ...]:
        """What its optimizer keeps."""
        return () if self.optimizer is None else self.optimizer.slots()

    def shape_of(self, region: int) -> tuple[int, ...]:
        """Return the shape of a region."""
        return self.shape[:-1] if region and self.slots[region - 1].rowwise else self.shape

    def bytes(self, region: int) -> int:
        """Return the size of a region."""
        return math.prod(self.shape_of(region)) * self.dtype.itemsize

    def empty(self, region: int) -> ValueArray:
        """Return an array for a copy of a region.

        Raises:
            ResourceExhaustedError: There is no memory for it.
        """
        try:
            return np.empty(self.shape_of(region), self.dtype)
        except MemoryError as error:
            pass_on(error)
            raise ResourceExhaustedError(
                f"This process has no memory for a copy of array {self.name!r}"
            ) from error

    def keys(self) -> list[str]:
        """Return the names of its regions in a state."""
        return [f"{self.number}.array", *(f"{self.number}.{slot.name}" for slot in self.slots)]

    def described(self) -> str:
        """Return what it is, in a state."""
        return f"{self.spec.dtype.name} {describe_shape(self.shape)} {self.optimizer!r}"


class Change(NamedTuple):
    """What becomes of a region of an array.

    Attributes:
        array: The array's number.
        region: The region.
        rate: The learning rate, if the values are gradients; None: they are new contents.
        rows: Which rows, ascending; None: all.
        values: The values, in C order.
        bytes: The size of the region.
    """

    array: int
    region: int
    rate: float | None
    rows: IndexArray | None
    values: ValueArray
    bytes: int

    @property
    def as_given(self) -> tuple[Any, ...]:
        """As the extension takes it."""
        as_bytes = self.values.reshape(-1).view(np.uint8)
        return (self.array, self.region, self.rate, self.rows, as_bytes, self.bytes)


def of_update(
    known: Mapping[str, Array],
    gradients: Mapping[str, Any],
    values: object,
    rates: Mapping[str, float],
) -> list[Change]:
    """Return the changes that gradients and new contents make, in the order of the arrays.

    Args:
        known: The arrays.
        gradients: Of a round.
        values: New contents.
        rates: Learning rates by array; of others their optimizers' own, which were checked.

    Raises:
        InvalidArgumentError: One of them does not fit its array, or there is no such array.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(
            f"values are a mapping from name to contents, but were a {type(values).__name__}"
        )
    for name in [*gradients, *values]:
        if name not in known:
            names = ", ".join(map(repr, list(known)[:8])) + (" ..." if len(known) > 8 else "")  # noqa: PLR2004
            raise InvalidArgumentError(
                f"There is no array {name!r}; there are {names}. To leave out a member that is no "
                "parameter: params.update({name: taken[name] for name in taken if name in params})"
            )
    made = []
    for name, array in known.items():
        if name in values:
            made.append(_contents(array, values[name]))
        elif name in gradients:
            made.append(_gradient(array, gradients[name], rates.get(name)))
    return made


def _gradient(array: Array, taken: SparseTaken | DenseTaken, rate: float | None) -> Change:
    if array.optimizer is None:
        raise InvalidArgumentError(
            f"Array {array.name!r} has no optimizer, so its gradient can change nothing: give its "
            "new contents in values"
        )
    if rate is None:
        rate = array.optimizer.learning_rate
    else:
        info = np.finfo(array.dtype)
        array.optimizer.check_rate(rate, float(info.tiny), float(info.max))
    if isinstance(taken, DenseTaken):
        _check_like(array, taken.value, array.shape, "The gradient of array")
        dense = np.ascontiguousarray(taken.value)
        return Change(array.number, 0, rate, rows=None, values=dense, bytes=array.bytes(0))
    _check_like(
        array, taken.values, (len(taken.indices), *array.shape[1:]), "The gradient of array"
    )
    if not array.shape:
        raise InvalidArgumentError(f"Array {array.name!r} is a number, and has no rows")
    if len(array.shape) == 1 and any(slot.rowwise for slot in array.slots):
        raise InvalidArgumentError(
            f"Array {array.name!r} has one dimension and a rowwise accumulator, which is of all of "
            "it: its gradient must be dense"
        )
    rows = arrays.row_numbers(taken.indices, f"the row numbers of array {array.name!r}")
    _check_rows(array, rows)
    return Change(
        array.number,
        0,
        rate,
        rows=rows,
        values=np.ascontiguousarray(taken.values),
        bytes=array.bytes(0),
    )


def _contents(array: Array, given: Any) -> Change:
    what = f"the new contents of array {array.name!r}"
    if not isinstance(given, tuple):
        values = _owned(given, array, what)
        _check_like(array, values, array.shape, "The new contents of array")
        return Change(array.number, 0, None, rows=None, values=values, bytes=array.bytes(0))
    if len(given) != 2 or not array.shape:  # noqa: PLR2004
        raise InvalidArgumentError(f"{what} must be an array or (indices, rows)")
    rows = arrays.row_numbers(given[0], f"the row numbers of array {array.name!r}")
    if rows.ndim != 1:
        raise InvalidArgumentError(
            f"The row numbers of array {array.name!r} must be a vector, but have shape "
            f"{describe_shape(rows.shape)}"
        )
    values = _owned(given[1], array, what)
    _check_like(array, values, (len(rows), *array.shape[1:]), "The new rows of array")
    if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], np.ascontiguousarray(values[order])
        repeated = rows[1:][rows[1:] == rows[:-1]]
        if len(repeated):
            raise InvalidArgumentError(f"Row {repeated[0]} of array {array.name!r} is given twice")
    _check_rows(array, rows)
    return Change(array.number, 0, None, rows=rows, values=values, bytes=array.bytes(0))


def _owned(given: Any, array: Array, what: str) -> ValueArray:
    """Return it in the array's dtype and in memory of its own: it may be a view of the arrays."""
    values = arrays.converted(given, array.spec.dtype, what).view(array.dtype)
    try:
        return values if values.flags.owndata else values.copy()
    except MemoryError as error:
        pass_on(error)
        raise ResourceExhaustedError(f"This process has no memory for a copy of {what}") from error


def _check_like(array: Array, values: ValueArray, shape: tuple[int, ...], what: str) -> None:
    if values.dtype != array.dtype:
        raise InvalidArgumentError(
            f"{what} {array.name!r} must have dtype {array.spec.dtype.name}, but has {values.dtype}"
        )
    if values.shape != shape:
        raise InvalidArgumentError(
            f"{what} {array.name!r} must have shape {describe_shape(shape)}, but has "
            f"{describe_shape(values.shape)}"
        )


def _check_rows(array: Array, rows: IndexArray) -> None:
    """Raise InvalidArgumentError if ascending rows are not rows of the array."""
    if len(rows) and not 0 <= rows[0] <= rows[-1] < array.shape[0]:
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise InvalidArgumentError(
            f"Array {array.name!r} has no row {wrong}: it has {array.shape[0]}"
        )


def of_state(own: tuple[Array, ...], state: Any) -> tuple[list[Change], int, list[int]]:
    """Return what restores a state: the changes, the step, how often each array was updated.

    Raises:
        InvalidArgumentError: It is no state, or that of other parameters.
    """
    existing = {array.name: array.described() for array in own}
    names = saving.names(state, "arrays", existing, "array", "parameters'")
    counts = saving.get(state, "updates")
    if counts.shape != (len(names),):
        raise InvalidArgumentError(
            f"The state's 'updates' must be {len(names)} numbers, one of each array, but have "
            f"shape {describe_shape(counts.shape)}"
        )
    made: list[Change] = []
    updates = []
    for array in own:
        number = names.index(array.name)
        count = arguments.partial_count(counts[number], f"the updates of array {array.name!r}")
        updates.append(count)
        made += _regions(state, number, array)
    step = arguments.int64(saving.get(state, "step"), "the state's step")
    if step == -arguments.INT64_MAX - 1:
        raise InvalidArgumentError(f"the state's step must be greater than -2**63, but was {step}")
    return made, step, updates


def _regions(state: Mapping[str, Any], number: int, array: Array) -> Iterator[Change]:
    saved = [f"{number}.array", *(f"{number}.{slot.name}" for slot in array.slots)]
    for region, key in enumerate(saved):
        values = saving.get(state, key)
        if values.dtype.kind == "V" and values.dtype.itemsize == array.dtype.itemsize:
            values = values.view(array.dtype)  # as np.load makes it of a dtype that is not NumPy's
        if values.dtype != array.dtype or values.shape != array.shape_of(region):
            raise InvalidArgumentError(
                f"The state's {key!r} is {values.dtype} {describe_shape(values.shape)}, but array "
                f"{array.name!r} has {array.dtype} {describe_shape(array.shape_of(region))} there"
            )
        own = values.astype(array.dtype, order="C", copy=not values.flags.owndata)
        yield Change(
            array.number,
            region,
            None,
            rows=None,
            values=own,
            bytes=array.bytes(region),
        )
