"""Compares the rows of a segment's tables with the index by which they are found."""

import os
import stat
import time
from collections.abc import Iterator
from typing import Final

from shmacc import _core
from shmacc._base import layout
from shmacc._base.names import SegmentName
from shmacc._base.reports import Compared, LaneMemberState
from shmacc.inspection._findings import Finding, Severity, note, wrong
from shmacc.inspection._leftovers import owners_only
from shmacc.inspection._listing import open_view, tables
from shmacc.inspection._scopes import resolve

INCONSISTENT: Final = "inconsistent"
NOT_COMPARED: Final = "not_compared"
_LOOKS: Final = 3
_BETWEEN_LOOKS: Final = 0.003  # seconds
_ANEW: Final = (
    "end the processes that update it, then make the index anew from the rows, which can all be "
    "read: `params.restore(params.state())`; or load a checkpoint (`shmacc.load`)"
)
_FROM_CHECKPOINT: Final = (
    "end the processes that update it, then load a checkpoint (`shmacc.load`): not all of its rows "
    "can be read"
)


def damage(name: str, *, most_rows: int | None = None) -> tuple[Finding, ...]:
    """Compare the rows of a segment's tables with the index by which they are found.

    Accumulators have an index for each sparse member with gradients; parameters for each table.

    Args:
        name: The segment's name; see `resolve`.
        most_rows: Tables with more rows are not compared, and a note says so; None: compare all. A
            million rows take a tenth of a second.

    Returns:
        Findings like those of `check`: each problem of a table, and notes on tables not compared.

    Raises:
        NotFoundError: There is no segment of that name.
        DataLossError: The segment is damaged, or of another version.
        PermissionDeniedError: This user may not read the segment.
    """
    segment = resolve(name)
    with open_view(segment) as view:
        for _ in range(_LOOKS):  # as `check` does: what seems wrong is looked at again
            found = tuple(of_tables(segment, view, most_rows=most_rows))
            if not any(each.severity is Severity.WRONG for each in found):
                break
            time.sleep(_BETWEEN_LOOKS)
        return found


def of_tables(
    name: SegmentName,
    view: _core.SegmentView,
    *,
    seconds: float = 0.0,
    most_rows: int | None = None,
) -> Iterator[Finding]:
    """Yield findings about a segment's tables; retry for `seconds` if rows change meanwhile."""
    until, looks = time.monotonic() + seconds, 0
    there = [(table, member["name"]) for table, member in tables(view, view.config())]
    left = [each for each in there if most_rows is None or _places(each[0]) <= most_rows]
    large = len(there) - len(left)
    while left and (looks < _LOOKS or time.monotonic() < until):
        if looks:
            time.sleep(_BETWEEN_LOOKS)
        looks += 1
        seen = [(table, member, _problems(table)) for table, member in left]
        left = [(table, member) for table, member, problems in seen if problems is None]
        for _, member, problems in seen:
            prefix = f"member {member!r}: " if member else ""
            for problem, remedy in problems or ():
                what = prefix + problem
                yield wrong(name.system_name, INCONSISTENT, what, remedy or removal_of(name))
    if left:
        yield note(
            name.system_name,
            NOT_COMPARED,
            f"rounds ended while the rows of {len(left)} tables were copied, {looks} times: they "
            "were not compared with the index",
            "check it again when there are fewer takes",
        )
    if large:
        yield note(
            name.system_name,
            NOT_COMPARED,
            f"{large} tables have more than {most_rows} rows: these were not compared with the "
            "index",
            "`shmacc-inspect check` compares them",
        )


def removal_of(name: SegmentName) -> str:
    """Return how to remove the segment, in words only: no finding's `command` may destroy data."""
    try:
        status = os.stat(name.path, follow_symlinks=False)
    except FileNotFoundError:
        return "nothing: it is gone"
    if stat.S_ISDIR(status.st_mode):
        return f"move {name.path} away, or remove it: shmacc removes no directories"
    who = ", as its owner or as root" if owners_only(status.st_uid) else ""
    how = f"`shmacc-inspect remove {name.system_name} --force --yes`"
    return f"end its users, then remove it{who}: {how}"


def _places(view: _core.SegmentView) -> int:
    state = view.state()
    return state["rows"] if state["by_id"] is None else state["by_id"]["slots"]


def _problems(view: _core.SegmentView) -> list[tuple[str, str]] | None:
    """Return a table's problems, each with its remedy; an empty remedy: remove the segment.

    Return None if the table could not be compared: a round ended, or the index was replaced, while
    the table was copied.
    """
    state = view.state()
    sparse = view.config()["member_kind"] == layout.KINDS["sparse"]
    found: list[str] = []
    if state["by_id"] is None:
        if (state["rows"] > 0) > (sparse and state["member_count"] > 0):
            found.append("it has rows without gradients")
        if sparse and state["index_filled"] + state["leftovers"] < state["rows"]:
            found.append("its index has fewer entries than there are rows")
        found += _of_shape(view, state)
        if not sparse:
            return [(problem, "") for problem in found]
    seen = view.compare()
    if seen is None:
        return None
    found += _of_rows(view, seen)
    found += _of_counts(seen) if sparse else _of_places(seen)
    remedy = "" if sparse else _FROM_CHECKPOINT
    if seen["lost"]:
        lost = f"{seen['lost']} of {seen['rows']} rows cannot be found through the index"
        return [*((each, remedy) for each in found), (lost, remedy if sparse or found else _ANEW)]
    return [(problem, remedy) for problem in found]


def _of_rows(view: _core.SegmentView, seen: Compared) -> Iterator[str]:
    if seen["lowest"] < 0:
        yield "a row's number is negative"
    if seen["twice"]:
        yield "a row stands in the table twice"
    config = view.config()
    declared = config["declared"] if config["member_kind"] == layout.KINDS["sparse"] else None
    if declared and 0 <= declared[0] <= seen["highest"]:
        yield f"row {seen['highest']} is past the declared {declared[0]} rows"


def _of_places(seen: Compared) -> Iterator[str]:
    """Check how many places a table of parameters uses.

    The number need not be exact: an update may free or fill places while they are compared. And
    places that an uncommitted update has freed count as used until its commit.
    """
    least, most = seen["compared"], seen["compared"] + seen["changed"]
    left = seen["changed"] and not seen["committed"] and not seen["in_operation"]
    if left or not least <= seen["rows"] <= most:
        yield f"it has {seen['rows']} rows, but {least} of its places are in use"


def _of_counts(seen: Compared) -> Iterator[str]:
    least, most, possible = seen["least_count"], seen["most_count"], seen["possible"]
    # An apply changes counts in place, before its commit.
    if seen["rows"] and (least < 1 or (most > possible and not seen["in_operation"])):
        yield f"a row's count is not between 1 and its gradients' weight, {possible}"


def _of_shape(view: _core.SegmentView, state: LaneMemberState) -> Iterator[str]:
    declared, of_round = view.config()["declared"], state["round_shape"]
    if declared is None or of_round is None:
        return
    sparse = view.config()["member_kind"] == layout.KINDS["sparse"]
    wanted = declared[1:] if sparse else declared
    agree = len(of_round) >= len(wanted) and all(
        want in {-1, found} for want, found in zip(wanted, of_round, strict=False)
    )
    if state["member_count"] and not agree:
        yield f"the round's shape {of_round} does not fit the declared one, {declared}"
