"""The interface of a peer that can be timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shmacc_bench.workload import Gradient, Workload

    Taken = tuple[NDArray[np.int64] | None, NDArray[Any]]
    """The rows (None: it is dense) and their means, in the caller's own memory."""


class Peer(ABC):
    """One way to accumulate gradients. One workload is open at a time.

    `prepare` does the work that a user's program does before its gradient reaches the accumulator:
    a torch user's gradient is a tensor already. It is never timed; everything else is.
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
        """Return the mean of what is there, and empty the accumulator."""
        raise NotImplementedError(f"nothing to take ({num_required} asked)")

    @abstractmethod
    def close(self) -> None:
        """Release the accumulator, and remove what it left in the system."""

    def prepare(self, gradient: Gradient) -> Any:
        """Return the gradient in the form in which a user of this peer has it."""
        return gradient

    def shutdown(self) -> None:  # noqa: B027  most have nothing to end
        """End what outlives an accumulator: a server."""
