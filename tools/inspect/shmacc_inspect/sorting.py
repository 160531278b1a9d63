"""What segments can be sorted by: what hurts stands first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc_inspect.output.intervals import Interval
    from shmacc_inspect.output.segments import Segment

_STATES: Final = (  # those that no process can use first, those that need nobody last
    "damaged",
    "other version",
    "not ours to read",
    "gone",
    "orphaned",
    "starting",
    "sound",
    "finished",
)


def urgency(one: Segment | Interval) -> tuple[bool, int]:
    """Return the key by which what stands still comes first, and what is fine last."""
    return not one.stalls, _STATES.index(one.state)


SORTS: Final[dict[str, Callable[[Interval], Any]]] = {
    "state": urgency,
    "name": lambda now: now.name,
    "waited": lambda now: -(now.waited_seconds or 0.0),
    "behind": lambda now: -len(now.stragglers),
    "lock": lambda now: -(now.lock_held_seconds or 0.0),
    "rate": lambda now: -(now.gradients_per_second or 0.0),
    "drops": lambda now: -(now.drops_per_second or 0.0),
    "gradients": lambda now: -(now.gradients or 0),
    "step": lambda now: -(now.step or 0),
}
