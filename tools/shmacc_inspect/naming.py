"""Names as users type them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import NotFoundError
from shmacc_inspect import NAMESPACE_VARIABLE, formatting

if TYPE_CHECKING:
    from shmacc.inspection import SegmentName, Summary

_HINTS: Final = 5
_ALIKE: Final = 0.7  # of the letters


def typed_name(name: SegmentName) -> str:
    """Return the name to type for a segment: shared_name, or whole name in another namespace."""
    own = os.environ.get(NAMESPACE_VARIABLE) or None
    return name.shared_name if name.namespace == own else name.system_name


def find(name: str) -> Summary:
    """Return the segment of that name, whatever state it is in.

    Raises:
        NotFoundError: There is none; the message lists similar names. InvalidArgumentError: It
        cannot be a name.
    """
    wanted = inspection.resolve(name)
    try:
        return inspection.summarise(wanted)
    except NotFoundError:
        alike = _alike(name)
        hint = f"; there is {', '.join(alike)}" if alike else ""
        raise NotFoundError(
            f"There is no segment named {formatting.printable(name)!r}{hint}"
        ) from None


def _alike(name: str) -> list[str]:
    from difflib import SequenceMatcher  # late: only a wrong name needs it

    ranked = []
    for summary in inspection.list_segments():
        likeness = SequenceMatcher(None, name, summary.name.shared_name).ratio()
        if likeness > _ALIKE:
            ranked.append((-likeness, typed_name(summary.name)))
    return [typed for _, typed in sorted(ranked)[:_HINTS]]
