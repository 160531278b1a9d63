"""What a segment holds: its members, rows, sums and memory; a part of the answer of `show`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shmacc_inspect.output import answer_of, finite

if TYPE_CHECKING:
    from shmacc import inspection


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the segment's file.

    Attributes:
        name: What it holds.
        offset: Where it begins.
        reserved: Bytes of memory that it occupies.
        used: Bytes of them that are in use; of all lanes and members together.
    """

    name: str
    offset: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What an optimizer keeps of an array.

    Attributes:
        name: The optimizer's name for it.
        bytes_used: Its size.
    """

    name: str
    bytes_used: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group, a shared array, or all that a single accumulator has.

    Attributes:
        name: Its name; empty if it is no group's.
        kind: As a segment's.
        dtype: Of its numbers.
        shape: Null if the rank is unknown; a dimension that is unknown is null. Of a table a row's.
        reduction_type: As it was made.
        gradients: Gradients of the round that had it.
        weight: The sum of their weights.
        rows: Distinct rows that they touch; of a table the rows in it.
        bytes_used: What its sums need, or the array, or the table's rows.
        value: Of a shared array that is a single integer, as counters are; else null.
        optimizer: Of an array of parameters, with its numbers; null: none.
        slots: What the optimizer keeps of it.
        max_rows: How many rows a table may have; null: any number, or it is no table.
        rows_added: Rows that a table ever got; null: it is no table.
        rows_removed: Rows that were ever removed from it; null: it is no table.
        initial: What a table's rows have at first; null: it is no table.
    """

    name: str
    kind: str
    dtype: str
    shape: list[int | None] | None
    reduction_type: str
    gradients: int
    weight: int
    rows: int
    bytes_used: int
    value: int | None
    optimizer: str | None
    slots: list[Slot]
    max_rows: int | None
    rows_added: int | None
    rows_removed: int | None
    initial: str | None

    @classmethod
    def of(cls, member: inspection.MemberDescription) -> Self:
        """Convert the library's record."""
        slots = [answer_of(slot, Slot) for slot in member.slots]
        return answer_of(member, cls, gradients=member.count, slots=slots)


@dataclass(frozen=True, slots=True)
class Row:
    """A row and how many gradients of this round touched it.

    Attributes:
        row: Its number.
        count: Gradients that touched it.
    """

    row: int
    count: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The most touched rows.

    Attributes:
        rows: The most touched first.
        still: False if gradients kept arriving while they were read.
    """

    rows: list[Row]
    still: bool

    @classmethod
    def of(cls, found: tuple[tuple[inspection.RowCount, ...], bool]) -> Self:
        """Convert the library's result."""
        touched, still = found
        return cls([answer_of(row, Row) for row in touched], still)


@dataclass(frozen=True, slots=True)
class Values:
    """The round's sums, summarised.

    Attributes:
        numbers: How many there are.
        norm: Of the finite ones; null if it overflows.
        largest: The largest magnitude.
        nan: How many are NaN.
        infinite: How many are infinite.
        still: False if gradients kept arriving while they were read.
    """

    numbers: int
    norm: float | None
    largest: float
    nan: int
    infinite: int
    still: bool

    @classmethod
    def of(cls, found: inspection.ValueSummary) -> Self:
        """Convert the library's record."""
        return answer_of(found, cls, norm=finite(found.norm))
