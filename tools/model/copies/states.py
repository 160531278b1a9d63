"""The model of parameters over many hosts: each has a copy of them, and a segment of gradients.

One owner at a time counts the nodes' gradients and grants rounds to chiefs. A chief's update is
staged on the nodes, committed by the owner, and made in each node's copy by the node's actor, which
then moves the node's segment to the next step. Workers read step and copy, and apply a gradient.
check.py searches the states of this model.

A copy is the path of the updates that it has. An update is named by its owner's term, a number
that this owner counts, and a digest (here 0, or 1 where a node has computed something else). If an
actor dies while it changes the copy, the old copy is put back when the next actor looks at it;
until then workers may read half of the change ("torn").

A report and its order are one step, and either may be acted on at any later time; so late, lost and
doubled messages are covered. There is one worker a node, and a segment has at most one gradient.
A machine is UP; or CUT: it is frozen or cut off from all, but Ray believes that it lives; or
ZOMBIE: Ray has declared it dead, but its processes run (with the kind "zombie" they still reach
others); or GONE: it may come back as a new node, with its memory and its workers, or empty.
"""

from typing import Any, NamedTuple

RULES = {
    "promise": "a node obeys no owner of a lower term than one that it has answered",
    "durable": "the promise outlives the node's actor",
    "learn": "a new owner first hears every node that Ray lists",
    "told": "the chief is told once every living node has the update",
    "first": "the copy changes first, then the segment's step",
    "begun": "before a copy changes, the step that its segment must reach is recorded in it",
    "up": "a copy is replaced, or gradients are dropped, only with a higher step of the segment",
    "below": "an update is made only where the segment is below the step that it leads to",
    "raise": "going back to a checkpoint raises the step",
    "pass": "and again, past a segment that comes later",
    "lineage": "the owner counts gradients of nodes at its lineage only",
    "digest": "copies are told apart by the digest of what their updates have changed, too",
    "parent": "a staged update is made only in the copy that it was made for",
    "final": "a committed round is ended, whoever dies, and never given up",
    "cut": "a node that cannot get the update is not waited for",
    "own": "a round is granted to a chief only whose own node has the owner's lineage",
    "term": "the base is the copy of the highest term and number, not of the highest step",
    "resign": "a leading owner that hears of a higher term ends",
    "again": "an owner whose lineage no living node has learns again",
    "jump": "the owner moves past a segment that is ahead, or at its step with another copy",
    "held": "all living nodes have staged an update before it is committed (not for safety)",
}
# Failures, of which a search has a limited number. "raise", "restore" and "advance" (to a step
# without a round) are what a chief may do, "differs" is a node that computes something else,
# "lease" a lease that ends though its node lives, "refuse" a node that cannot make a change.
KINDS = (
    *("silent", "lost", "actor", "owner", "chief", "raise"),
    *("restore", "advance", "differs", "refuse", "pair", "lease", "zombie"),
)
UP, CUT, ZOMBIE, GONE = range(4)
# What a step is: a part of the protocol, a failure, or its end (which need not come).
STEP, FAILURE, END = range(3)
Name = tuple[int, int, int, int]  # an update's: epoch and owner (the term), number, digest
GENESIS: tuple[Name, ...] = ((0, 0, 0, 0),)
UNKNOWN = -1  # the digest of an update that the owner has committed, until a node has reported it


class Update(NamedTuple):
    """An update that is staged; `parent` and `step` are those of the round."""

    id: tuple[int, int, int]
    parent: Any
    step: int
    whole: bool  # it replaces everything, outside a round: a checkpoint


class Order(NamedTuple):
    """What the owner has told a node last."""

    term: tuple[int, int]
    path: tuple[Name, ...]
    step: int
    hold: Any  # the grant whose gradients the node keeps for the owner, or ()
    stage: Any


class Node(NamedTuple):
    """A machine. Its memory: path, begun, seg, content, promise, tag; the actor's: the others."""

    mach: int = UP
    path: tuple[Name, ...] = GENESIS  # the copy
    begun: int = 0  # the step that the segment must reach before its gradients count
    torn: int = 0  # 1: the copy is being changed; 2: the actor that changed it is dead
    seg: int = 0  # the segment's step; -1: there is no segment
    content: tuple[Any, ...] = ()  # the copy from which the segment's gradient was computed
    promise: tuple[int, int] = (0, 0)
    tag: Name = GENESIS[-1]  # the copy at which the segment was moved to its step
    sealed: Any = ()  # the grant for which its gradients are kept
    staged: Any = ()
    refused: Any = ()  # the update that it could not make when it was to stage or to make it
    order: Any = ()
    returned: bool = False  # it was declared dead, or differs, and is not back in line yet
    ever: bool = False  # it was gone once
    worker: tuple[Any, ...] = ()  # the step and the copy that the worker has read


class Report(NamedTuple):
    """What an owner knows of a node: of its memory, its grant, what it has staged."""

    path: tuple[Name, ...]
    begun: int
    seg: int
    content: Any
    sealed: Any
    staged: Any
    refused: Any


class Owner(NamedTuple):
    """An owner. Phases: Learns, Ready, Granted, Block, Staging, Committed, Finishing."""

    loc: int
    term: tuple[int, int]
    phase: str = "L"
    path: tuple[Name, ...] = ()
    step: int = 0
    known: tuple[Any, ...] = ()
    living: int = 0  # the nodes that it hears, as bits
    chief: int = -1
    grant: int = 0
    u: Any = ()
    n: int = 0  # how many updates it has named


class S(NamedTuple):
    """A state of the whole."""

    nodes: tuple[Node, ...]
    owners: tuple[Any, ...]
    reg: int = 0  # the owner that Ray knows
    chiefs: tuple[Any, ...] = ()  # "", or (owner, grant, "in" or "update", update)
    told: tuple[Any, ...] = ()  # updates of which chiefs were told, and the nodes that had them
    cuts: tuple[tuple[int, int], ...] = ()
    fails: int = 0


def put(items: tuple[Any, ...], i: int, item: object) -> tuple[Any, ...]:
    """Return the tuple with another item at a place."""
    return (*items[:i], item, *items[i + 1 :])


def ids(path: tuple[Name, ...]) -> tuple[Any, ...]:
    """Return the updates of a path, whatever their digests."""
    return tuple(name[:3] for name in path)


def needed(phase: str, report: Report) -> Report:
    """Return only what the owner looks at in this phase, so that there are fewer states."""
    return report._replace(
        content=report.content if phase in "RG" else (),
        sealed=report.sealed if phase == "G" else (),
        staged=report.staged if phase in "SC" else (),
        refused=report.refused if phase in "SC" else (),
    )
