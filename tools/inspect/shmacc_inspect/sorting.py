"""What `list` and `watch` can sort by; by default `watch` shows first what hurts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc.inspection import Summary
    from shmacc_inspect.output import Interval

_STATES: Final = (  # unusable segments first, finished ones last
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
    """Return a sort key: segments that stand still come first, those that are fine last."""
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


def _name(summary: Summary) -> str:
    from shmacc_inspect.naming import typed_name  # late: see the package

    return typed_name(summary.name)


SORTS_OF_LIST: Final[dict[str, Callable[[Summary], Any]]] = {
    "name": _name,
    "state": urgency,
    "step": lambda of: of.global_step or 0,
    "gradients": lambda of: of.num_accumulated or 0,
    "rows": lambda of: of.rows or 0,
    "bytes": lambda of: of.bytes_reserved,
    "attached": lambda of: of.attached_alive or 0,
    "waiting": lambda of: len(of.waiting_for or ()),
    "age": lambda of: -of.created,
}
