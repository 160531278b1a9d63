"""Lists and summarises segments."""

import contextlib
import os
import pwd
from collections.abc import Iterator
from typing import Any

from shmacc import _core
from shmacc._base import layout, names
from shmacc._base.names import SegmentName
from shmacc._base.reports import LaneMemberConfig, MemberConfig
from shmacc._segment import removal
from shmacc._segment.removal import UnfinishedError
from shmacc.errors import DataLossError, NotFoundError, PermissionDeniedError, ShmaccError
from shmacc.inspection._findings import pids
from shmacc.inspection._members import bytes_of, members_of, rows_by_id, slots_of, tables_of
from shmacc.inspection._observation import Observation
from shmacc.inspection._processes import Look
from shmacc.inspection._records import Region, SegmentState, Summary
from shmacc.inspection._scopes import meant, named_as
from shmacc.inspection._stalls import verdict

_SLOT_REGIONS = ("index 0", "index 1")  # parameters have slots there, and no index


@contextlib.contextmanager
def open_view(name: SegmentName) -> Iterator[_core.SegmentView]:
    """Yield a view of the segment; see `removal.view` for the errors."""
    view = removal.view(name)
    try:
        yield view
    finally:
        view.close()


def tables(
    view: _core.SegmentView, config: LaneMemberConfig
) -> Iterator[tuple[_core.SegmentView, MemberConfig]]:
    """Yield a view of each table with contents, and its member's configuration."""
    members = config["members"]
    for table in view.tables():
        there = table["member_count"] or table["by_id"] is not None
        if table["member"] < len(members) and there:  # not the table of contributors
            yield view.table(table["lane"], table["member"]), members[table["member"]]


def list_segments(pattern: str = "*", *, namespace: str | None = None) -> tuple[Summary, ...]:
    """List this library's segments, of every user, by name.

    Args:
        pattern: A glob for shared names. If it begins like a system name, it is compared with
            system names; if it has a colon, with both; if it has a slash, also with ``RUN/NAME``.
        namespace: A namespace, or a glob for namespaces: only segments in it, and in runs that
            were started in it, are listed. None: all namespaces.
    """
    found, look = [], Look()
    for name in list_names(pattern, namespace=namespace):
        with contextlib.suppress(NotFoundError):  # removed since the directory was read
            found.append(summarise(name, look))
    return tuple(found)


def list_names(pattern: str = "*", *, namespace: str | None = None) -> tuple[SegmentName, ...]:
    """List the names of this library's segments, of every user, without opening the segments.

    Args:
        pattern: A glob, as in `list_segments`.
        namespace: As in `list_segments`.
    """
    is_meant = meant(pattern, namespace)
    found = map(names.parse_segment_file, sorted(os.listdir(names.SHM_DIRECTORY)))
    return tuple(
        name
        for name in found
        if name is not None
        and (not name.is_of_run or pattern == name.system_name)
        and is_meant(name, name.system_name)
    )


def summarise(name: SegmentName, look: Look | None = None) -> Summary:
    """Summarise a segment, whatever state it is in.

    Args:
        name: The segment.
        look: A look to share with other calls; None: a new one.

    Raises:
        NotFoundError: There is no such segment.
    """
    look = look or Look()
    try:
        with open_view(name) as view:
            return summary_of(name, Observation.at(name, view, look), look)
    except PermissionDeniedError as error:
        return _bare_summary(name, SegmentState.UNREADABLE, _problem(error))
    except UnfinishedError as error:
        # The file is not orphaned: no version since 1.0 makes such a file. Another program made it,
        # and its processes may use it without a lock.
        state = SegmentState.STARTING if error.held else SegmentState.DAMAGED
        return _bare_summary(name, state, f"{_problem(error)}; shmacc makes no such files")
    except DataLossError as error:
        other = error.version is not None
        state = SegmentState.OTHER_VERSION if other else SegmentState.DAMAGED
        return _bare_summary(name, state, _problem(error) + _who_has_it_open(name, look))


def _who_has_it_open(name: SegmentName, look: Look) -> str:
    """Return in words which processes have a file open, for a file too damaged to list them."""
    users = look.openers(name.path)
    if not users:
        return ""
    return f"; {pids(map(str, users))} {'has' if len(users) == 1 else 'have'} it open"


def _problem(error: ShmaccError) -> str:
    return error.problem or str(error)


def _bare_summary(name: SegmentName, state: SegmentState, detail: str, **known: Any) -> Summary:
    try:
        status = os.stat(name.path, follow_symlinks=False)
    except FileNotFoundError:
        raise NotFoundError(f"{name.system_name} is gone") from None
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    known.setdefault("created", status.st_ctime)
    known.setdefault("name", name)
    return Summary(
        state=state,
        detail=detail,
        owner=owner,
        owner_uid=status.st_uid,
        mode=status.st_mode & 0o7777,
        # st_blocks counts units of 512 bytes, whatever the file system's block size is.
        bytes_reserved=status.st_blocks * 512,
        **known,
    )


def summary_of(name: SegmentName, seen: Observation, look: Look) -> Summary:
    config, state = seen.config, seen.state
    kind, single = layout.KIND_NAMES.get(config["kind"]), len(config["members"]) == 1
    accumulates = config["kind"] not in layout.ARRAYS
    members = members_of(name, seen)
    judged = verdict(name.system_name, seen, look)
    alive, used = state["attached"], seen.view.used
    sound = SegmentState.FINISHED if state["finished"] else SegmentState.SOUND
    details = ["finished"] if accumulates and state["finished"] and not used else []
    details += [] if used else ["no living process has it attached"]
    if is_misnamed(name, config["name"]):
        made_as = names.name_made_as(config["name"])
        details.append(f"its file was renamed, copied or linked: it was made as {made_as!r}")
    return _bare_summary(
        named_as(name, config["name"]),
        sound if used else SegmentState.ORPHANED,
        "; ".join(details),
        created=config["created_ns"] / 1e9,
        kind=kind,
        dtype=members[0].dtype if single else None,
        shape=members[0].shape if single else None,
        reduction_type=layout.REDUCTION_NAMES.get(config["reduction"]) if accumulates else None,
        members=len(members),
        lanes=config["lanes"] if accumulates else None,
        capacity=config["capacity"],
        kept_free=state["kept_free"] if accumulates else None,
        private=config["is_private"],
        finished=state["finished"] if accumulates else None,
        global_step=state["step"] if accumulates or kind == "parameters" else None,
        num_accumulated=state["count"] if accumulates else None,
        rows=state["all_rows"] if accumulates else _rows_of_tables(seen),
        bytes_used=sum(region.used for region in regions_of(seen)),
        attached_alive=alive,
        attached_dead=len(seen.processes) - alive,
        waiting_for=(
            tuple(take.num_required for take in seen.queue if take.alive) if accumulates else None
        ),
        last_used=seen.last_used,
        stalls=judged.proved,
        suspected=judged.suspected,
    )


def _rows_of_tables(seen: Observation) -> int | None:
    tables = [table["by_id"]["rows"] for table in seen.tables if table["by_id"]]
    return sum(tables) if tables else None


def is_misnamed(name: SegmentName, made_as: str) -> bool:
    """Whether a file was renamed, copied or linked since it was made.

    If so, its name is not `made_as`, the written form of the shared_name in the segment. Such a
    segment is shown by its file's name, since copies and links have the same content.
    """
    return names.name_under(name.namespace, made_as).system_name != name.system_name


def regions_of(seen: Observation) -> tuple[Region, ...]:
    """Add up the regions of all lanes and members; the offset is that of the first such region."""
    reserved = dict.fromkeys(layout.REGIONS, 0)
    used = dict.fromkeys(layout.REGIONS, 0)
    for number, member in enumerate(seen.config["members"]):
        for state in tables_of(seen, number):
            for region, at in layout.REGIONS.items():
                if number == 0 or at >= layout.REGIONS["index 0"]:  # count a lane's own once
                    reserved[region] += state["reserved"][at]
            used[f"index {state['index']}"] += state["index_buckets"] * layout.BUCKET_BYTES
            used["slots"] += (
                state["rows"] * layout.ROW_PLACE_BYTES
            )  # 0 for a table of parameters: `by_id` counts its slots, see below
            buffer = state["buffer"] if member["kind"] == layout.KINDS["dense"] else 0
            used[f"rows {buffer}"] += bytes_of(seen.config, member, state)
            rows = rows_by_id(state)
            if state["by_id"] is not None:
                used["slots"] += state["by_id"]["slots"] * layout.ROW_PLACE_BYTES
                used["rows 1"] += state["by_id"]["slots"] * layout.STEP_BYTES
            for at, slot in enumerate(slots_of(seen.config, member, rows)):
                used["rows 0" if rows is not None else _SLOT_REGIONS[at]] += slot.bytes_used
    reserved["header"] = used["header"] = layout.HEADER_BYTES
    used["directory"] = seen.config["directory_bytes"]
    used["states"] = seen.config["states_bytes"]
    used["participants"] = seen.state["attached"] * layout.ENTRY_BYTES["participants"]
    used["waiters"] = seen.state["waiting"] * layout.ENTRY_BYTES["waiters"]
    recorded = sum(not each.is_attached for each in seen.departed)
    used["departed"] = recorded * layout.ENTRY_BYTES["departed"]
    for region in ("directory", "states", "participants", "waiters", "departed"):
        pages = -(-max(used[region], 1) // layout.PAGE_BYTES)
        reserved[region] = pages * layout.PAGE_BYTES
    return tuple(
        Region(name, number * layout.REGION_SPAN, reserved[name], used[name])
        for name, number in layout.REGIONS.items()
    )
