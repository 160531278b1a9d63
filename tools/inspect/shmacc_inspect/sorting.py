"""What `watch` can sort by: what hurts stands first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc.inspection import Summary
    from shmacc_inspect.output import Interval

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


def urgency(one: Summary | Interval) -> tuple[bool, int]:
    """Return the key by which what stands still comes first, and what is fine last."""
    return not one.stalls, _STATES.index(one.state)


def _of_summary(field: str) -> Callable[[Interval], int]:
    return lambda now: -(getattr(now.summary, field, None) or 0)


SORTS: Final[dict[str, Callable[[Interval], Any]]] = {
    "state": urgency,
    "name": lambda now: now.name,
    "waited": lambda now: -now.waited,
    "behind": lambda now: -len(now.stragglers),
    "lock": lambda now: -now.lock_held,
    "rate": lambda now: -(now.gradients_per_second or 0.0),
    "drops": lambda now: -(now.drops_per_second or 0.0),
    "gradients": _of_summary("num_accumulated"),
    "step": _of_summary("global_step"),
}
