"""`clean`: remove files that no living process uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from shmacc_inspect import failures, formatting, options, page
from shmacc_inspect.page import Cell, Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmacc import inspection
    from shmacc_inspect.output.removals import Cleaning, Leftover

EPILOG: Final = """\b
Examples:
  shmacc-inspect clean                           what would be removed, and what not
  shmacc-inspect clean --yes
  shmacc-inspect clean --yes --older-than 2h 'job7-*'"""

_COLUMNS: Final = (
    Column("WOULD REMOVE", least=24),
    Column("MEMORY", right=True, rank=2),
    Column("UNUSED", right=True, rank=1),
    Column("WHY", least=24),
)


def run(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GLOB",
            help="Only names that match one of these.",
            autocompletion=options.complete_name,
            show_default=False,
        ),
    ] = None,
    *,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Only what was last used longer ago: 90s, 10m, 2h, 3d.",
            show_default=False,
        ),
    ] = "0s",
    private: Annotated[
        bool,
        typer.Option("--private", help="Only private accumulators', which no job uses again."),
    ] = False,
    yes: options.Yes = False,
    everywhere: options.AllNamespaces = False,
    json: options.Json = False,
) -> None:
    """Remove segments that no living process uses; without --yes, only list them.

    Also removes semaphores whose segment is gone. Death is proved by the kernel, never guessed, and
    proved again at the moment of removal; what could not be judged is left and listed. Two cleaners
    at once do each other no harm.
    """
    from shmacc_inspect.output.removals import Leftover  # late: see the package

    found = _leftovers(
        patterns or ["*"], _seconds(older_than), everywhere=everywhere, private=private
    )
    removable = [leftover for leftover in found if leftover.removable]
    left = [Leftover.of(leftover) for leftover in found if not leftover.removable]
    answer = _remove(removable, left) if yes else _plan(removable, left)
    _show(answer, json=json)
    if answer.failed:
        failures.end(failures.WRONG_OR_FAILED)


def _seconds(text: str) -> float:
    try:
        return formatting.parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--older-than'") from error


def _leftovers(
    patterns: Iterable[str], older_than: float, *, everywhere: bool, private: bool
) -> list[inspection.Leftover]:
    from shmacc import inspection  # late: see the package

    namespace = options.namespace(everywhere=everywhere)
    found = {
        leftover.file_name: leftover
        for pattern in patterns
        for leftover in inspection.leftovers(
            pattern, older_than=older_than, namespace=namespace, private=private
        )
    }
    return [found[file_name] for file_name in sorted(found)]


def _plan(removable: list[inspection.Leftover], left: list[Leftover]) -> Cleaning:
    from shmacc import inspection
    from shmacc.errors import ShmaccError
    from shmacc_inspect.output.removals import Cleaning, Leftover

    would: list[Leftover] = []
    failed: list[str] = []
    for leftover in removable:
        try:
            inspection.clean(leftover, rehearse=True)
            would.append(Leftover.of(leftover))
        except ShmaccError as error:
            failed.append(str(error))
    return Cleaning(
        dry_run=True, removed=[], would_remove=would, left=left, failed=failed, bytes_freed=0
    )


def _remove(removable: list[inspection.Leftover], left: list[Leftover]) -> Cleaning:
    from shmacc import inspection
    from shmacc.errors import ShmaccError
    from shmacc_inspect.output.removals import Cleaning

    removed: list[str] = []
    failed: list[str] = []
    freed = 0
    for leftover in removable:
        try:
            names = inspection.clean(leftover)
            removed += names
            freed += leftover.bytes_reserved if names else 0
        except (ShmaccError, OSError) as error:
            failed.append(f"{leftover.file_name}: {error}")
    return Cleaning(
        dry_run=False,
        removed=removed,
        would_remove=[],
        left=left,
        failed=failed,
        bytes_freed=freed,
    )


def _show(answer: Cleaning, *, json: bool) -> None:
    from shmacc_inspect.output import to_json

    if json:
        print(to_json(answer))
    elif answer.dry_run:
        if answer.would_remove:
            page.show([Table(_COLUMNS, [_row(leftover) for leftover in answer.would_remove])])
    else:
        page.show([Cell(f"removed {file_name}") for file_name in answer.removed])
    for leftover in answer.left:
        page.write_line(f"left {leftover.file_name}: {formatting.printable(leftover.why)}")
    for failure in answer.failed:
        page.write_line(f"failed: {formatting.printable(failure)}")
    if answer.dry_run:
        size = formatting.size(sum(leftover.bytes_reserved for leftover in answer.would_remove))
        count = formatting.count_of(len(answer.would_remove), "thing")
        advice = "; nothing was removed, --yes removes them" if answer.would_remove else ""
        page.write_line(f"{count} to remove ({size}){advice}")
    else:
        freed = formatting.size(answer.bytes_freed)
        page.write_line(f"{formatting.count_of(len(answer.removed), 'name')} removed ({freed})")


def _row(leftover: Leftover) -> list[Cell]:
    return [
        Cell(leftover.file_name, "bold"),
        Cell(formatting.size(leftover.bytes_reserved)),
        Cell(formatting.duration(leftover.idle_seconds)),
        Cell(leftover.why),
    ]
