"""The answers of `clean`, `remove` and `cancel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shmacc_inspect.output import SCHEMA_VERSION

if TYPE_CHECKING:
    from shmacc import inspection
    from shmacc_inspect.output.details import Taker


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no process uses, or that could not be judged."""

    file_name: str
    why: str
    age_seconds: float
    bytes_reserved: int

    @classmethod
    def of(cls, found: inspection.Leftover) -> Self:
        """Convert the library's record."""
        return cls(found.file_name, found.why, found.age, found.bytes_reserved)


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The answer of `clean`."""

    dry_run: bool
    removed: list[str]
    would_remove: list[Leftover]
    left: list[Leftover]
    failed: list[str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Removal:
    """The answer of `remove` for a segment."""

    dry_run: bool
    name: str
    state: str
    attached_pids: list[int]
    obstacle: str | None
    refused: bool
    removed: list[str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Cancelling:
    """The answer of `cancel` for a segment."""

    dry_run: bool
    name: str
    line: list[Taker]
    lock_waiter_pids: list[int]
    cancelled: int
    schema_version: int = SCHEMA_VERSION
