"""What a chief asks of the hosts themselves: copies of what they have, and their counters."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from shmacc._accumulators.group import AccumulatorGroup as LocalGroup
from shmacc._records.array_types import IndexArray
from shmacc._records.stats import Stats
from shmacc._records.taken import GroupPartial, GroupTaken
from shmacc.ray._link import Link
from shmacc.ray._parts import LOST

_PATIENCE = 10.0  # seconds that a forwarder's thread has for a copy


@dataclass(frozen=True)
class HostsParts:
    """What hosts had at one fence.

    Attributes:
        link: The chief's.
        step: The step.
        parts: Of each host that had gradients.
    """

    link: Link
    step: int
    parts: list[GroupPartial]

    def taken(self) -> GroupTaken:
        """Return what a take would make of them: a private group adds them up and divides."""
        config = self.link.config
        with LocalGroup(config.members, reduction_type=config.reduction) as group:
            group.advance_step(self.step)
            for part in self.parts:
                group.apply_partial(part, group.global_step)
            return group.snapshot()

    def contributors(self) -> IndexArray:
        """Return their contributors."""
        none = np.empty(0, np.int64)
        return np.unique(np.concatenate([none, *(part.contributors for part in self.parts)]))


def parts_of_hosts(link: Link) -> HostsParts:
    """Return copies of what living hosts have of the owner's fence.

    A host that is at an earlier fence has nothing of the owner's yet: what it has does not count.
    If one is at a later fence, the owner has moved on meanwhile, and all are asked again.
    """
    while True:
        step = link.call("state")[0]
        fence, forwarders = link.call("forwarders")
        found = _ask(forwarders, "copy", _PATIENCE).values()
        fences = [at for at, _ in found if at is not None]
        if max([fence, *fences]) == fence and link.call("state")[0] == step:
            return HostsParts(
                link, step, [part for at, part in found if at == fence and part.count]
            )


def stats_of_hosts(link: Link) -> dict[str, Stats]:
    """Return the counters of living hosts' segments."""
    _, forwarders = link.call("forwarders")
    found: dict[str, Stats] = _ask(forwarders, "stats")
    return found


def _ask(forwarders: dict[str, Any], method: str, *args: Any) -> dict[str, Any]:
    """Call forwarders; those that are lost do not answer, as if they were not alive."""
    calls = {
        name: getattr(forwarder, method).remote(*args) for name, forwarder in forwarders.items()
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = ray.get(call)
        except LOST:
            continue
    return found
