"""What machines keep of a group, and the ledger that checks each round.

The protocol sees only counts. Here each gradient has an identity, and a copy of the parameters is
the path of the updates that it has: so segments, copies and rounds show exactly what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shmacc._base.lineage import NO_COPY, Copy, Lineage
from shmacc._multihost.forwarder import Do
from shmacc._multihost.messages import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc._multihost.forwarder import Action, ForwarderCore
    from shmacc._multihost.messages import BatchKey, Opened

Path = tuple[Lineage, ...]
TORN: Path = (Lineage(-1, 0),)
"""What a worker has read if the copy was just being changed."""


def ids(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the updates of a path, whatever their digests."""
    return tuple(each[:2] for each in path)


class Gradient(NamedTuple):
    """A gradient: its identity, the step and the copy that it was computed from, and by whom."""

    identity: int
    local_step: int
    contributor: int | None
    weight: int = 1
    read: Path = ()


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
        """Do an action that concerns the segment alone, and tell the core."""
        match action:
            case Do.RELEASE, _:
                self.held = False
            case Do.CONSUME, _:
                self.taken += len(self.content)
                self.reset(self.step + 1)
            case Do.RESET, step:
                self.reset(step)
            case Do.SET_STEP, step:
                self.step, self.held = step, False
            case Do.FINISH, _:
                self.finished = True
        core.done(action[0])


@dataclass(slots=True)
class Memory:
    """What a machine keeps, whichever process dies."""

    segment: Segment  # the segment; its step is -1 until it is made
    path: Path = ()  # the updates that its copy has
    begun: int = 0  # the step that the segment must reach before its gradients count
    step: int = 0  # the parameters' step
    torn: bool = False  # whether the copy is being changed, or who changed it has died
    # The update that the segment's step was moved for: workers must see it.
    needs: tuple[int, int] | None = None
    promise: int = 0  # the highest term that the machine's actors have answered
    copies: int = 0  # how many machines had the line when this one was in it last

    @property
    def lineage(self) -> Lineage:
        return self.path[-1] if self.path else NO_COPY.lineage

    def look(self) -> Copy:
        """Return what is known of the copy; half of a change is undone."""
        self.torn = False
        return Copy(self.lineage, self.begun, self.step)

    def begin(self, step: int) -> None:
        """Begin to change the copy. Also if this comes to nothing, the step has been noted."""
        self.begun, self.torn = max(self.begun, step), True

    def change(self, path: Path, step: int) -> None:
        """Commit the change that was begun."""
        self.path, self.step, self.torn = path, step, False

    @property
    def shows_its_step(self) -> bool:
        """Whether workers see no step before its parameters."""
        return self.needs is None or self.segment.step < self.begun or self.needs in ids(self.path)


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
        """Check a round that is consumed at a step; return its gradients."""
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
