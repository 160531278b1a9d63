"""Groups over many hosts, on Ray (the extra ``ray``); never imported by ``import shmacc``.

The chief makes the group here instead of with `shmacc.AccumulatorGroup`; nothing else changes::

    # the chief, connected to the cluster            # a worker, on any host; it does not import Ray
    group = shmacc.ray.AccumulatorGroup(             group = shmacc.attach("model", timeout=60)
        members, "model", shards=4)                  step = group.global_step
    with group.round(96) as taken:                   ...
        update(parameters, taken)                    group.apply(gradient, step, contributor=rank)

Each node gets an actor, and nodes that join later get one, too. In it a forwarder makes the group's
segment on that node and carries out the owner's orders. Shards in these actors add up the rows;
they are spread over the nodes. The owner, an actor on the chief's node, has the step, decides what
a round consists of, and starts the nodes' actors, and restarts those that end. All are detached
actors: they live until `unlink`. The package ``shmacc._multihost`` explains the protocol, and what
the death of each part costs.

`PublishedArrays` hands parameters on to all nodes. Its module says why a worker that sees a new
step sees that step's parameters.

A process that can connect to a Ray cluster can run code in it. Keep it in a trusted network, and
use Ray's token authentication.
"""

from shmacc._multihost.messages import Timing
from shmacc.ray._group import AccumulatorGroup
from shmacc.ray._parameters import Parameters
from shmacc.ray._parts import HostState, Shard, ShardedTaken
from shmacc.ray._published import PublishedArrays
from shmacc.ray._round import Round

__all__ = [
    "AccumulatorGroup",
    "HostState",
    "Parameters",
    "PublishedArrays",
    "Round",
    "Shard",
    "ShardedTaken",
    "Timing",
]
