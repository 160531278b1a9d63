"""`clean`: remove files that no living process uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import ShmaccError
from shmacc_inspect import failures, formatting, naming, page
from shmacc_inspect.output import Cleaning, to_json
from shmacc_inspect.page import Cell, Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmacc.inspection import Leftover

_COLUMNS: Final = (
    Column("WOULD REMOVE", lambda of: Cell(of.file_name, "bold"), whole=True),
    Column("MEMORY", lambda of: page.size(of.bytes_reserved), right=True, rank=2),
    Column("UNUSED", lambda of: page.duration(of.idle), right=True, rank=1),
    Column("WHY", lambda of: of.why, least=24),
)
_SEMAPHORE: Final = "sem.shmacc."


def run(
    *, names: list[str], older_than: float, private: bool, yes: bool, everywhere: bool, json: bool
) -> None:
    """Run the verb."""
    found = _leftovers(names or ["*"], older_than, everywhere=everywhere, private=private)
    removable = [leftover for leftover in found if leftover.removable]
    left = [leftover for leftover in found if not leftover.removable]
    answer, things = _carried_out(removable, left, yes=yes)
    _show(answer, things, json=json)
    if answer.failed:
        failures.end(failures.WRONG_OR_FAILED)


def _leftovers(
    given: Iterable[str], older_than: float, *, everywhere: bool, private: bool
) -> list[Leftover]:
    """List the leftovers of these names and globs. A glob may match nothing.

    Raises:
        NotFoundError: A name without wildcards does not exist.
    """
    namespace = naming.scope(everywhere=everywhere)
    found: dict[str, Leftover] = {}
    for name in given:
        # A name means a segment and its semaphores; a semaphore's own file name is also accepted.
        exact = None if name.startswith(_SEMAPHORE) else naming.one(name)
        pattern = exact.system_name if exact else name
        scope = None if exact else namespace
        leftovers = inspection.leftovers(
            pattern, older_than=older_than, namespace=scope, private=private
        )
        if exact and not leftovers and not inspection.leftovers(pattern):
            naming.select([name], everywhere=everywhere)  # raises, unless the segment is in use
        found |= {leftover.file_name: leftover for leftover in leftovers}
    return [found[file_name] for file_name in sorted(found)]


def _carried_out(
    removable: list[Leftover], left: list[Leftover], *, yes: bool
) -> tuple[Cleaning, int]:
    """Return the answer, and how many things it has: a segment and its semaphore are one thing."""
    removed: list[str] = []
    would_remove: list[Leftover] = []
    failed: list[str] = []
    freed = things = 0
    for leftover in removable:
        try:
            names = inspection.clean(leftover, rehearse=not yes)
        except (ShmaccError, OSError) as error:
            failed.append(f"{leftover.file_name}: {error}" if yes else str(error))
            continue
        things += bool(names)
        if yes:
            removed += names
            freed += leftover.bytes_reserved if names else 0
        else:
            would_remove.append(leftover)
    answer = Cleaning(
        dry_run=not yes,
        removed=removed,
        would_remove=would_remove,
        left=left,
        failed=failed,
        bytes_freed=freed,
    )
    return answer, things


def _show(answer: Cleaning, things: int, *, json: bool) -> None:
    if json:
        print(to_json(answer))
    elif answer.dry_run:
        if answer.would_remove:
            page.show([Table.of(_COLUMNS, answer.would_remove)])
    else:
        page.show([Cell(f"removed {file_name}") for file_name in answer.removed])
    for leftover in answer.left:
        page.write_line(f"left {leftover.file_name}: {formatting.printable(leftover.why)}")
    for failure in answer.failed:
        page.write_line(f"failed: {formatting.printable(failure)}")
    if answer.dry_run:
        size = formatting.size(sum(leftover.bytes_reserved for leftover in answer.would_remove))
        count = formatting.count_of(things, "thing")
        advice = "; nothing was removed, --yes removes them" if answer.would_remove else ""
        page.write_line(f"{count} to remove ({size}){advice}")
    else:
        freed = formatting.size(answer.bytes_freed)
        page.write_line(f"{formatting.count_of(things, 'thing')} removed ({freed})")
