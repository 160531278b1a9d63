"""What is measured otherwise than by timing one call of one process, one module each.

Every module has a class `Scenario(name, peer, quick=...)`, whose `step()` measures once and is run
in the peer's own process, and a function `summary(steps)`, which runs in the runner's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

IMPORTING = ("shmacc", "tf-local", "torch", "numpy-fancy", "manager")
SHARING = ("shmacc", "tf-server", "torch-1", "numpy-fancy", "numpy-add-at", "manager")
TABLES = ("shmacc", "torch-1", "numpy-fancy")  # where a new row is not a new message to a server
SLOW_TO_START = ("tf-local", "tf-server")  # each further process imports TensorFlow: not if quick
ROUNDING = ("shmacc", "torch", "torch-1")
WAITING = ("shmacc", "tf-server", "numpy-fancy", "manager")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The participants of a scenario, and how many steps each one does."""

    peers: tuple[str, ...]
    steps: int
    quick_steps: int


PLANS: Mapping[str, Plan] = {
    "wakeup": Plan(WAITING, steps=10, quick_steps=3),
    "throughput": Plan(SHARING, steps=3, quick_steps=1),
    "whole_rounds": Plan(ROUNDING, steps=3, quick_steps=1),
    "lanes": Plan(("shmacc",), steps=3, quick_steps=1),
    "many_tensors": Plan(("shmacc",), steps=3, quick_steps=1),
    "arrays_in": Plan(("shmacc",), steps=3, quick_steps=1),
    "growing": Plan(TABLES, steps=3, quick_steps=1),
    "contention": Plan(SHARING, steps=3, quick_steps=1),
    "recovery": Plan(SHARING, steps=1, quick_steps=1),
    "memory": Plan(("shmacc", "tf-local", "torch", "numpy-fancy"), steps=1, quick_steps=1),
    "startup": Plan(
        ("shmacc", "tf-local", "torch", "numpy-fancy", "manager"), steps=1, quick_steps=1
    ),
}
