"""Checks one segment: its file, its records, and the processes that use it."""

import os
import stat
import time
from collections.abc import Iterator

from shmacc import _core
from shmacc._base import layout, names
from shmacc._base.layout import Activity
from shmacc._base.names import SegmentName
from shmacc.errors import DataLossError, PermissionDeniedError
from shmacc.inspection import _unlinked as unlinked
from shmacc.inspection._description import Description, describe
from shmacc.inspection._findings import (
    NOTHING,
    START_AGAIN,
    Finding,
    Severity,
    command,
    goes_on,
    memory,
    note,
    pids,
    wrong,
)
from shmacc.inspection._index_check import INCONSISTENT, of_tables, removal_of
from shmacc.inspection._listing import is_misnamed, open_view, summarise
from shmacc.inspection._loop_notes import loop_notes
from shmacc.inspection._processes import HALTED, Look
from shmacc.inspection._records import SegmentState
from shmacc.inspection._runs import Runs

UNREADABLE = "unreadable"
_AS_ITS_OWNER = "look as its owner, or as root"
_MOST_PERMITS = 2  # two processes may each post one when they release (lock.hpp)
_LOOKS = 3
_BETWEEN_LOOKS = 0.005  # seconds
_COMPARED_FOR = 2.0  # seconds; other segments wait to be checked
_LONGEST_COMMAND = 80  # characters


def findings(name: SegmentName, look: Look) -> Iterator[Finding]:
    """Yield the findings about a segment.

    Raises:
        NotFoundError: There is no such segment.
    """
    subject = name.system_name
    summary = summarise(name, look)
    match summary.state:
        case SegmentState.UNREADABLE:
            yield note(subject, UNREADABLE, summary.detail, _AS_ITS_OWNER)
        case SegmentState.STARTING:
            yield note(subject, "unfinished", summary.detail, "see which program made it")
        case SegmentState.OTHER_VERSION:
            remedy = f"look with that version; or {removal_of(name)}"
            yield wrong(subject, "other_version", summary.detail, remedy)
        case SegmentState.DAMAGED:
            yield wrong(subject, "damaged", summary.detail, removal_of(name))
        case SegmentState.ORPHANED:
            inside = list(_inside(name, look))
            has_remedy = any(
                each.severity is Severity.WRONG and each.kind in {"linked", "misnamed"}
                for each in inside
            )
            run = next(Runs.of(look).around(name.namespace), None)
            # A run has a finding of its own. A process that has the file open may be attaching.
            if run is None and not has_remedy and not look.openers(name.path):
                yield wrong(
                    subject,
                    "orphaned",
                    summary.detail,
                    f"{START_AGAIN}; or, if no job will use it again, "
                    f"`shmacc-inspect remove {subject} --yes`",
                )
            yield from inside
        case SegmentState.SOUND | SegmentState.FINISHED:
            yield from _inside(name, look)


def _inside(name: SegmentName, look: Look) -> Iterator[Finding]:
    try:
        with open_view(name) as view:
            looks = _look(name.system_name, look)
            yield from _belongings(name, view, looks[-1], look)
            yield from _lock(name, looks)
            for stall in looks[-1].summary.stalls:
                yield wrong(
                    name.system_name, stall.kind, stall.problem, stall.remedy, stall.command
                )
            yield from _attached(name, looks[-1])
            yield from _line(name, looks[-1])
            in_run = Runs.of(look).at(name.namespace) is not None
            yield from loop_notes(name.system_name, looks[-1], in_run=in_run)
            yield from _state(name, view)
    except PermissionDeniedError as error:
        yield note(name.system_name, UNREADABLE, str(error), _AS_ITS_OWNER)
    except DataLossError as error:
        yield wrong(name.system_name, "damaged", str(error), removal_of(name))


def _look(name: str, look: Look) -> list[Description]:
    """Describe the segment, a few times if a process seems to have died with the lock."""
    looks = [describe(name, look)]
    while len(looks) < _LOOKS and _nobody_finishes(looks[-1]):
        time.sleep(_BETWEEN_LOOKS)
        looks.append(describe(name, look))
    return looks


def _nobody_finishes(seen: Description) -> bool:
    if seen.lock.held or not (seen.lock.in_operation or seen.lock.tokens == 0):
        return False
    # The kernel hides this process's own locks from it: another thread here may be at work.
    own = (each for each in seen.processes if each.alive and each.pid_is_here)
    return not any(each.pid == os.getpid() and each.activity != Activity.IDLE for each in own)


def _belongings(
    name: SegmentName, view: _core.SegmentView, seen: Description, look: Look
) -> Iterator[Finding]:
    """Yield findings if file, name, owner and semaphore do not belong together."""
    subject, config = name.system_name, view.config()
    path = f"{names.SHM_DIRECTORY}/{subject}"
    if is_misnamed(name, config["name"]):
        made_as = f"it was made as {names.name_made_as(config['name'])!r}"
        if view.links > 1:
            yield wrong(
                subject,
                "linked",
                f"the file is a link to another segment's: {made_as}",
                f"remove this name, and nothing else: `{command('rm', path)}`",
            )
        else:
            yield wrong(
                subject, "misnamed", f"the file was renamed or copied; {made_as}", removal_of(name)
            )
    elif view.links > 1:
        yield note(
            subject, "linked", f"its file has {view.links} names", NOTHING + "the others are wrong"
        )
    if view.unlinked:
        yield note(
            subject,
            "removal_unfinished",
            "it was unlinked, but its name is still there: its remover has died or is still busy",
            NOTHING + "the next process that opens the name finishes the removal",
        )
    if seen.summary.mode != config["mode"]:
        yield note(
            subject,
            "mode_changed",
            f"its mode is {seen.summary.mode:04o}; it was made with {config['mode']:04o}",
            NOTHING + "if it was changed on purpose",
        )
    if unlinked.goes_at_logout(seen.summary.owner_uid, look):
        yield note(
            subject,
            "goes_at_logout",
            f"systemd will remove it when {seen.summary.owner} logs out for the last time",
            "let the user's processes linger, or set RemoveIPC=no in logind.conf",
            command("loginctl", "enable-linger", seen.summary.owner),
        )
    yield from _semaphore(name, seen)


def _semaphore(name: SegmentName, seen: Description) -> Iterator[Finding]:
    semaphore = names.semaphore_file(name.system_name, seen.token)
    path = f"{names.SHM_DIRECTORY}/{semaphore}"
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        yield note(
            semaphore,
            "semaphore_missing",
            "this semaphore is missing",
            NOTHING + "the next process that attaches makes another; until the processes "
            "that have the old one are gone, a wait for the lock may take up to 20 ms longer",
        )
        return
    remedy = f"remove it: `{command('rm', path)}`; the next process that attaches makes another"
    lanes, rest = divmod(status.st_size, layout.SEMAPHORE_BYTES)
    if not stat.S_ISREG(status.st_mode) or rest or not 1 <= lanes <= layout.MAX_LANES:
        yield wrong(
            semaphore,
            "semaphore_invalid",
            "this is not a semaphore: processes that wait for the lock may crash",
            remedy,
        )
    if status.st_uid != seen.summary.owner_uid:
        yield wrong(
            semaphore,
            "semaphore_foreign",
            f"it belongs to uid {status.st_uid}, its segment to uid {seen.summary.owner_uid}",
            remedy,
        )
    if seen.lock.tokens is not None and seen.lock.tokens > _MOST_PERMITS:
        yield note(
            semaphore,
            "semaphore_value",
            f"its value is {seen.lock.tokens}, not 0 to 2",
            NOTHING + "operations bring it down again",
        )


def _lock(name: SegmentName, looks: list[Description]) -> Iterator[Finding]:
    subject, last = name.system_name, looks[-1].lock
    same = len({look.generation for look in looks}) == 1
    left_alone = same and all(map(_nobody_finishes, looks))
    if left_alone and last.in_operation and looks[-1].update is None:
        yield note(
            subject,
            "operation_interrupted",
            "an operation was interrupted by the death of its process",
            NOTHING + "the next operation undoes it",
        )
    if left_alone and last.tokens == 0:
        yield note(
            subject,
            "token_lost",
            "the semaphore is at 0 though the lock is free: a process died with its permit",
            NOTHING + "the next operation that waits corrects it",
        )


def _attached(name: SegmentName, seen: Description) -> Iterator[Finding]:
    causes = " ".join(stall.problem for stall in seen.summary.stalls).replace(",", "").split()
    dead = [each.pid_label for each in seen.processes if not each.alive]
    dead = [label for label in dead if label not in causes]  # stalls name these already
    if dead:
        yield note(
            name.system_name,
            "dead_entries",
            f"entries of dead processes: {pids(dead)}",
            NOTHING + "they hold up nobody; the next process that attaches frees them",
        )
    for process in seen.processes:
        if process.activity == "?":
            yield wrong(
                name.system_name,
                "entry_overwritten",
                f"entry {process.entry} was overwritten",
                removal_of(name),
            )
        if process.condition in HALTED and not seen.summary.stalls:
            yield note(
                name.system_name,
                "process_stopped",
                f"pid {process.pid_label} ({_shortened(process.command)}) is attached, and is "
                f"{process.condition}",
                *goes_on([process.pid_label], process.condition),
            )


def _shortened(command_line: str) -> str:
    if len(command_line) <= _LONGEST_COMMAND:
        return command_line
    return command_line[:_LONGEST_COMMAND] + "..."


def _line(name: SegmentName, seen: Description) -> Iterator[Finding]:
    for take in seen.queue:
        if not take.alive:
            yield note(
                name.system_name,
                "dead_take",
                f"a take of a dead process (pid {take.pid_label}) is still in the queue",
                NOTHING + "the next apply or waiting take removes it",
            )


def _state(name: SegmentName, view: _core.SegmentView) -> Iterator[Finding]:
    for problem in _problems_of_counters(view):
        yield wrong(name.system_name, INCONSISTENT, problem, removal_of(name))
    yield from of_tables(name, view, seconds=_COMPARED_FOR)


def _problems_of_counters(view: _core.SegmentView) -> Iterator[str]:
    state = view.state()
    count, counters = state["count"], state["counters"]
    applied, taken, discarded = (counters[of] for of in ("applied", "taken", "discarded"))
    if applied != taken + discarded + count:
        yield (
            f"{applied} gradients were applied, but {taken} taken, {discarded} discarded and "
            f"{count} are there"
        )
    # The end of a round may have freed memory since `state` was read: compare generations.
    reserved = state["all_reserved"]
    if view.allocated_bytes < reserved and view.state()["generation"] == state["generation"]:
        yield (
            f"{memory(reserved)} are reserved, but the system has only "
            f"{memory(view.allocated_bytes)} ({reserved - view.allocated_bytes} bytes less)"
        )
