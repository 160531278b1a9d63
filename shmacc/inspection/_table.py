"""The rows of a table, compared with the index that leads to them."""

from collections.abc import Iterator

from shmacc import _core
from shmacc._layout import layout
from shmacc._layout.reports import Compared


def problems(view: _core.SegmentView) -> list[str] | None:
    """Return the problems of a sparse table, or table of parameters.

    None: it could not be compared, since a round ended, or the index was replaced, while it was
    copied.
    """
    seen = view.compare()
    if seen is None:
        return None
    by_id = view.config()["member_kind"] != layout.KINDS["sparse"]
    return [
        *_of_rows(view, seen),
        *(_of_slots(seen) if by_id else _of_counts(seen)),
        *lost_rows(seen),
    ]


def lost_rows(seen: Compared) -> Iterator[str]:
    """Yield a sentence if the index does not lead to each row."""
    if seen["lost"]:
        yield f"{seen['lost']} of {seen['rows']} rows cannot be found through the index"


def _of_rows(view: _core.SegmentView, seen: Compared) -> Iterator[str]:
    if seen["lowest"] < 0:
        yield "a row's number is negative"
    if seen["twice"]:
        yield "a row stands in the table twice"
    config = view.config()
    declared = config["declared"] if config["member_kind"] == layout.KINDS["sparse"] else None
    if declared and 0 <= declared[0] <= seen["highest"]:
        yield f"row {seen['highest']} is past the declared {declared[0]} rows"


def _of_slots(seen: Compared) -> Iterator[str]:
    """Check how many slots a table of parameters uses.

    Slots that an update freed or gave away meanwhile may have been in use before. An update that
    runs, or was left by a dead process, may have freed slots that count as used until its commit.
    """
    least, most = seen["compared"], seen["compared"] + seen["changed"]
    left = seen["changed"] and not seen["committed"] and not seen["in_operation"]
    if left or not least <= seen["rows"] <= most:
        yield f"it has {seen['rows']} rows, but {least} of its slots are in use"


def _of_counts(seen: Compared) -> Iterator[str]:
    least, most, possible = seen["least_count"], seen["most_count"], seen["possible"]
    # An apply that has not committed changes counts in place.
    if seen["rows"] and (least < 1 or (most > possible and not seen["in_operation"])):
        yield f"a row's count is not between 1 and its gradients' weight, {possible}"
