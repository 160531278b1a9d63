"""What a chief asks of the hosts themselves: copies of what they have, and their counters."""

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from shmacc._accumulators.group import AccumulatorGroup as LocalGroup
from shmacc._multihost.messages import Fence
from shmacc._records.array_types import IndexArray
from shmacc._records.stats import Stats
from shmacc._records.taken import GroupPartial, GroupTaken
from shmacc.errors import DeadlineExceededError
from shmacc.ray._link import Link, not_ready
from shmacc.ray._parts import LOST
from shmacc.ray._steps import state_of
from shmacc.ray._waits import Wait, wait_for_all


@dataclass(frozen=True)
class HostsParts:
    """What hosts had at one fence.

    Attributes:
        link: The chief's.
        step: The step; None: the owner was started again and knows none yet.
        parts: Of each host that had gradients.
    """

    link: Link
    step: int | None
    parts: list[GroupPartial]

    def taken(self) -> GroupTaken:
        """Return what a take would make of them: a private group adds them up and divides.

        Raises:
            FailedPreconditionError: The owner knows no step.
        """
        if self.step is None:
            raise not_ready(self.link)
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


def parts_of_hosts(link: Link, wait: Wait) -> HostsParts:
    """Return copies of what living hosts have of the owner's fence.

    A host that is at an earlier fence has nothing of the owner's yet: what it has does not count.
    If one is at a later fence, the owner has moved on meanwhile, and all are asked again.

    Raises:
        DeadlineExceededError: The owner or a host has not answered in time.
    """
    while True:
        step = state_of(link, wait.until)[0]
        fence, copies = _ask(link, wait, "copy")
        found = list(copies.values())
        fences = [at for at, _ in found if at is not None]
        is_newest = max([fence, *fences]) == fence
        if is_newest and state_of(link, wait.until)[0] == step:
            parts = [part for at, part in found if at == fence and part.count]
            return HostsParts(link, step, parts)


def stats_of_hosts(link: Link, wait: Wait) -> dict[str, Stats]:
    """Return the counters of living hosts' segments.

    Raises:
        DeadlineExceededError: The owner or a host has not answered in time.
    """
    found: dict[str, Stats] = _ask(link, wait, "stats")[1]
    return found


def _ask(link: Link, wait: Wait, method: str) -> tuple[Fence, dict[str, Any]]:
    """Call the hosts' actors; those that are lost do not answer, as if they were not alive.

    Returns:
        The fence before that, and the answers by node.
    """
    fence, actors = link.call("actors", until=wait.until)
    calls = {getattr(each, method).remote(): name for name, each in actors.items()}
    ended = wait_for_all(list(calls), wait.until)
    if silent := sorted(name for call, name in calls.items() if call not in ended):
        raise DeadlineExceededError(
            f"Parts of {link.config.name!r} have not answered: those of the nodes "
            f"{', '.join(silent)}. They are stopped, or cut off"
        )
    found: dict[str, Any] = {}
    for call in ended:
        with contextlib.suppress(*LOST):
            found[calls[call]] = ray.get(call)
    return fence, found
