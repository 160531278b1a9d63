"""Turns an update of parameters into checked changes for the extension."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shmacc._accumulators.taken import DenseTaken, GroupTaken, SparseTaken
from shmacc._base.array_types import IndexArray
from shmacc._parameters import change_checks as checks
from shmacc._parameters.change_checks import ArrayChange, Asked, Change, TableChange
from shmacc._parameters.members import ParameterArray, ParameterMember, ParameterTable, checked_ids
from shmacc._values import arguments, arrays
from shmacc.errors import FailedPreconditionError, InvalidArgumentError


class OpenRound(NamedTuple):
    """An open round, and the gradients that an update takes from it.

    Attributes:
        step: The round's step.
        means: The gradients, by array.
        members: All members of the round, even if `means` leaves them out.
    """

    step: int
    means: Mapping[str, Any]
    members: Mapping[str, Any]


class Block(Protocol):
    """The block of an open round."""

    @property
    def given(self) -> Any:
        """The value that the user's ``with`` block got; None: the round has ended."""

    @property
    def taken(self) -> Any:
        """The extension's record of the round, which has a `step`."""


_Block = TypeVar("_Block", bound=Block)


def round_of(
    taken: Any, names: Collection[str], blocks: Iterable[_Block]
) -> tuple[_Block, OpenRound]:
    """Find the open round that `taken` comes from. Return its block, and the round.

    Args:
        taken: The value of the round's block; or a mapping to parts of the value. Members that the
            mapping leaves out update no array, but still belong to the round.
        names: The names of all arrays and tables.
        blocks: The blocks that this process has open.

    Raises:
        InvalidArgumentError: The round is a single accumulator's, and there are several arrays.
        FailedPreconditionError: `taken` does not come from a round that this process has open.
    """
    # Read `given` only once: it becomes None when another thread ends the round.
    all_given = [(block, block.given) for block in blocks]
    rounds = [(block, given) for block, given in all_given if given is not None]
    whole = taken._round if isinstance(taken, GroupTaken) else taken  # noqa: SLF001
    found = next((block for block, given in rounds if given is whole), None)
    if found is not None and isinstance(taken, GroupTaken):
        return found, OpenRound(found.taken.step, taken, whole)
    if found is not None:
        if len(names) > 1:
            raise InvalidArgumentError(
                f"The round is of a single accumulator, but there are {len(names)} arrays: say of "
                'which it is, as in update({"name": taken})'
            )
        means = dict.fromkeys(names, taken)
        return found, OpenRound(found.taken.step, means, means)
    if isinstance(taken, Mapping) and not isinstance(taken, GroupTaken):
        # Compare by identity: parts of a round are arrays, which compare element by element.
        parts = {id(part) for part in taken.values()}
        if not parts and len(rounds) > 1:
            raise FailedPreconditionError(
                "An empty mapping does not say of which round it is, and this process has "
                f"{len(rounds)} open: params.update(taken.only(), gradients={{...}}), with what a "
                "group's block was given; update({\"name\": taken}) of a single accumulator's"
            )
        for block, given in rounds:
            own = given.values() if isinstance(given, GroupTaken) else [given]
            if parts <= {id(part) for part in own}:
                of_group = given if isinstance(given, GroupTaken) else {}
                return block, OpenRound(block.taken.step, taken, {**of_group, **taken})
    raise FailedPreconditionError(
        "An update is made in the block of a round, of what the block was given, or of some of its "
        "members: `with group.round(n) as taken: params.update(taken)`, or update(taken.only(...)) "
        f"or update(taken.without(...)). This {type(taken).__name__} is not of a round that this "
        "process has open. Gradients and contents of your own are given as in "
        "update(taken.only(), gradients={...}, values={...}). (In rounds of a "
        "shmacc.ray.AccumulatorGroup only its shmacc.ray.Parameters can be updated)"
    )


def of_update(
    own: Sequence[ParameterArray | ParameterTable],
    found: OpenRound,
    asked: Asked,
    rates: Mapping[str, float],
) -> list[Change]:
    """Return the changes that gradients and new contents make, in the order of the arrays.

    Args:
        own: The arrays and tables.
        found: The round.
        asked: What replaces the round's gradients, and what is removed.
        rates: Learning rates, by array. Other arrays use their optimizer's rate, which was checked.

    Raises:
        InvalidArgumentError: A gradient or contents do not fit their array, or there is no such
            array.
    """
    known = {member.name: member for member in own}
    _check_names(known, found.means, asked)
    given = {name: checks.gradient(known[name], value) for name, value in asked.gradients.items()}
    gradients = {**found.means, **given}
    made: list[Change] = []
    for name, array in known.items():
        # A table may lose rows although it has no gradient.
        if isinstance(array, ParameterTable):
            if any(name in names for names in (gradients, *asked)):
                made.append(
                    _table_change(array, gradients.get(name), asked, rates.get(name), found)
                )
        elif name in asked.values:
            made.append(_contents(array, asked.values[name]))
        elif name in gradients:
            made.append(_gradient(array, gradients[name], rates.get(name)))
    return made


def _check_names(
    known: Mapping[str, ParameterMember], gradients: Mapping[str, Any], asked: Asked
) -> None:
    for name in [*asked.remove, *asked.forget]:
        if isinstance(known.get(name), ParameterArray):
            raise InvalidArgumentError(
                f"Array {name!r} keeps its rows; those of tables are removed"
            )
    for name in [*gradients, *(name for names in asked for name in names)]:
        if name not in known:
            names = ", ".join(map(repr, list(known)[:8])) + (" ..." if len(known) > 8 else "")  # noqa: PLR2004
            leave_out = f". To leave out a member that is no parameter: taken.without({name!r})"
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


def _gradient(
    array: ParameterArray, taken: SparseTaken | DenseTaken, rate: float | None
) -> ArrayChange:
    rate = checks.learning_rate(array, rate)
    if isinstance(taken, DenseTaken):
        checks.check_like(array, taken.value, array.shape, "The gradient of array")
        dense = np.ascontiguousarray(taken.value)
        return ArrayChange(array.number, rate, None, [arrays.bytes_of(dense)])
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
    return ArrayChange(array.number, rate, rows, [arrays.bytes_of(values)])


def _contents(array: ParameterArray, given: Any) -> ArrayChange:
    what = f"the new contents of array {array.name!r}"
    if not isinstance(given, tuple):
        values = checks.owned(given, array.dtype, what)
        checks.check_like(array, values, array.shape, "The new contents of array")
        return ArrayChange(array.number, None, None, [arrays.bytes_of(values)])
    if len(given) != 2 or not array.shape:  # noqa: PLR2004
        raise InvalidArgumentError(f"{what} must be an array or (indices, rows)")
    numbers = f"the row numbers of array {array.name!r}"
    rows = arrays.row_numbers(given[0], numbers)
    checks.check_vector(rows, numbers)
    shape = len(rows), *array.shape[1:]
    values = checks.rows_like(checks.owned(given[1], array.dtype, what), shape)
    checks.check_like(array, values, shape, "The new rows of array")
    rows, values = checks.ascending(
        rows, values, f"Row {{}} of array {array.name!r} is given twice"
    )
    _check_rows(array, rows)
    return ArrayChange(array.number, None, rows, [arrays.bytes_of(values)])


def _check_rows(array: ParameterArray, rows: IndexArray) -> None:
    """Raise InvalidArgumentError unless all row numbers, which ascend, are in the array."""
    if len(rows) and not 0 <= rows[0] <= rows[-1] < array.shape[0]:
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise InvalidArgumentError(
            f"Array {array.name!r} has no row {wrong}: it has {array.shape[0]}"
        )


def _table_change(
    table: ParameterTable, taken: Any, asked: Asked, rate: float | None, found: OpenRound
) -> TableChange:
    """Return the change that a gradient or new rows make, and the removal of ids.

    Args:
        table: The table.
        taken: The gradient; None: there is none.
        asked: New rows, ``(ids, rows)``, which replace the gradient; ids to remove and forget.
        rate: The learning rate; None: the optimizer's own.
        found: The round, whose rows are not forgotten.

    Raises:
        InvalidArgumentError: An argument does not fit the table.
    """
    what = f"the ids of table {table.name!r}"
    ids, rows = np.empty(0, np.int64), np.empty(0, table.dtype.numpy)
    # New contents take the place of the gradient.
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
        rows = checks.owned(given[1], table.dtype, f"the new rows of table {table.name!r}")
        rows = checks.rows_like(rows, (len(ids), *table.shape))
        checks.check_like(table, rows, (len(ids), *table.shape), "The new rows of table")
        ids, rows = checks.ascending(ids, rows, f"Id {{}} of table {table.name!r} is given twice")
    what = f"the ids to remove of table {table.name!r}"
    removed = np.unique(checked_ids(asked.remove.get(table.name, ()), what))
    before, kept = None, ids[:0]
    if table.name in asked.forget:
        age = steps_to_forget(asked.forget[table.name], table.name)
        in_round = found.members.get(table.name)
        if isinstance(in_round, SparseTaken) and in_round is not taken:
            kept = np.unique(checked_ids(in_round.indices, f"the ids of table {table.name!r}"))
        before = max(found.step - age, -arguments.INT64_MAX)
    rate = None if taken is None else rate
    values = arrays.bytes_of(rows)
    return TableChange(table.number, rate, ids, values, removed, None, before, kept)


def steps_to_forget(value: object, name: str) -> int:
    """Return after how many steps without an update a table forgets a row.

    Raises:
        InvalidArgumentError: The value is no integer, or negative.
    """
    what = f"the steps after which table {name!r} forgets a row"
    steps = arguments.int64(value, what)
    if steps < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but were {steps}")
    return steps
