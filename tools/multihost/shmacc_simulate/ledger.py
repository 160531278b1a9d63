"""Gradients, the segments that they are applied to, and the ledger that checks each round.

The protocol sees only counts. Here each gradient has an identity of its own, so that a round shows
exactly what is in it. The tests that inject faults use these as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shmacc._multihost.forwarder import Do
from shmacc._multihost.messages import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc._multihost.forwarder import Action, ForwarderCore
    from shmacc._multihost.messages import BatchKey, Opened


class Gradient(NamedTuple):
    """A gradient: its identity, the step that it was computed for, and by whom."""

    identity: int
    local_step: int
    contributor: int | None
    weight: int = 1


@dataclass
class Segment:
    """A host's group, which keeps gradients instead of their sums."""

    step: int = 0
    content: list[Gradient] = field(default_factory=list)
    held: bool = False
    finished: bool = False
    dropped: int = 0
    taken: int = 0

    def apply(self, gradient: Gradient) -> bool | None:
        """Accept a gradient unless it is late; None: it has to wait for the end of the round."""
        if self.finished:
            return False
        if self.held and gradient.local_step > self.step:
            return None
        if self.held or gradient.local_step < self.step:
            self.dropped += 1
            return False
        if gradient.contributor is None or gradient.contributor not in self._contributors():
            self.content.append(gradient)
        return True

    def _contributors(self) -> frozenset[int]:
        return frozenset(g.contributor for g in self.content if g.contributor is not None)

    def hold(self, shards: int = 1) -> Batch:
        """Hold the segment; return its batch. A gradient's rows are all at one shard."""
        self.held = True
        weight = sum(gradient.weight for gradient in self.content)
        members = {"m": (len(self.content), weight)} if self.content else {}
        at = frozenset(gradient.identity % max(1, shards) for gradient in self.content)
        return Batch(len(self.content), weight, self._contributors(), members, at)

    def reset(self, step: int) -> None:
        """Empty the segment, and set its step. It stays finished only if the step increases."""
        self.dropped += len(self.content)
        self.finished = self.finished and step > self.step
        self.step, self.content, self.held = step, [], False

    def next_action(self, core: ForwarderCore) -> Action | None:
        """Show the core the segment; return what the core wants done."""
        core.observe(self.step, len(self.content), finished=self.finished)
        return core.next_action()

    def follow(self, core: ForwarderCore, action: Action) -> None:
        """Do an action that concerns the segment alone, and tell the core.

        Raises:
            ValueError: The action concerns more than the segment.
        """
        match action:
            case Do.RELEASE, _:
                self.held = False
                core.released()
            case Do.CONSUME, _:
                self.taken += len(self.content)
                self.reset(self.step + 1)
                core.moved()
            case Do.RESET, step:
                self.reset(step)
                core.moved()
            case Do.SET_STEP, step:
                self.step, self.held = step, False
                core.step_set()
            case Do.FINISH, _:
                self.finished = True
                core.finished()
            case _:
                raise ValueError(f"{action} is not of the segment alone")


class BrokenPromiseError(AssertionError):
    """A round breaks a promise of the library."""


class Ledger:
    """The gradients of segments and rounds, recorded outside the protocol."""

    def __init__(self, required: int) -> None:
        self.required = required  # gradients that a round requires
        self.shipped: dict[BatchKey, Sequence[Gradient]] = {}
        self.consumed: dict[int, int] = {}  # the step of each gradient that is in a round

    def content(self, opened: Opened) -> list[Gradient]:
        """Return the gradients of a round. An empty batch is not shipped."""
        return [g for member in opened.members for g in self.shipped.get(member.key, ())]

    def consume(self, opened: Opened, step: int) -> list[Gradient]:
        """Check a round that is consumed at a step; return its gradients.

        Raises:
            BrokenPromiseError: The round is not what the library promises.
        """
        content = self.content(opened)
        identities = {gradient.identity for gradient in content}
        who = sorted(g.contributor for g in content if g.contributor is not None)
        count, weight = len(content), sum(gradient.weight for gradient in content)
        promises = {
            "too few gradients": opened.count >= self.required,
            "wrong counts": opened.totals() == {"m": (count, weight)} and opened.count == count,
            "another step": opened.step == step,
            "a stale gradient": all(gradient.local_step >= step for gradient in content),
            "a gradient twice": len(identities) == count,
            "a gradient of an earlier round": identities.isdisjoint(self.consumed),
            "a contributor twice": len(set(who)) == len(who),
            "wrong contributors": opened.contributors.tolist() == who,
        }
        broken = [fault for fault, kept in promises.items() if not kept]
        if broken:
            raise BrokenPromiseError(f"The round of step {step} has {', '.join(broken)}: {content}")
        self.consumed.update(dict.fromkeys(identities, step))
        return content
