"""A chief's calls to the hosts themselves: for copies of their content, and their counters."""

from typing import Any

import numpy as np
import ray

from shmacc._accumulators.group import AccumulatorGroup as LocalGroup
from shmacc._accumulators.taken import GroupPartial, GroupTaken
from shmacc._base.array_types import IndexArray
from shmacc._multihost.messages import Fence
from shmacc._segment.stats import Stats
from shmacc.errors import DeadlineExceededError
from shmacc.ray._head import shown
from shmacc.ray._link import Link, not_ready
from shmacc.ray._parts import LOST
from shmacc.ray._waits import Wait, wait_for_all


def snapshot_of_hosts(link: Link, wait: Wait) -> GroupTaken:
    """Return what a take would give: a private group adds up what hosts have, and divides.

    Raises:
        FailedPreconditionError: The owner knows no step.
        DeadlineExceededError: The owner or a host has not answered in time.
    """
    link.step(wait.until)  # with parameters, a new owner learns it first
    step, parts = _parts(link, wait)
    if step is None:
        raise not_ready(link)
    config = link.config
    with LocalGroup(config.members, reduction_type=config.reduction) as group:
        group.advance_step(step)
        for part in parts:
            group.apply_partial(part, group.global_step)
        return group.snapshot()


def contributors_of_hosts(link: Link, wait: Wait) -> IndexArray:
    """Return the contributors in all living hosts' segments."""
    parts = _parts(link, wait)[1]
    none = np.empty(0, np.int64)
    return np.unique(np.concatenate([none, *(part.contributors for part in parts)]))


def stats_of_hosts(link: Link, wait: Wait) -> dict[str, Stats]:
    """Return the counters of living hosts' segments."""
    found: dict[str, Stats] = _ask(link, wait, "stats")[2]
    return found


def _parts(link: Link, wait: Wait) -> tuple[int | None, list[GroupPartial]]:
    """Return the owner's step, and copies of living hosts' content at its fence.

    The content of a host at another fence does not count. If the owner has moved on meanwhile, all
    hosts are asked again.
    """
    while True:
        step, fence, copies = _ask(link, wait, "copy")
        if link.call("living", until=wait.until)[:2] == (step, fence):
            found = copies.values()
            return step, [part for at, part in found if at == fence and part.count]


def _ask(link: Link, wait: Wait, method: str) -> tuple[int | None, Fence, dict[str, Any]]:
    """Call the actors of living hosts; those that are lost meanwhile are left out.

    Returns:
        The owner's step and fence before these calls, and the answers by node.
    """
    step, fence, names = link.call("living", until=wait.until)
    found: dict[str, Any] = {}
    for _ in range(2):  # a known actor may have ended long ago: then another one is asked
        actors = {name: link.host(name, wait.until) for name in names if name not in found}
        calls = {getattr(a, method).remote(): name for name, a in actors.items() if a is not None}
        ended = wait_for_all(list(calls), wait.until)
        if silent := sorted(name for call, name in calls.items() if call not in ended):
            raise DeadlineExceededError(
                f"Parts of {link.name!r} have not answered: those of the nodes "
                f"{shown(*silent)}. They are stopped, or cut off"
            )
        for call in ended:
            try:
                found[calls[call]] = ray.get(call)
            except LOST:
                link.lost_host(calls[call])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
    return step, fence, found
