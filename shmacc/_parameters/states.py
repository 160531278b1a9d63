"""Makes saved states of parameters, and turns a state into the changes that restore it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmacc import _core
from shmacc._accumulators import saved_state
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._parameters import change_checks as checks
from shmacc._parameters.change_checks import ArrayChange, Change, TableChange
from shmacc._parameters.members import ParameterArray, ParameterTable, checked_ids
from shmacc._values import arguments, arrays
from shmacc._values.arguments import describe_shape
from shmacc.errors import InvalidArgumentError

Copy = tuple[int, int, ValueArray]
"""What to read of an array: the array's number, the region's number, and where to copy it."""

TableCopy = tuple[IndexArray, ValueArray, IndexArray]
"""A copy of a table: ids, the rows' bytes, the steps of their last updates."""

Own = Sequence[ParameterArray | ParameterTable]
"""The members of parameters."""


def read(
    handle: _core.Handle, own: Own, copies: list[Copy], timeout: float | None, *, whole: bool
) -> tuple[int, list[int], list[TableCopy], tuple[int, int, int, int]]:
    """Make the `copies` of arrays, and copies of all tables, at one instant.

    Args:
        handle: The parameters' handle.
        own: The parameters' members.
        copies: The copies to make of arrays.
        timeout: Seconds to wait for the lock; None: for ever.
        whole: Whether to copy the optimizer's slots after each table's rows.

    Returns:
        The step, each member's number of updates, the tables, and the facts about a copy.
    """
    as_bytes = [(number, region, arrays.bytes_of(to)) for number, region, to in copies]
    tables = [member.number for member in own if isinstance(member, ParameterTable)]
    return _core.read_parameters(handle, as_bytes, tables, whole, timeout)


def to_state(
    handle: _core.Handle, own: Own, timeout: float | None
) -> tuple[dict[str, ValueArray], tuple[int, int, int, int]]:
    """Return the saved state of parameters, and the facts about a copy, like `read`."""
    state: dict[str, ValueArray] = {}
    copies = []
    for array in own:
        if isinstance(array, ParameterArray):
            for region, key in enumerate(array.keys(array.number)):
                state[key] = array.empty(region)
                copies.append((array.number, region, state[key]))
    step, updates, tables, known = read(handle, own, copies, timeout, whole=True)
    own_tables = [member for member in own if isinstance(member, ParameterTable)]
    for table, copy in zip(own_tables, tables, strict=True):
        state |= _to_table(table, copy)
    state["arrays"] = np.array([member.name for member in own])
    state["specs"] = np.array([member.described() for member in own])
    state["step"] = np.array(step)
    state["updates"] = np.array(updates)
    return state, known


def of_state(own: Own, state: Any) -> tuple[list[Change], int, list[int]]:
    """Return the parts of a state to restore: changes, step, and each array's number of updates.

    Raises:
        InvalidArgumentError: The value is no state, or other parameters' state.
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
        if isinstance(array, ParameterTable):
            made.append(_of_table(state, number, array))
        else:
            made.append(_of_array(state, number, array))
    step = arguments.int64(saved_state.get(state, "step"), "the state's step")
    # An update compares its round's step with step - 1 (update.hpp): this must be an int64, too.
    if step == -arguments.INT64_MAX - 1:
        raise InvalidArgumentError(f"the state's step must be greater than -2**63, but was {step}")
    return made, step, updates


def _of_array(state: Mapping[str, Any], number: int, array: ParameterArray) -> ArrayChange:
    values = []
    for region, key in enumerate(array.keys(number)):
        saved = array.saved(state, key, array.shape_of(region))
        own = saved.astype(array.dtype.numpy, order="C", copy=not saved.flags.owndata)
        values.append(arrays.bytes_of(own))
    return ArrayChange(array.number, None, None, values)


def _of_table(state: Mapping[str, Any], number: int, table: ParameterTable) -> TableChange:
    """Return the change that restores a table: it sets the state's rows, and removes all others.

    Raises:
        InvalidArgumentError: The state does not fit the table.
    """
    what = f"the state's ids of table {table.name!r}"
    ids = checked_ids(saved_state.get(state, f"{number}.ids"), what)
    checks.check_vector(ids, what)
    what = f"the state's last steps of table {table.name!r}"
    steps = arrays.row_numbers(saved_state.get(state, f"{number}.last_steps"), what)
    if steps.shape != ids.shape or (len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all())):
        raise InvalidArgumentError(
            f"The state's ids of table {table.name!r} do not ascend, or its last steps are others"
        )
    parts = []
    for part, key in enumerate(table.keys(number)):
        values = table.saved(state, key, (len(ids), *table.shape_of(part)))
        parts.append(values.reshape(len(ids), math.prod(table.shape_of(part))))
    values = arrays.bytes_of(np.ascontiguousarray(np.concatenate(parts, axis=1)))
    return TableChange(table.number, None, ids.copy(), values, None, steps, None, ids[:0])


def _to_table(table: ParameterTable, copy: TableCopy) -> dict[str, ValueArray]:
    """Return a table's part of a state: ids, rows, slots, last steps."""
    number, (ids, numbers, steps) = table.number, copy
    widths = [math.prod(table.shape_of(part)) for part in range(1 + len(table.slots))]
    whole = numbers.view(table.dtype.numpy).reshape(len(ids), sum(widths))
    state: dict[str, ValueArray] = {f"{number}.ids": ids, f"{number}.last_steps": steps}
    first = 0
    for part, key in enumerate(table.keys(number)):
        values = whole[:, first : first + widths[part]]
        state[key] = values.reshape(len(ids), *table.shape_of(part)).copy()
        first += widths[part]
    return state
