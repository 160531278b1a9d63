"""The simulated shared memory of machines, and the ledger that checks each round.

The protocol sees only counts. Here each gradient has an identity, and a copy of the parameters is
the path (the sequence) of its updates: so the content of segments, copies and rounds is known.
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
"""The path that a worker reads while a copy is being changed."""


def ids(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the names of a path's updates, without their digests."""
    return tuple(each[:2] for each in path)


class Gradient(NamedTuple):
    """A gradient; `local_step` and `read` are the step and the copy that it was computed from."""

    identity: int
    local_step: int
    contributor: int | None
    weight: int = 1
    read: Path = ()


@dataclass
class Segment:
    """A host's segment, which here keeps the gradients instead of their sums."""

    step: int = 0
    content: list[Gradient] = field(default_factory=list)
    held: bool = False
    finished: bool = False
    dropped: int = 0
    taken: int = 0

    def apply(self, gradient: Gradient) -> bool | None:
        """Accept a gradient (True), refuse it (False), or make it wait for the round (None)."""
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
        """Hold the segment; return its batch. All rows of a gradient belong to one shard."""
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
        """Show the core the segment; return the action that the core wants."""
        core.observe(self.step, len(self.content), finished=self.finished)
        return core.next_action()

    def follow(self, core: ForwarderCore, action: Action) -> None:
        """Do an action on the segment, and tell the core; not for HOLD, SHIP and STOP."""
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
    """A machine's shared memory, which outlives every process."""

    segment: Segment  # the segment; its step is -1 until it is made
    path: Path = ()  # the updates that its copy has
    begun: int = 0  # the step that the segment must reach before its gradients count
    step: int = 0  # the parameters' step
    torn: bool = False  # whether a change of the copy has begun, and has not ended
    # The update for which the segment's step was last moved: workers at this step must see it.
    needs: tuple[int, int] | None = None
    promise: int = 0  # the highest term that the machine's actors have answered
    copies: int = 0  # how many machines had the owner's lineage when this one last had it

    @property
    def lineage(self) -> Lineage:
        return self.path[-1] if self.path else NO_COPY.lineage

    def look(self) -> Copy:
        """Return lineage and steps of the copy; undo a change that has not ended."""
        self.torn = False
        return Copy(self.lineage, self.begun, self.step)

    def begin(self, step: int) -> None:
        """Begin to change the copy. Even if the change is undone, `begun` keeps its step."""
        self.begun, self.torn = max(self.begun, step), True

    def change(self, path: Path, step: int) -> None:
        """Commit the change that was begun."""
        self.path, self.step, self.torn = path, step, False

    @property
    def shows_its_step(self) -> bool:
        """Whether workers that see the segment's step also see the parameters of this step."""
        return self.needs is None or self.segment.step < self.begun or self.needs in ids(self.path)


class BrokenPromiseError(AssertionError):
    """A round breaks a promise of the library."""


class Ledger:
    """Records the gradients of batches and rounds, independently of the protocol."""

    def __init__(self, required: int) -> None:
        self.required = required  # gradients that a round requires
        self.shipped: dict[BatchKey, Sequence[Gradient]] = {}
        self.consumed: dict[int, int] = {}  # by gradient: the step of its round

    def content(self, opened: Opened) -> list[Gradient]:
        """Return the gradients of a round; a batch that was not shipped is empty."""
        return [g for member in opened.members for g in self.shipped.get(member.key, ())]

    def consume(self, opened: Opened, step: int) -> list[Gradient]:
        """Check a round that is consumed at this step; return its gradients."""
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
