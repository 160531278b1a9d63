"""What is measured: one module for each library, imported in the peer's own process only."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmacc_bench.peers.base import Peer

PEERS: Final[Mapping[str, tuple[str, str]]] = {
    "shmacc": ("shmacc_peer", "ShmaccPeer"),
    "tf-local": ("tensorflow_peers", "LocalPeer"),
    "tf-server": ("tensorflow_peers", "ServerPeer"),
    "torch": ("torch_peers", "TorchPeer"),
    "torch-1": ("torch_peers", "OneThreadPeer"),
    "numpy": ("numpy_peers", "NumpyPeer"),
    "np.add": ("numpy_peers", "AddLimit"),
}
"""Name: module and class. `np.add` is no accumulator but a limit."""


def peer_class(name: str) -> type[Peer]:
    """Import and return the class; ImportError if its library is not installed."""
    module, kind = PEERS[name]
    found: type[Peer] = getattr(importlib.import_module(f"shmacc_bench.peers.{module}"), kind)
    return found
