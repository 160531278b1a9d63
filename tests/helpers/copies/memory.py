"""What a machine's memory has of a group with parameters: the copy, the segment, the promise.

It outlives the machine's processes. The copy is the path of the updates that it has, so that it
shows exactly what is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shmacc._base.lineage import NO_COPY, Copy, Lineage
from shmacc_simulate.ledger import Segment

Path = tuple[Lineage, ...]
TORN: Path = (Lineage(-1, 0),)
"""What a worker has read if the copy was just being changed."""


def ids(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the updates of a path, whatever their digests."""
    return tuple(each[:2] for each in path)


@dataclass
class Memory:
    """What a machine keeps, whichever process dies.

    Attributes:
        path: The updates that its copy has.
        begun: The step that the segment must reach before its gradients count.
        step: The parameters' step.
        torn: Whether the copy is being changed, or who changed it has died.
        segment: The segment; its step is -1 until it is made.
        needs: The update that the segment's step was moved for: workers must see it.
        promise: The highest term that the machine's actors have answered.
        copies: How many machines had the line when this one was in it last.
    """

    path: Path = ()
    begun: int = 0
    step: int = 0
    torn: bool = False
    segment: Segment = field(default_factory=lambda: Segment(step=-1))
    needs: tuple[int, int] | None = None
    promise: int = 0
    copies: int = 0

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
