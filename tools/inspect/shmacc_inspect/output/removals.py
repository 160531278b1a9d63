"""The answers of `clean`, `remove` and `cancel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shmacc_inspect.output import SCHEMA_VERSION, answer_of

if TYPE_CHECKING:
    from shmacc import inspection
    from shmacc_inspect.output.details import Taker


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no process uses, or that could not be judged."""

    file_name: str
    why: str
    private: bool
    age_seconds: float
    idle_seconds: float
    bytes_reserved: int

    @classmethod
    def of(cls, found: inspection.Leftover) -> Self:
        """Convert the library's record."""
        return answer_of(found, cls, age_seconds=found.age, idle_seconds=found.idle)


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The answer of `clean`."""

    dry_run: bool
    removed: list[str]
    would_remove: list[Leftover]
    left: list[Leftover]
    failed: list[str]
    bytes_freed: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Removal:
    """The answer of `remove` for a segment."""

    dry_run: bool
    name: str
    state: str
    attached_pids: list[int]
    attached_elsewhere: list[int]
    obstacle: str | None
    refused: bool
    would_remove: list[str]
    removed: list[str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The answer of `cancel` for a segment."""

    dry_run: bool
    name: str
    line: list[Taker]
    lock_waiter_pids: list[int]
    lock_waiters_elsewhere: list[int]
    cancelled: int
    schema_version: int = SCHEMA_VERSION
