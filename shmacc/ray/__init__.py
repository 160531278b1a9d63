"""Groups over many hosts, on Ray (the extra ``ray``); never imported by ``import shmacc``.

The chief makes parameters and group here instead of with `shmacc.Parameters` and
`shmacc.AccumulatorGroup`; nothing else changes. Workers, on any host, do not import Ray::

    params = shmacc.ray.Parameters(table, "table", optimizer=shmacc.optim.Adagrad(0.05))
    group = shmacc.ray.AccumulatorGroup(params.member_specs(sparse=["table"]), "model")
    with group.round(96) as taken:
        params.update(taken)

Each node gets an actor, and nodes that join later get one, too. In it a forwarder makes the group's
segment and the copy of the parameters on that node, and carries out the owner's orders. Shards in
these actors add up the rows; they are spread over the nodes. The owner, an actor on the chief's
node, has the step, decides what a round consists of and which update each copy must have, and
starts the nodes' actors, and restarts those that end. All are detached actors: they live until
`unlink`. The package ``shmacc._multihost`` explains the protocol, and what the death of each part
costs.

A process that can connect to a Ray cluster can run code in it. Keep it in a trusted network, and
use Ray's token authentication.
"""

from shmacc._multihost.messages import Timing
from shmacc.ray._group import AccumulatorGroup
from shmacc.ray._parameters import Parameters
from shmacc.ray._parts import HostState, Shard, ShardedTaken
from shmacc.ray._round import Round

__all__ = [
    "AccumulatorGroup",
    "HostState",
    "Parameters",
    "Round",
    "Shard",
    "ShardedTaken",
    "Timing",
]
