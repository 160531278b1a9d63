"""Turns an update or a restore of parameters into checked changes for the extension."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmacc._accumulators import saved_state
from shmacc._accumulators.taken import DenseTaken, SparseTaken
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._parameters import change_checks as checks
from shmacc._parameters import table_changes
from shmacc._parameters.change_checks import Asked, Change, Named
from shmacc._parameters.tables import Known
from shmacc._values import arguments, arrays
from shmacc._values.arguments import describe_shape
from shmacc.errors import InvalidArgumentError


class Array(Named):
    """An array of parameters."""

    __slots__ = ()

    noun = "Array"
    contents = "array"

    def bytes(self, region: int) -> int:
        return math.prod(self.shape_of(region)) * self.dtype.itemsize

    def empty(self, region: int) -> ValueArray:
        """Return an array for a copy of a region.

        Raises:
            ResourceExhaustedError: There is no memory for it.
        """
        return arrays.empty(self.shape_of(region), self.dtype)

    def described(self) -> str:
        """Return the array's description in a state."""
        shape = describe_shape(self.shape)
        return f"{self.spec.dtype.name} {shape} {self.described_optimizer()}"


def of_update(
    known: Mapping[str, Array | Known],
    gradients: Mapping[str, Any],
    asked: Asked,
    rates: Mapping[str, float],
    in_round: Mapping[str, Any],
    step: int,
) -> list[Change]:
    """Return the changes that gradients and new contents make, in the order of the arrays.

    Args:
        known: The arrays and tables, by name.
        gradients: A round's gradients, by array.
        asked: What takes their place, and what is removed.
        rates: Learning rates, by array. Other arrays use their optimizers' own, checked before.
        in_round: All members of the round, also those that `gradients` leave out.
        step: The step of the round.

    Raises:
        InvalidArgumentError: A gradient or contents do not fit their array, or there is no such
            array.
    """
    _check_names(known, gradients, asked)
    given = {name: checks.gradient(known[name], value) for name, value in asked.gradients.items()}
    gradients = {**gradients, **given}
    made = []
    for name, array in known.items():
        if isinstance(array, Known):
            if any(name in names for names in (gradients, *asked)):
                made.append(
                    table_changes.of_update(
                        array, gradients.get(name), asked, rates.get(name), in_round.get(name), step
                    )
                )
        elif name in asked.values:
            made.append(_contents(array, asked.values[name]))
        elif name in gradients:
            made.append(_gradient(array, gradients[name], rates.get(name)))
    return made


def _check_names(
    known: Mapping[str, Array | Known], gradients: Mapping[str, Any], asked: Asked
) -> None:
    for name in [*asked.remove, *asked.forget]:
        if isinstance(known.get(name), Array):
            raise InvalidArgumentError(
                f"Array {name!r} keeps its rows; those of tables are removed"
            )
    for name in [*gradients, *(name for names in asked for name in names)]:
        if name not in known:
            names = ", ".join(map(repr, list(known)[:8])) + (" ..." if len(known) > 8 else "")  # noqa: PLR2004
            leave_out = (
                ". To leave out a member that is no parameter: "
                "params.update({name: taken[name] for name in taken if name in params})"
            )
            raise InvalidArgumentError(
                f"There is no array {name!r}; there are {names}"
                f"{leave_out if name in gradients else ''}"
            )
    for name in asked.gradients:
        if name in asked.values:
            raise InvalidArgumentError(
                f"{name!r} is in values and in gradients: values are its new contents, gradients "
                "go through its optimizer; give one of them"
            )


def _gradient(array: Array, taken: SparseTaken | DenseTaken, rate: float | None) -> Change:
    rate = checks.learning_rate(array, rate)
    if isinstance(taken, DenseTaken):
        checks.check_like(array, taken.value, array.shape, "The gradient of array")
        dense = np.ascontiguousarray(taken.value)
        return Change(array.number, rate, rows=None, values=[dense], rest=[array.bytes(0)])
    checks.check_like(
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
    values = np.ascontiguousarray(taken.values)
    return Change(array.number, rate, rows=rows, values=[values], rest=[array.bytes(0)])


def _contents(array: Array, given: Any) -> Change:
    what = f"the new contents of array {array.name!r}"
    if not isinstance(given, tuple):
        values = checks.owned(given, array.spec.dtype, what)
        checks.check_like(array, values, array.shape, "The new contents of array")
        return Change(array.number, None, rows=None, values=[values], rest=[array.bytes(0)])
    if len(given) != 2 or not array.shape:  # noqa: PLR2004
        raise InvalidArgumentError(f"{what} must be an array or (indices, rows)")
    numbers = f"the row numbers of array {array.name!r}"
    rows = arrays.row_numbers(given[0], numbers)
    checks.check_vector(rows, numbers)
    shape = len(rows), *array.shape[1:]
    values = checks.rows_like(checks.owned(given[1], array.spec.dtype, what), shape)
    checks.check_like(array, values, shape, "The new rows of array")
    rows, values = checks.ascending(
        rows, values, f"Row {{}} of array {array.name!r} is given twice"
    )
    _check_rows(array, rows)
    return Change(array.number, None, rows=rows, values=[values], rest=[array.bytes(0)])


def _check_rows(array: Array, rows: IndexArray) -> None:
    """Raise InvalidArgumentError if one of these ascending row numbers is not in the array."""
    if len(rows) and not 0 <= rows[0] <= rows[-1] < array.shape[0]:
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise InvalidArgumentError(
            f"Array {array.name!r} has no row {wrong}: it has {array.shape[0]}"
        )


def of_state(own: tuple[Array | Known, ...], state: Any) -> tuple[list[Change], int, list[int]]:
    """Return the parts of a state to restore: changes, step, and each array's number of updates.

    Raises:
        InvalidArgumentError: It is no state, or that of other parameters.
    """
    existing = {array.name: array.described() for array in own}
    names = saved_state.names(state, "arrays", existing, "array", "parameters'")
    counts = saved_state.get(state, "updates")
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
        if isinstance(array, Known):
            made.append(table_changes.of_state(state, number, array))
        else:
            made.append(_restored(state, number, array))
    step = arguments.int64(saved_state.get(state, "step"), "the state's step")
    if step == -arguments.INT64_MAX - 1:
        raise InvalidArgumentError(f"the state's step must be greater than -2**63, but was {step}")
    return made, step, updates


def _restored(state: Mapping[str, Any], number: int, array: Array) -> Change:
    values, sizes = [], []
    for region, key in enumerate(array.keys(number)):
        saved = array.saved(state, key, array.shape_of(region))
        values.append(saved.astype(array.dtype, order="C", copy=not saved.flags.owndata))
        sizes.append(array.bytes(region))
    return Change(array.number, None, rows=None, values=values, rest=sizes)
