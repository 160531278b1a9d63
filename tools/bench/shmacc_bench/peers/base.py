"""What a peer must be able to do for the operations to time it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shmacc_bench.workload import Gradient, Workload


class UnsupportedError(Exception):
    """The peer cannot do this workload or operation at all; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """What a take handed out, in the caller's own memory; `indices` is empty for a dense one."""

    indices: NDArray[np.int64]
    values: NDArray[Any]


class Peer(ABC):
    """One way to accumulate gradients. One workload is open at a time.

    `prepare` is what a user's program has done before its gradient reaches the accumulator (a torch
    user's gradient is a tensor already) and is never timed; everything else is.
    """

    how: ClassVar[str]
    """How the peer is used, so that readers can judge whether that is fair."""

    counts_occurrences: ClassVar[bool] = False
    """Whether a row that one gradient repeats is divided by its repeats (False: by gradients)."""

    has_take: ClassVar[bool] = True
    """Whether the peer can take at all; the limits cannot."""

    blocks_in_take: ClassVar[bool] = False
    """Whether `take` waits until enough gradients are there."""

    @abstractmethod
    def open(self, workload: Workload) -> None:
        """Make an empty accumulator; `UnsupportedError` if the workload is beyond the peer."""

    @abstractmethod
    def prepare(self, gradient: Gradient) -> Any:
        """Return the gradient in the form in which a user of this peer has it."""

    @abstractmethod
    def apply(self, prepared: Any) -> None:
        """Add one gradient."""

    @abstractmethod
    def take(self, num_required: int) -> Reduced:
        """Return the mean of what is there, and empty the accumulator."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the accumulator and remove what it left in the system."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of what the peer is made of."""

    def shutdown(self) -> None:  # noqa: B027  # most have nothing to end
        """End what outlives one accumulator (servers); called once, at the very end."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes of memory that the accumulator's files hold, if it has any."""
        return None

    def recoveries(self) -> int | None:
        """Return how often a dead process's work was undone, if the peer does such a thing."""
        return None

    def ticket(self) -> Any:
        """Return what `join` needs in another process (sent along when it is started)."""
        raise UnsupportedError("not shared between processes")

    @classmethod
    def join(cls, ticket: Any) -> Peer:
        """Attach, in another process, to the accumulator that `ticket` describes."""
        raise UnsupportedError(f"not shared between processes: {ticket!r}")
