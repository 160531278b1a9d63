"""The measured peers: one module for each, imported only in that peer's own process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmacc_bench.peers.base import Peer

# Peer -> the module that has its class `PeerImplementation`. The order is the order of the tables.
MODULES: Mapping[str, str] = {
    "shmacc": "shmacc_peer",
    "shmacc-1.0": "shmacc_peer",
    "tf-local": "tensorflow_local",
    "tf-server": "tensorflow_server",
    "torch": "torch_shared",
    "torch-1": "torch_one_thread",
    "numpy-fancy": "numpy_fancy",
    "numpy-add-at": "numpy_add_at",
    "manager": "manager",
    "mpi": "mpi_window",
    "np.add": "limit_add",
    "memcpy": "limit_copy",
}
LIMITS = ("np.add", "memcpy")
RELEASED = "shmacc-1.0"


def peer_class(name: str) -> type[Peer]:
    """Import and return the class of the peer called `name`; ImportError if it is not installed."""
    module = importlib.import_module(f"shmacc_bench.peers.{MODULES[name]}")
    found: type[Peer] = module.PeerImplementation
    return found
