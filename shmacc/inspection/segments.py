"""Which segments there are, and all there is to say of one without reading its rows."""

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from shmacc import _core, dtype_names, layout, names, segment
from shmacc.errors import DataLossError, NotFoundError, PermissionDeniedError
from shmacc.inspection import processes
from shmacc.inspection.records import (
    AttachedProcess,
    Description,
    LockState,
    Region,
    SegmentState,
    Space,
    Summary,
    WaitingTake,
)
from shmacc.names import SegmentName
from shmacc.stats import Stats
from shmacc.unfinished import UnfinishedError


def resolve(name: str) -> SegmentName:
    """The segment that a shared_name or a system name means, whether it exists or not.

    Raises:
        InvalidArgumentError: It is neither.
    """
    whole = names.parse_segment_file(name)
    # No shared_name has a colon or a tilde; else it may be either.
    if whole is not None and (":" in name or "~" in name or os.path.lexists(whole.path)):
        return whole
    return names.segment_name(name)


@contextlib.contextmanager
def open_view(name: SegmentName) -> Iterator[_core.Handle]:
    """A handle that looks without attaching; errors as `segment.view`, and UnfinishedError."""
    try:
        handle = segment.view(name)
    except NotFoundError:
        if os.path.lexists(name.path):
            raise UnfinishedError.of(name) from None
        raise
    try:
        yield handle
    finally:
        segment.close(handle)


def list_segments(pattern: str = "*", *, namespace: str | None = None) -> tuple[Summary, ...]:
    """Segments of this library, of every user, by name.

    Args:
        pattern: A glob that the shared_name or the system name must match.
        namespace: Only those under it; None: all.
    """
    found = []
    for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
        name = names.parse_segment_file(file_name)
        if name is not None and is_meant(name, file_name, pattern, namespace):
            with contextlib.suppress(NotFoundError):  # removed since the directory was read
                found.append(summarise(name))
    return tuple(found)


def is_meant(name: SegmentName, file_name: str, pattern: str, namespace: str | None) -> bool:
    """Whether a file that belongs to this segment is among those that somebody asks about."""
    if namespace not in {None, name.namespace}:
        return False
    return fnmatchcase(name.shared_name, pattern) or fnmatchcase(file_name, pattern)


def shared_memory_space() -> Space:
    """How much shared memory there is, and how much of it is free."""
    status = os.statvfs(names.SHM_DIRECTORY)
    return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def describe(name: str) -> Description:
    """All there is to say of a segment without reading its rows.

    Raises:
        NotFoundError: There is none of that name.
        DataLossError: It is damaged, or of another version.
        PermissionDeniedError: It is not this user's to read.
    """
    segment_name = resolve(name)
    with open_view(segment_name) as handle:
        _look_at_queue(segment_name, handle)
        config, state = handle.config(), handle.state()
        attached = _processes(handle)
        places = state["index_buckets"] * layout.BUCKET_ENTRIES
        round_shape = handle.round_shape()
        return Description(
            summary=_summary_of(segment_name, handle),
            token=config["token"],
            generation=state["generation"],
            round_shape=None if round_shape is None else tuple(round_shape),
            stats=Stats.of(state),
            processes=attached,
            line=_line(handle, attached),
            lock=_lock(handle, attached, in_operation=state["in_operation"]),
            regions=_regions(config, state),
            # What an undone operation may have left behind is counted in, all of it.
            index_load=min(1.0, state["index_filled"] / places) if places else None,
        )


def semaphore_file(name: SegmentName, token: int) -> str:
    """The name of a segment's semaphore in /dev/shm."""
    return names.SEMAPHORE_FILE_PREFIX + names.semaphore_name(name.system_name, token)[1:]


def is_semaphore(file_name: str) -> bool:
    """Whether a file can be one: to open a shorter one is to die of a bus error."""
    status = os.stat(f"{names.SHM_DIRECTORY}/{file_name}", follow_symlinks=False)
    return stat.S_ISREG(status.st_mode) and status.st_size >= layout.SEMAPHORE_BYTES


def _look_at_queue(name: SegmentName, handle: _core.Handle) -> None:
    token = handle.config()["token"]
    with contextlib.suppress(FileNotFoundError, PermissionDeniedError):
        if is_semaphore(semaphore_file(name, token)):
            handle.use_queue(names.semaphore_name(name.system_name, token))


def _lock(
    handle: _core.Handle, attached: tuple[AttachedProcess, ...], *, in_operation: bool
) -> LockState:
    held, pid, queue = handle.lock_state()
    owner = next((entry for entry in attached if entry.alive and entry.pid == pid), None)
    return LockState(
        held=held,
        pid=pid or None,
        since=owner.last_seen if held and owner else None,
        queue=queue,
        in_operation=in_operation,
        name_pid=processes.lock_holder(handle.inode, layout.NAME_BYTE),
    )


def summarise(name: SegmentName) -> Summary:
    """A segment in a line, whatever state it is in.

    Raises:
        NotFoundError: There is none.
    """
    try:
        with open_view(name) as handle:
            return _summary_of(name, handle)
    except PermissionDeniedError as error:
        return _bare_summary(name, SegmentState.UNREADABLE, str(error))
    except UnfinishedError as error:
        state = SegmentState.STARTING if error.held else SegmentState.ORPHANED
        return _bare_summary(name, state, str(error))
    except segment.OtherVersionError as error:
        return _bare_summary(name, SegmentState.OTHER_VERSION, str(error))
    except DataLossError as error:
        return _bare_summary(name, SegmentState.DAMAGED, str(error))


def _bare_summary(name: SegmentName, state: SegmentState, detail: str, **known: Any) -> Summary:
    try:
        status = os.stat(name.path, follow_symlinks=False)
    except FileNotFoundError:
        raise NotFoundError(f"{name.system_name} is gone") from None
    detail = detail.removeprefix(f"{name.system_name}: ")
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    known.setdefault("created", status.st_ctime)
    return Summary(
        name=name,
        state=state,
        detail=detail,
        owner=owner,
        owner_uid=status.st_uid,
        mode=status.st_mode & 0o7777,
        bytes_reserved=status.st_blocks * 512,
        **known,
    )


def _summary_of(name: SegmentName, handle: _core.Handle) -> Summary:
    config, state = handle.config(), handle.state()
    dtype = dtype_names.NAMES.get(config["dtype"])
    reduction = layout.REDUCTION_NAMES.get(config["reduction"])
    if dtype is None or reduction is None:
        raise DataLossError(f"{name.system_name}: unknown dtype or reduction")
    participants = handle.participants()
    alive = sum(entry["alive"] for entry in participants)
    used = handle.others_attached or handle.is_attached
    declared = config["declared"]
    return _bare_summary(
        SegmentName(name.system_name, name.namespace, config["name"]),
        SegmentState.SOUND if used else SegmentState.ORPHANED,
        "" if used else "no living process has it attached",
        created=config["created_ns"] / 1e9,
        kind=layout.KIND_NAMES[config["kind"]],
        dtype=dtype,
        shape=None if declared is None else tuple(None if d < 0 else d for d in declared),
        reduction_type=reduction,
        private=config["is_private"],
        global_step=state["step"],
        num_accumulated=state["count"],
        rows=state["rows"],
        bytes_used=sum(region.used for region in _regions(config, state)),
        attached_alive=alive,
        attached_dead=len(participants) - alive,
        waiting_for=tuple(take.num_required for take in _line(handle, ()) if take.alive),
    )


def _processes(handle: _core.Handle) -> tuple[AttachedProcess, ...]:
    own_namespace = os.stat("/proc/self/ns/pid").st_ino
    return tuple(_process(entry, own_namespace) for entry in handle.participants())


def _process(entry: dict[str, Any], own_namespace: int) -> AttachedProcess:
    pid, ticks = entry["pid"], entry["start_ticks"]
    same = entry["pid_namespace"] == own_namespace
    visible = same and entry["alive"] and processes.is_the_one(pid, ticks)
    applied = entry["applied_ns"] > 0
    return AttachedProcess(
        entry=entry["entry"],
        pid=pid,
        same_pid_namespace=same,
        alive=entry["alive"],
        condition=processes.condition(pid) if visible else "",
        command=processes.command(pid) if visible else "",
        activity=layout.ACTIVITY_NAMES.get(entry["activity"], "?"),
        started=processes.started(ticks) if same else None,
        attached_at=entry["attached_ns"] / 1e9,
        last_seen=entry["seen_ns"] / 1e9,
        last_applied=entry["applied_ns"] / 1e9 if applied else None,
        last_applied_step=entry["applied_step"] if applied else None,
        applied=entry["applied"],
        dropped=entry["dropped"],
        taken=entry["taken"],
    )


def _line(handle: _core.Handle, attached: tuple[AttachedProcess, ...]) -> tuple[WaitingTake, ...]:
    pids = {process.entry: process.pid for process in attached}
    waiters = sorted(handle.waiters(), key=lambda waiter: int(waiter["ticket"]))
    return tuple(
        WaitingTake(
            position=position,
            entry=waiter["participant"],
            pid=pids.get(waiter["participant"]),
            num_required=waiter["num_required"],
            since=waiter["since_ns"] / 1e9,
            alive=waiter["alive"],
            overdue=waiter["overdue"],
        )
        for position, waiter in enumerate(waiters, start=1)
    )


def _regions(config: dict[str, Any], state: dict[str, Any]) -> tuple[Region, ...]:
    row_bytes = state["row_elements"] * layout.SUM_BYTES[config["sum"]]
    reserved = {name: state["reserved"][number] for name, number in layout.REGIONS.items()}
    used = dict.fromkeys(layout.REGIONS, 0)
    reserved["header"] = used["header"] = layout.HEADER_BYTES
    used[f"index {state['index']}"] = state["index_buckets"] * layout.BUCKET_BYTES
    used["slots"] = state["rows"] * layout.SLOT_BYTES
    if config["kind"] == layout.KINDS["sparse"]:
        used["rows 0"] = state["rows"] * row_bytes
    elif state["count"]:
        used[f"rows {state['buffer']}"] = row_bytes
    for table, size in (("participants", state["attached"]), ("waiters", state["waiting"])):
        used[table] = size * layout.ENTRY_BYTES[table]
        pages = -(-max(used[table], 1) // layout.PAGE_BYTES)
        reserved[table] = pages * layout.PAGE_BYTES
    return tuple(
        Region(name, number * layout.REGION_SPAN, reserved[name], used[name])
        for name, number in layout.REGIONS.items()
    )
