"""`remove`: remove segments by name."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shmacc import inspection
from shmacc.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError, ShmaccError
from shmacc.inspection import SegmentState
from shmacc_inspect import failures, formatting, naming, page
from shmacc_inspect.output import Removal, to_json
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from shmacc.inspection import AttachedProcess, Summary


def run(*, names: list[str], yes: bool, force: bool, everywhere: bool, json: bool) -> None:
    """Run the verb."""
    chosen = {name.system_name for name in naming.select(names, everywhere=everywhere)}
    plans = partial(_planned, force=force, beside=chosen)
    plan = list(naming.answers(names, plans, everywhere=everywhere))
    refused = any(planned.refused for planned, _ in plan)
    for planned, is_forcible in plan:
        answer = (
            _carried_out(planned, force=force, beside=chosen) if yes and not refused else planned
        )
        if json:
            print(to_json(answer))
        else:
            _show(answer, is_forcible=is_forcible)
    if refused:
        failures.end(failures.WRONG_OR_FAILED)
    if not yes and not json:
        page.write_line("nothing was removed; --yes removes it")


def _planned(summary: Summary, *, force: bool, beside: set[str]) -> tuple[Removal, bool]:
    """Return the planned removal, and whether --force would allow it if it is refused."""
    attached = _attached(summary)
    obstacle = _obstacle(summary, [process.pid_label for process in attached])
    refused = bool(obstacle) and not force
    system_name = summary.name.system_name
    files: tuple[str, ...] = ()
    # Do not offer --force for a run's segment: the rest of the run, or its next call, needs it.
    forcible = all(run.namespace != summary.name.namespace for run in inspection.list_runs())
    try:
        files = inspection.remove(system_name, force=force or refused, rehearse=True, beside=beside)
    except FailedPreconditionError as error:
        obstacle, refused = str(error), True
    except PermissionDeniedError as error:
        obstacle = f"{obstacle}; {error}" if obstacle else str(error)
        refused, forcible = True, False
    removal = Removal(
        dry_run=True,
        name=system_name,
        state=summary.state.value,
        attached=attached,
        obstacle=obstacle or None,
        refused=refused,
        would_remove=[] if refused else list(files),
        removed=[],
    )
    return removal, forcible


def _carried_out(planned: Removal, *, force: bool, beside: set[str]) -> Removal:
    removed: tuple[str, ...] = ()
    with contextlib.suppress(NotFoundError):  # it is gone, which is what was asked for
        removed = inspection.remove(planned.name, force=force, beside=beside)
    return replace(planned, dry_run=False, would_remove=[], removed=list(removed))


def _show(answer: Removal, *, is_forcible: bool) -> None:
    if answer.refused:
        advice = "; --force removes it all the same" if is_forcible else ""
        page.write_line(f"{answer.obstacle}{advice}")
        return
    if answer.dry_run:
        page.show(Cell(f"would remove {file_name}") for file_name in answer.would_remove)
    else:
        page.show(Cell(f"removed {file_name}") for file_name in answer.removed)
    if answer.obstacle:
        page.write_line(answer.obstacle)


def _attached(summary: Summary) -> list[AttachedProcess]:
    try:
        seen = inspection.describe(summary.name.system_name)
    except ShmaccError:
        return []
    return [process for process in seen.processes if process.alive]


def _obstacle(summary: Summary, pids: list[str]) -> str:
    if summary.state in {SegmentState.SOUND, SegmentState.FINISHED}:
        users = f"{'pid' if len(pids) == 1 else 'pids'} {', '.join(pids)}"
        return f"{summary.name.system_name} is in use by {users if pids else 'a living process'}"
    if summary.state is SegmentState.ORPHANED:
        return ""
    detail = summary.detail.removeprefix("The segment is damaged: ")
    state = "of another version" if summary.state is SegmentState.OTHER_VERSION else summary.state
    return formatting.printable(f"{summary.name.system_name} is {state}: {detail}")
