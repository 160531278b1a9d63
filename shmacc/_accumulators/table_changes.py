"""Turns an update or a restore of tables into changes for the extension, as `changes` does."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmacc._accumulators import change_checks as checks
from shmacc._accumulators import saving
from shmacc._accumulators.change_checks import Change
from shmacc._accumulators.tables import Known, checked_ids
from shmacc._gradients import arrays, dtypes
from shmacc._records.array_types import IndexArray, ValueArray
from shmacc._records.taken import SparseTaken
from shmacc.errors import InvalidArgumentError


def of_update(
    table: Known,
    gradients: Mapping[str, Any],
    values: Mapping[str, Any],
    remove: Mapping[str, Any],
    rate: float | None,
) -> Change:
    """Return the change that a gradient or new rows make, and the removal of ids.

    Args:
        table: The table.
        gradients: A round's gradients, by table.
        values: New rows, ``(ids, rows)``, by table. If this table has some, its gradient is unused.
        remove: Ids to remove, by table.
        rate: The learning rate; None: the optimizer's own.

    Raises:
        InvalidArgumentError: An argument does not fit the table.
    """
    what = f"the ids of table {table.name!r}"
    ids, rows = np.empty(0, np.int64), np.empty(0, table.dtype)
    taken = None if table.name in values else gradients.get(table.name)
    if taken is not None:
        rate = checks.learning_rate(table, rate)
        if not isinstance(taken, SparseTaken):
            raise InvalidArgumentError(
                f"The gradient of table {table.name!r} must be rows, but is an array: its member "
                "of the group is that of params.member_specs()"
            )
        ids, rows = checked_ids(taken.indices, what).copy(), np.ascontiguousarray(taken.values)
        checks.check_like(table, rows, (len(ids), *table.shape), "The gradient of table")
    elif table.name in values:
        given = values[table.name]
        if not isinstance(given, tuple) or len(given) != 2:  # noqa: PLR2004
            raise InvalidArgumentError(
                f"The new rows of table {table.name!r} must be given as (ids, rows)"
            )
        ids = checked_ids(given[0], what).copy()
        checks.check_vector(ids, what)
        rows = checks.owned(
            given[1], dtypes.resolve(table.dtype), f"the new rows of table {table.name!r}"
        )
        rows = checks.rows_like(rows, (len(ids), *table.shape))
        checks.check_like(table, rows, (len(ids), *table.shape), "The new rows of table")
        ids, rows = checks.ascending(ids, rows, f"Id {{}} of table {table.name!r} is given twice")
    removed = checked_ids(remove.get(table.name, ()), f"the ids to remove of table {table.name!r}")
    rate = None if taken is None else rate
    return Change(table.number, 0, rate, rows=ids, values=rows, rest=(np.unique(removed), None))


def of_state(state: Mapping[str, Any], number: int, table: Known) -> Change:
    """Return the change that restores a table: it sets the state's rows, and removes all others.

    Raises:
        InvalidArgumentError: The state does not fit the table.
    """
    what = f"the state's ids of table {table.name!r}"
    ids = checked_ids(saving.get(state, f"{number}.ids"), what)
    checks.check_vector(ids, what)
    what = f"the state's last steps of table {table.name!r}"
    steps = arrays.row_numbers(saving.get(state, f"{number}.last_steps"), what)
    if steps.shape != ids.shape or (len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all())):
        raise InvalidArgumentError(
            f"The state's ids of table {table.name!r} do not ascend, or its last steps are others"
        )
    parts = []
    for part, key in enumerate(table.keys(number)):
        values = table.saved(state, key, (len(ids), *table.shape_of(part)))
        parts.append(values.reshape(len(ids), math.prod(table.shape_of(part))))
    rows = np.ascontiguousarray(np.concatenate(parts, axis=1))
    return Change(table.number, 0, None, rows=ids.copy(), values=rows, rest=(None, steps))


def to_state(
    number: int, table: Known, read: tuple[IndexArray, ValueArray, IndexArray]
) -> dict[str, ValueArray]:
    """Return a table's part of a state: ids, rows, slots, last steps."""
    ids, numbers, steps = read
    widths = [math.prod(table.shape_of(part)) for part in range(1 + len(table.slots))]
    whole = numbers.view(table.dtype).reshape(len(ids), sum(widths))
    state: dict[str, ValueArray] = {f"{number}.ids": ids, f"{number}.last_steps": steps}
    first = 0
    for part, key in enumerate(table.keys(number)):
        values = whole[:, first : first + widths[part]]
        state[key] = values.reshape(len(ids), *table.shape_of(part)).copy()
        first += widths[part]
    return state
