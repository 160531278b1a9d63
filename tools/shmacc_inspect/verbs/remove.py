"""`remove`: remove one segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from shmacc_inspect import failures, formatting, options, page
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from shmacc import inspection

EPILOG: Final = """\b
Examples:
  shmacc-inspect remove embeddings              what would be removed
  shmacc-inspect remove embeddings --yes
  shmacc-inspect remove embeddings --yes --force"""


def run(
    name: options.Name,
    *,
    yes: options.Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is in use, damaged, or of another version.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Remove a segment and its semaphore; without --yes, only name them.

    Refuses one that living processes have attached, unless --force is given: these go on using it
    until they close, and the next process that opens the name makes a new one.
    """
    from shmacc import inspection  # late: see the package
    from shmacc_inspect import naming
    from shmacc_inspect.output import to_json
    from shmacc_inspect.output.removals import Removal

    summary = naming.find(name)
    attached = _attached(summary)
    obstacle = _obstacle(summary, [process.pid_label for process in attached])
    if obstacle and not force:
        page.write_line(f"{obstacle}; --force removes it all the same")
        failures.end(failures.WRONG_OR_FAILED)
    files = inspection.remove(summary.name.system_name, force=force, rehearse=not yes)
    removed = files if yes else ()
    answer = Removal(
        dry_run=not yes,
        name=summary.name.system_name,
        state=summary.state.value,
        attached_pids=[process.pid for process in attached if process.pid_is_here],
        attached_elsewhere=[process.pid for process in attached if not process.pid_is_here],
        removed=list(removed),
    )
    if json:
        print(to_json(answer))
    elif yes:
        page.show([Cell(f"removed {file_name}") for file_name in removed])
    else:
        page.show([Cell(f"would remove {file_name}") for file_name in files])
    if obstacle:
        page.write_line(obstacle)
    if not yes:
        page.write_line("nothing was removed; --yes removes it")


def _attached(summary: inspection.Summary) -> list[inspection.AttachedProcess]:
    from shmacc import inspection  # late: see the package
    from shmacc.errors import ShmaccError

    try:
        seen = inspection.describe(summary.name.system_name)
    except ShmaccError:
        return []
    return [process for process in seen.processes if process.alive]


def _obstacle(summary: inspection.Summary, pids: list[str]) -> str:
    from shmacc.inspection import SegmentState

    if summary.state is SegmentState.SOUND:
        said = f"pid {', '.join(pids)}" if pids else "a living process"
        return f"{summary.name.system_name} is in use by {said}"
    if summary.state is SegmentState.ORPHANED:
        return ""
    return formatting.printable(f"{summary.name.system_name} is {summary.state}: {summary.detail}")
