"""The sort orders of `list` and `watch`: names ascend, and numbers descend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc.inspection import Summary
    from shmacc_inspect.output import Interval

_STATES: Final = (
    "damaged", "other version", "not ours to read", "gone", "orphaned", "starting", "sound",
    "finished",
)  # fmt: skip


def urgency(one: Summary | Interval) -> tuple[bool, bool, int]:
    """Return a sort key: first segments that stand still, then segments that perhaps do."""
    return not one.stalls, one.suspected is None, _STATES.index(one.state)


def _most(field: str) -> Callable[[Any], float]:
    return lambda of: -(getattr(of, field, None) or 0)


def _name(of: Summary | Interval) -> str:
    from shmacc_inspect.naming import typed_name  # only here: help must come at once

    return typed_name(of.name)


SORTS: Final[dict[str, Callable[[Interval], Any]]] = {
    "state": urgency, "name": _name, "waited": _most("waited"),
    "behind": lambda now: -len(now.stragglers), "lock": _most("lock_held"),
    "rate": _most("gradients_per_second"), "drops": _most("drops_per_second"),
    "gradients": lambda now: _most("num_accumulated")(now.summary),
    "step": lambda now: _most("global_step")(now.summary),
}  # fmt: skip


SORTS_OF_LIST: Final[dict[str, Callable[[Summary], Any]]] = {
    "name": _name, "state": urgency, "step": _most("global_step"),
    "gradients": _most("num_accumulated"), "rows": _most("rows"), "bytes": _most("bytes_reserved"),
    "attached": _most("attached_alive"),
    "waiting": lambda of: -len(of.waiting_for or ()), "age": lambda of: of.created,
}  # fmt: skip
