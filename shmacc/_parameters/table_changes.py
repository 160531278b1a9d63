"""Turns an update or a restore of tables into changes for the extension, as `changes` does."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmacc._accumulators import saved_state
from shmacc._accumulators.taken import SparseTaken
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._parameters import change_checks as checks
from shmacc._parameters.change_checks import Asked, Change
from shmacc._parameters.tables import Known, checked_ids
from shmacc._values import arguments, arrays, dtypes
from shmacc.errors import InvalidArgumentError


def of_update(
    table: Known,
    taken: Any,
    asked: Asked,
    rate: float | None,
    in_round: Any,
    step: int,
) -> Change:
    """Return the change that a gradient or new rows make, and the removal of ids.

    Args:
        table: The table.
        taken: The gradient; None: there is none.
        asked: New rows, ``(ids, rows)``, in place of the gradient; what is removed and forgotten.
        rate: The learning rate; None: the optimizer's own.
        in_round: The table's member of the round, whose rows are not forgotten; None: none.
        step: The step of the round.

    Raises:
        InvalidArgumentError: An argument does not fit the table.
    """
    what = f"the ids of table {table.name!r}"
    ids, rows = np.empty(0, np.int64), np.empty(0, table.dtype)
    if table.name in asked.values:
        taken = None
    if taken is not None:
        rate = checks.learning_rate(table, rate)
        if not isinstance(taken, SparseTaken):
            raise InvalidArgumentError(
                f"The gradient of table {table.name!r} must be rows, but is an array: its member "
                "of the group is that of params.member_specs()"
            )
        ids, rows = checked_ids(taken.indices, what).copy(), np.ascontiguousarray(taken.values)
        checks.check_like(table, rows, (len(ids), *table.shape), "The gradient of table")
    elif table.name in asked.values:
        given = asked.values[table.name]
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
    what = f"the ids to remove of table {table.name!r}"
    removed = np.unique(checked_ids(asked.remove.get(table.name, ()), what))
    forget = None
    if table.name in asked.forget:
        age = steps_to_forget(asked.forget[table.name], table.name)
        kept = ids[:0]
        if isinstance(in_round, SparseTaken) and in_round is not taken:
            kept = np.unique(checked_ids(in_round.indices, f"the ids of table {table.name!r}"))
        forget = (max(step - age, -arguments.INT64_MAX), kept)
    rate = None if taken is None else rate
    return Change(table.number, rate, rows=ids, values=rows, rest=(removed, None, forget))


def steps_to_forget(value: object, name: str) -> int:
    """Return how many steps ago a row was updated at least, for a table to forget it.

    Raises:
        InvalidArgumentError: It is no integer, or negative.
    """
    what = f"the steps after which table {name!r} forgets a row"
    steps = arguments.int64(value, what)
    if steps < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but were {steps}")
    return steps


def of_state(state: Mapping[str, Any], number: int, table: Known) -> Change:
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
    rows = np.ascontiguousarray(np.concatenate(parts, axis=1))
    return Change(table.number, None, rows=ids.copy(), values=rows, rest=(None, steps, None))


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
