"""The measured libraries (peers): a module for each, imported only in the peer's own process."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shmacc_bench.workload import Gradient, Workload

PEERS: Final[Mapping[str, tuple[str, str]]] = {
    "shmacc": ("shmacc_peer", "ShmaccPeer"), "tf-local": ("tensorflow_peers", "LocalPeer"),
    "tf-server": ("tensorflow_peers", "ServerPeer"), "torch": ("torch_peers", "TorchPeer"),
    "torch-1": ("torch_peers", "OneThreadPeer"), "numpy": ("numpy_peers", "NumpyPeer"),
    "np.add": ("numpy_peers", "AddLimit"),
}  # fmt: skip
"""Each peer's module and class. `np.add` is no accumulator: its time is a lower limit."""

Taken = tuple[NDArray[np.int64] | None, NDArray[Any]]
"""The rows (None for a dense gradient) and their means, in the caller's own memory."""


def peer_class(name: str) -> type["Peer"]:
    """Import and return the class; ImportError if its library is not installed."""
    module, kind = PEERS[name]
    found: type[Peer] = getattr(importlib.import_module(f"shmacc_bench.peers.{module}"), kind)
    return found


class Peer(ABC):
    """One way to accumulate gradients. One workload is open at a time.

    Only `prepare` is not timed. It does what a user's program has done before the gradient reaches
    the accumulator: a torch user's gradient is a tensor already.
    """

    counts_repeats: ClassVar[bool] = False
    """Whether a mean counts a row as often as a gradient repeats it."""

    has_take: ClassVar[bool] = True

    @abstractmethod
    def open(self, workload: Workload) -> None:
        """Make an empty accumulator."""

    @abstractmethod
    def apply(self, prepared: Any) -> None:
        """Add one gradient."""

    def take(self, num_required: int) -> Taken:
        """Return the mean of the added gradients, and empty the accumulator."""
        raise NotImplementedError(f"nothing to take ({num_required} asked)")

    @abstractmethod
    def close(self) -> None:
        """Close the accumulator, and remove its names from the system."""

    def prepare(self, gradient: Gradient) -> Any:
        """Return the gradient in the form in which a user of this peer has it."""
        return gradient

    def shutdown(self) -> None:  # noqa: B027  most have nothing to end
        """End what outlives the accumulators, such as a server."""
