"""What was applied, shipped and consumed; every round is held against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmacc._multihost.messages import BatchKey, Opened


class Gradient(NamedTuple):
    """A gradient: who computed it, and at which step; `number` is its identity."""

    number: int
    worker: int
    step: int


class BrokenPromiseError(AssertionError):
    """A round is not what the library promises."""


class Books:
    """Kept outside the protocol, which sees only counts.

    Args:
        required: How many gradients a round requires.
    """

    def __init__(self, required: int) -> None:
        self._required = required
        self._shipped: dict[BatchKey, tuple[Gradient, ...]] = {}
        self._consumed: set[int] = set()
        self.accepted = 0
        self.refused = 0
        self.lost = 0

    def applied(self, *, accepted: bool) -> None:
        """Note what a segment answered."""
        self.accepted += accepted
        self.refused += not accepted

    def shipped(self, key: BatchKey, gradients: tuple[Gradient, ...]) -> None:
        """Note what is in a batch."""
        self._shipped[key] = gradients

    def emptied(self, content: Iterable[Gradient]) -> None:
        """Note that a segment is emptied: what no round consumed is lost."""
        self.lost += sum(gradient.number not in self._consumed for gradient in content)

    def consumed(self, opened: Opened, step: int) -> None:
        """Hold a round that is consumed against the books.

        Raises:
            BrokenPromiseError: It has too few gradients, a stale one, one that was in a round
                before, or two of one worker.
        """
        # An empty batch is not shipped.
        content = [g for member in opened.members for g in self._shipped.get(member.key, ())]
        if len(content) != opened.count or opened.count < self._required:
            raise BrokenPromiseError(f"{opened.count} gradients, {self._required} are required")
        if opened.step != step or any(gradient.step < step for gradient in content):
            raise BrokenPromiseError(f"A gradient of an earlier step is in step {step}")
        numbers = {gradient.number for gradient in content}
        if len(numbers) < len(content) or not numbers.isdisjoint(self._consumed):
            raise BrokenPromiseError(f"A gradient is in step {step} that was in a round before")
        if len({gradient.worker for gradient in content}) < len(content):
            raise BrokenPromiseError(f"A worker is twice in step {step}")
        self._consumed |= numbers
        self._shipped.clear()  # of this fence: none can be named again
