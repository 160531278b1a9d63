"""What `watch` can sort by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc_inspect.output.intervals import Interval

SORTS: Final[dict[str, Callable[[Interval], Any]]] = {  # what hurts stands first
    "name": lambda now: now.name,
    "waited": lambda now: -(now.waited_seconds or 0.0),
    "behind": lambda now: -len(now.stragglers),
    "lock": lambda now: -(now.lock_held_seconds or 0.0),
    "rate": lambda now: -(now.gradients_per_second or 0.0),
    "drops": lambda now: -(now.drops_per_second or 0.0),
    "gradients": lambda now: -(now.gradients or 0),
    "step": lambda now: -(now.step or 0),
    "state": lambda now: now.state,
}
