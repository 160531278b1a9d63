"""Verifies every invariant of a segment that can be verified from outside.

It changes nothing and takes no lock. A state that may be transient (an operation that ends between
two looks) is looked at again before it becomes a finding.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmacc import _core
from shmacc import _layout as layout
from shmacc import _names as names
from shmacc import _segment as segment
from shmacc._names import SegmentName
from shmacc.errors import DataLossError, NotFoundError, PermissionDeniedError
from shmacc.inspection import _processes as processes
from shmacc.inspection import _unlinked as unlinked
from shmacc.inspection._cleanup import leftovers
from shmacc.inspection._records import Description, Finding, SegmentState, Severity
from shmacc.inspection._segments import (
    describe,
    is_semaphore,
    list_segments,
    open_view,
    resolve,
    semaphore_file,
    summarise,
)
from shmacc.inspection._stillness import look_still

_REMOVE = "end its users, then `shmacc-inspect remove --force --yes`"
_MENDS_ITSELF = "nothing: "
_MOST_TOKENS = 2  # two releasers may both post one (lock.hpp)
_LOOKS = 3
_BETWEEN_LOOKS = 0.005  # seconds
_HALTED = frozenset({"stopped", "traced"})


def check(name: str) -> tuple[Finding, ...]:
    """Verify every invariant of a segment that can be verified, and the files of its name.

    Raises:
        NotFoundError: There is no segment of that name.
    """
    segment_name = resolve(name)
    if not os.path.lexists(segment_name.path):
        raise segment.not_found(segment_name)
    system_name = segment_name.system_name
    return (
        *_segment(segment_name, unreadable=Severity.WRONG),
        *_semaphores(f"*{system_name}*", None, lambda found: found.system_name == system_name),
        *_unlinked(lambda found: found.system_name == system_name),
        *_hidden(),
    )


def check_all(pattern: str = "*", *, namespace: str | None = None) -> tuple[Finding, ...]:
    """Check all segments, and the leftovers of others.

    Args:
        pattern: A glob that the shared_name or the file's name must match.
        namespace: Only those under it; None: all.
    """
    findings: list[Finding] = []
    for summary in list_segments(pattern, namespace=namespace):
        with contextlib.suppress(NotFoundError):  # removed meanwhile
            findings += _segment(summary.name, unreadable=Severity.NOTE)
    findings += _semaphores(pattern, namespace, lambda _: True)
    if pattern == "*":
        findings += _unlinked(lambda found: namespace in {None, found.namespace})
    findings += _hidden()
    return tuple(findings)


def _segment(name: SegmentName, *, unreadable: Severity) -> Iterator[Finding]:
    subject = name.system_name
    summary = summarise(name)
    match summary.state:
        case SegmentState.UNREADABLE:
            yield Finding(subject, unreadable, summary.detail, "look as its owner, or as root")
        case SegmentState.STARTING:
            yield _note(subject, summary.detail, "wait; if it stays so, its creator hangs")
        case SegmentState.OTHER_VERSION:
            yield _wrong(subject, summary.detail, f"look with that version; or {_REMOVE}")
        case SegmentState.DAMAGED:
            yield _wrong(subject, summary.detail, _REMOVE)
        case SegmentState.ORPHANED:
            yield _wrong(subject, summary.detail, "if no job will use it again: `clean --yes`")
            if summary.kind is not None:
                yield from _inside(name)
        case SegmentState.SOUND:
            yield from _inside(name)


def _inside(name: SegmentName) -> Iterator[Finding]:
    try:
        with open_view(name) as view:
            looks = _look(name.system_name)
            yield from _belongings(name, view, looks[-1])
            yield from _lock(name, looks)
            yield from _attached(name, looks[-1])
            yield from _line(name, looks[-1])
            yield from _state(name, view)
    except PermissionDeniedError as error:
        yield _wrong(name.system_name, str(error), "look as its owner, or as root")
    except DataLossError as error:
        yield _wrong(name.system_name, str(error), _REMOVE)


def _look(name: str) -> list[Description]:
    """Describe the segment, a few times if a process seems to have died with the lock."""
    looks = [describe(name)]
    while len(looks) < _LOOKS and _nobody_finishes(looks[-1]):
        time.sleep(_BETWEEN_LOOKS)
        looks.append(describe(name))
    return looks


def _nobody_finishes(seen: Description) -> bool:
    return not seen.lock.held and (seen.lock.in_operation or seen.lock.queue == 0)


def _belongings(name: SegmentName, view: _core.View, seen: Description) -> Iterator[Finding]:
    """Check that file, name, owner and semaphore belong together."""
    subject, config = name.system_name, view.config()
    if config["name"] != name.shared_name and "~" not in name.shared_name:
        yield _wrong(subject, f"the file was renamed; it was {config['name']!r}", _REMOVE)
    if view.unlinked:
        yield _note(
            subject,
            "it was unlinked, but its name is still there: its remover has died or is still busy",
            _MENDS_ITSELF + "the next process that opens the name finishes the removal",
        )
    if seen.summary.mode != config["mode"]:
        yield _note(
            subject,
            f"its mode is {seen.summary.mode:04o}; it was made with {config['mode']:04o}",
            _MENDS_ITSELF + "if it was changed on purpose",
        )
    if unlinked.goes_at_logout(seen.summary.owner_uid):
        yield _note(
            subject,
            f"systemd will remove it when {seen.summary.owner} logs out for the last time",
            f"`loginctl enable-linger {seen.summary.owner}`, or RemoveIPC=no in logind.conf",
        )
    semaphore = semaphore_file(name, seen.token)
    try:
        status = os.stat(f"{names.SHM_DIRECTORY}/{semaphore}", follow_symlinks=False)
    except FileNotFoundError:
        yield _note(
            semaphore,
            "this semaphore is missing",
            _MENDS_ITSELF + "the next process that attaches makes another; until the processes "
            "that have the old one are gone, a wait for the lock may take up to 20 ms longer",
        )
        return
    remove = f"remove {names.SHM_DIRECTORY}/{semaphore}; the next process that attaches makes it"
    if not is_semaphore(status):
        yield _wrong(
            semaphore, "this is not a semaphore: processes that wait for the lock may crash", remove
        )
    if status.st_uid != seen.summary.owner_uid:
        yield _wrong(
            semaphore,
            f"it belongs to uid {status.st_uid}, its segment to uid {seen.summary.owner_uid}",
            remove,
        )
    if seen.lock.queue is not None and seen.lock.queue > _MOST_TOKENS:
        yield _note(
            semaphore,
            f"its value is {seen.lock.queue}, not 0 to 2",
            _MENDS_ITSELF + "operations bring it down again",
        )


def _lock(name: SegmentName, looks: list[Description]) -> Iterator[Finding]:
    subject = name.system_name
    last = looks[-1].lock
    same = len({look.generation for look in looks}) == 1
    left_alone = same and all(map(_nobody_finishes, looks))
    if left_alone and last.in_operation:
        yield _note(
            subject,
            "an operation was interrupted by the death of its process",
            _MENDS_ITSELF + "the next operation undoes it",
        )
    if left_alone and last.queue == 0:
        yield _note(
            subject,
            "the semaphore is at 0 though the lock is free: a process died with its token",
            _MENDS_ITSELF + "the next operation that waits corrects it",
        )
    for pid, what in (
        (last.pid, "the lock: no process can apply or take"),
        (last.name_pid, "the name"),
    ):
        if pid is not None and processes.condition(pid) in _HALTED:
            yield _wrong(
                subject,
                f"pid {pid} ({processes.command(pid)}) holds {what}, and is "
                f"{processes.condition(pid)}",
                f"`kill -CONT {pid}`; or end it: what it had begun is then undone",
            )


def _attached(name: SegmentName, seen: Description) -> Iterator[Finding]:
    dead = [str(process.pid) for process in seen.processes if not process.alive]
    if dead:
        yield _note(
            name.system_name,
            f"entries of dead processes: pid {', '.join(dead)}",
            _MENDS_ITSELF + "the next process that attaches or waits sweeps them",
        )
    for process in seen.processes:
        if process.activity == "?":
            yield _wrong(name.system_name, f"entry {process.entry} was overwritten", _REMOVE)
        if process.condition in _HALTED and process.pid != seen.lock.pid:
            yield _note(
                name.system_name,
                f"pid {process.pid} ({process.command}) is attached, and is {process.condition}",
                f"`kill -CONT {process.pid}`, unless it was stopped on purpose",
            )


def _line(name: SegmentName, seen: Description) -> Iterator[Finding]:
    for take in seen.line:
        if not take.alive:
            yield _note(
                name.system_name,
                f"a take of a dead process (pid {take.pid}) is still in line",
                _MENDS_ITSELF + "the next apply or waiting take removes it",
            )
        elif take.overdue:
            yield _wrong(
                name.system_name,
                f"pid {take.pid} waits for {take.num_required} gradients and does not take them, "
                "although they have arrived",
                "see whether it is stopped; `shmacc-inspect cancel --yes` ends its wait",
            )


def _state(name: SegmentName, view: _core.View) -> Iterator[Finding]:
    # An operation that has not committed does not change what is read here; and one whose process
    # is stopped must not prevent a check.
    problems, still = look_still(
        view, lambda state: list(_problems_of_state(view, state)), commits_only=True
    )
    if still:
        yield from (_wrong(name.system_name, problem, _REMOVE) for problem in problems)
    else:
        yield _note(
            name.system_name,
            "gradients kept arriving: counters, sizes, rows and index could not be compared",
            "check it again when fewer gradients arrive",
        )


def _problems_of_state(view: _core.View, state: dict[str, Any]) -> Iterator[str]:
    sparse = view.config()["kind"] == layout.KINDS["sparse"]
    if state["applied"] != state["taken"] + state["discarded"] + state["count"]:
        yield (
            f"{state['applied']} gradients were applied, but {state['taken']} taken, "
            f"{state['discarded']} discarded and {state['count']} are there"
        )
    if (state["rows"] > 0) > (sparse and state["count"] > 0):
        yield "it has rows without gradients"
    if sparse and state["index_filled"] < state["rows"]:
        yield "its index has fewer entries than there are rows"
    yield from _problems_of_shape(view, state)
    reserved = sum(state["reserved"])
    if view.allocated_bytes < reserved:
        yield f"{reserved} bytes are reserved, but the system has only {view.allocated_bytes}"
    if sparse:
        from shmacc.inspection import _table as table  # late: see the package

        yield from table.problems(view, state)


def _problems_of_shape(view: _core.View, state: dict[str, Any]) -> Iterator[str]:
    declared, of_round = view.config()["declared"], state["round_shape"]
    if declared is None or of_round is None:
        return
    sparse = view.config()["kind"] == layout.KINDS["sparse"]
    wanted = declared[1:] if sparse else declared
    agree = len(of_round) >= len(wanted) and all(
        want in {-1, found} for want, found in zip(wanted, of_round, strict=False)
    )
    if state["count"] and not agree:
        yield f"the round's shape {of_round} does not fit the declared one, {declared}"


def _semaphores(
    pattern: str, namespace: str | None, meant: Callable[[SegmentName], bool]
) -> Iterator[Finding]:
    for leftover in leftovers(pattern, namespace=namespace):
        is_semaphore = names.parse_semaphore_file(leftover.file_name) is not None
        if is_semaphore and leftover.removable and meant(leftover.name):
            yield _wrong(leftover.file_name, leftover.why, "`shmacc-inspect clean --yes`")


def _unlinked(meant: Callable[[SegmentName], bool]) -> Iterator[Finding]:
    uses: Iterable[unlinked.UnlinkedUse] = filter(
        lambda use: meant(use.name), unlinked.unlinked_uses()
    )
    for system_name, users in itertools.groupby(uses, key=lambda use: use.name.system_name):
        pids = ", ".join(str(user.pid) for user in users)
        yield _note(
            system_name,
            f"pid {pids} still uses a segment of this name that was removed; processes that open "
            "the name now get another segment",
            "nothing, if it was unlinked on purpose; else (`rm`, RemoveIPC) restart the job",
        )


def _hidden() -> Iterator[Finding]:
    if not processes.others_are_visible():
        yield _note(
            "/proc",
            "it hides other users' processes from this one (hidepid): which of them are stopped, "
            "and which use removed segments, was not checked",
            "look as root",
        )


def _wrong(subject: str, problem: str, remedy: str) -> Finding:
    return Finding(subject, Severity.WRONG, problem, remedy)


def _note(subject: str, problem: str, remedy: str) -> Finding:
    return Finding(subject, Severity.NOTE, problem, remedy)
