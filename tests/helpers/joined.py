"""Builds rounds from the parts that shards hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmacc._multihost.messages import Batch, BatchKey, HostBatch, Opened, Share
from shmacc._multihost.pieces import Joining, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    import shmacc
    from shmacc._multihost.columns import Columns
    from shmacc._multihost.segment import HostGroup


def join(plan: Plan, parts: Mapping[int, Columns], opened: Opened) -> shmacc.GroupTaken:
    """Build a round from its shards' parts, starting with the values of the last shard."""
    joining = Joining(plan, opened, {shard: part.rows for shard, part in parts.items()})
    for shard in reversed(list(parts)):
        joining.add(shard, parts[shard].values)
    return joining.taken()


def taken_of(group: HostGroup, reduced: Columns, share: Share) -> shmacc.GroupTaken:
    """Return, as a round, what the only shard has reduced; `group` has the members."""
    plan, names = Plan(group.members, 1), list(group.members)
    counts = {names[number]: (n, weight) for number, n, weight, _ in reduced.rows.parts.tolist()}
    batch = Batch(share.count, share.weight, members=counts, shards=frozenset({0}))
    members = (HostBatch(BatchKey("host", 1, 1), batch),)
    return join(plan, {0: reduced}, Opened(share.fence, share.step, members, ("host",)))
