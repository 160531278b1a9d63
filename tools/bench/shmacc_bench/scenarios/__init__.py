"""What is measured otherwise than by timing one call of one process, one module each.

Every module has a class `Scenario(name, peer, quick=...)`, whose `step()` measures once and is run
in the peer's own process, and a function `summary(steps)`, which runs in the runner's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shmacc_bench.peers import RELEASED

if TYPE_CHECKING:
    from collections.abc import Mapping

ALONE = ("shmacc",)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The participants of a scenario, and how many steps each one does."""

    peers: tuple[str, ...]
    steps: int = 5
    quick_steps: int = 3


PLANS: Mapping[str, Plan] = {
    "wakeup": Plan(("shmacc", "numpy-fancy"), steps=10),
    "realistic": Plan(ALONE),
    "arrays_in": Plan(ALONE),
    "many_tensors": Plan(ALONE),
    "listing": Plan(("shmacc", RELEASED), steps=7),
    "lanes": Plan(ALONE),
    "parts": Plan(ALONE),
    "startup": Plan(("shmacc", "torch"), steps=1, quick_steps=1),
    "memory": Plan(ALONE, steps=1, quick_steps=1),
    "throughput": Plan(("shmacc", "tf-server", "torch-1", "numpy-fancy", "manager"), quick_steps=0),
    "recovery": Plan(("shmacc", "torch-1", "numpy-fancy"), steps=1, quick_steps=0),
}
"""Those of 0 quick steps have no target."""
