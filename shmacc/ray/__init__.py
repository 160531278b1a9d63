"""Groups over many hosts, on Ray (the extra ``ray``); never imported by ``import shmacc``.

The chief makes its parameters and group with these classes instead of `shmacc.Parameters` and
`shmacc.AccumulatorGroup`; nothing else changes. Workers, on any host, do not import Ray::

    params = shmacc.ray.Parameters(table, "table", optimizer=shmacc.optim.Adagrad(0.05))
    group = shmacc.ray.AccumulatorGroup(params.member_specs(sparse=["table"]), "model")
    with group.round(96) as taken:
        params.update(taken)

Each node gets an actor. Its forwarder makes the group's segment and the copy of the parameters on
the node; its shards add up rows. The owner, an actor on the chief's node, starts these actors and
sends them orders. All are detached actors: they live until `unlink`. The package
``shmacc._multihost`` explains the protocol, and what the death of each part costs.

A process that can connect to a Ray cluster can run code in it. Keep it in a trusted network, and
use Ray's token authentication.
"""

from typing import TYPE_CHECKING, Any

from shmacc._multihost.messages import Timing
from shmacc.ray._group import AccumulatorGroup
from shmacc.ray._parameters import Parameters
from shmacc.ray._parts import HostState
from shmacc.ray._round import Round
from shmacc.ray._run import run

if TYPE_CHECKING:
    from shmacc.ray._replicas import SyncReplicas as SyncReplicas

__all__ = [
    "AccumulatorGroup",
    "HostState",
    "Parameters",
    "Round",
    "Timing",
    "run",
]  # and SyncReplicas, which imports torch: `import *` must do without


def __getattr__(name: str) -> Any:
    if name != "SyncReplicas":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from shmacc.ray._replicas import SyncReplicas  # imports torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            error.add_note(
                "shmacc.ray.SyncReplicas needs torch where the chief is, and the nodes' replicas "
                "need it: pip install torch"
            )
        raise
    return SyncReplicas


def __dir__() -> list[str]:
    return [*__all__, "SyncReplicas"]
