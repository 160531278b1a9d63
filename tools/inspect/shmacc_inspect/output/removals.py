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
    """A file that no process uses, or that could not be judged.

    Attributes:
        file_name: Its name in /dev/shm.
        why: What it is, or what keeps it from being removed.
        private: Whether it is a private accumulator's, which no job will use again.
        age_seconds: Since it was made.
        idle_seconds: Since it was last used.
        bytes_reserved: What it occupies.
    """

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
    """The answer of `clean`.

    Attributes:
        dry_run: Whether nothing was to be removed.
        removed: File names, semaphores included.
        would_remove: What `--yes` would remove.
        left: What could not be judged.
        failed: What could not be removed; the exit status is then 1.
        bytes_freed: Memory that was freed.
    """

    dry_run: bool
    removed: list[str]
    would_remove: list[Leftover]
    left: list[Leftover]
    failed: list[str]
    bytes_freed: int
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Removal:
    """The answer of `remove` for a segment.

    Attributes:
        dry_run: Whether nothing was to be removed.
        name: The file's.
        state: As in `list`.
        attached_pids: Living processes that have it attached.
        attached_elsewhere: Those of other pid namespaces, by their pids there.
        obstacle: Why it needs `--force`; null if it does not.
        refused: Whether there is an obstacle and no `--force`, or it is another user's; the exit
            status is then 1.
        would_remove: File names that `--yes` would remove.
        removed: File names, semaphores included.
    """

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
    """The answer of `cancel` for a segment.

    Attributes:
        dry_run: Whether nothing was to be cancelled.
        name: The file's.
        line: The waiting takes, as in `show`.
        lock_waiter_pids: Processes that wait for the lock, perhaps in a take.
        lock_waiters_elsewhere: Those of other pid namespaces, by their pids there.
        cancelled: How many takes in the queue were cancelled.
    """

    dry_run: bool
    name: str
    line: list[Taker]
    lock_waiter_pids: list[int]
    lock_waiters_elsewhere: list[int]
    cancelled: int
    schema_version: int = SCHEMA_VERSION
