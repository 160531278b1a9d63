"""What happens to machines and processes, and who can talk to whom."""

from collections.abc import Collection, Iterator
from typing import Any

from states import (
    CUT,
    END,
    FAILURE,
    GENESIS,
    GONE,
    RULES,
    STEP,
    UNKNOWN,
    UP,
    ZOMBIE,
    Name,
    Node,
    Owner,
    S,
    Update,
    ids,
    put,
)


class World:
    """What happens to machines and processes, and who can talk to whom."""

    def __init__(
        self, nodes: int, steps: int, fails: int, out: Collection[str], kinds: Collection[str]
    ) -> None:
        """Begin with `nodes` equal nodes; rounds end at step `steps`."""
        self.count, self.steps, self.fails, self.kinds = nodes, steps, fails, kinds
        self.rule = {rule: rule not in out for rule in RULES}
        self.open = (UP, ZOMBIE) if "zombie" in kinds else (UP,)
        first = Owner(0, (1, 0), "R", GENESIS, 0, (None,) * nodes)
        self.start = S((Node(),) * nodes, (first,), 0, ("",) * min(nodes, 2))

    def may(self, s: S, kind: str) -> bool:
        """Whether there may be one more failure of this kind."""
        return s.fails < self.fails and kind in self.kinds

    def reach(self, s: S, a: int, b: int) -> bool:
        """Whether two nodes' processes can talk."""
        of_a, of_b = s.nodes[a].mach, s.nodes[b].mach
        if a == b:
            return of_a != GONE
        return of_a in self.open and of_b in self.open and (min(a, b), max(a, b)) not in s.cuts

    def same(self, has: tuple[Name, ...], wants: tuple[Name, ...]) -> bool:
        """Whether a copy is the one that is wanted."""
        if not self.rule["digest"]:
            return ids(has) == ids(wants)
        if wants and wants[-1][3] == UNKNOWN:
            return has[:-1] == wants[:-1] and has[-1:] != () and has[-1][:3] == wants[-1][:3]
        return has == wants

    def node(self, s: S, i: int, **changes: object) -> S:
        """Return the state with a node changed."""
        return s._replace(nodes=put(s.nodes, i, s.nodes[i]._replace(**changes)))

    def can_pull(self, s: S, i: int, u: Update) -> bool:
        """Whether a node can get an update from the chief that makes it."""
        return any(
            x and x[2] == "update" and x[3] == u and self.reach(s, i, c)
            for c, x in enumerate(s.chiefs)
        )

    def world(self, s: S) -> Iterator[tuple[str, S, int]]:
        """Yield failures, and their ends."""
        for i, n in enumerate(s.nodes):
            yield from self.machine(s, i, n)
        f = s._replace(fails=s.fails + 1)
        pairs = [(a, b) for b in range(self.count) for a in range(b)]
        for pair in pairs:
            if pair in s.cuts:
                yield (
                    f"{pair} is whole",
                    s._replace(cuts=tuple(c for c in s.cuts if c != pair)),
                    END,
                )
            elif self.may(s, "pair") and all(s.nodes[i].mach == UP for i in pair):
                yield f"{pair} is cut", f._replace(cuts=(*s.cuts, pair)), FAILURE
        yield from self.owners_end(s, f)
        for c, x in enumerate(s.chiefs):
            if x and self.may(s, "chief"):
                yield f"chief {c} dies", f._replace(chiefs=put(s.chiefs, c, "")), FAILURE
        yield from self.owner_made(s)

    def owners_end(self, s: S, f: S) -> Iterator[tuple[str, S, int]]:
        """Yield deaths of owners, and ends of their leases."""
        for k, o in enumerate(s.owners):
            if o and self.may(s, "owner"):
                yield f"owner {k} dies", f._replace(owners=put(s.owners, k, None)), FAILURE
            if o and self.may(s, "lease"):
                for i in range(self.count):
                    if o.living >> i & 1:
                        yield f"lease of node {i} ends at owner {k}", self.lose(f, k, i), FAILURE
                if o.chief >= 0:
                    left = o._replace(chief=-1)
                    if o.phase != "C":
                        left = self.phase(left, "R", u=(), step=o.step + (o.phase == "F"))
                    at = put(s.owners, k, left)
                    yield f"lease of the chief ends at owner {k}", f._replace(owners=at), FAILURE

    def owner_made(self, s: S) -> Iterator[tuple[str, S, int]]:
        """Yield a new owner, if Ray knows that there is none."""
        o = s.owners[s.reg]
        if o is None or s.nodes[o.loc].mach >= ZOMBIE:
            for c in range(len(s.chiefs)):
                if s.nodes[c].mach == UP:  # its clock may be behind: a low term
                    k = len(s.owners)
                    new = Owner(c, (1, k), known=(None,) * self.count)
                    yield (
                        f"chief {c} makes owner {k}",
                        s._replace(owners=(*s.owners, new), reg=k),
                        STEP,
                    )

    def machine(self, s: S, i: int, n: Node) -> Iterator[tuple[str, S, int]]:
        """Yield what happens to a machine and to its actor."""
        f = s._replace(fails=s.fails + 1)
        if n.mach == UP and self.may(s, "silent"):
            yield f"node {i} is silent", self.node(f, i, mach=CUT), FAILURE
        if n.mach == UP and self.may(s, "lost"):
            yield f"node {i} is lost", self.gone(f, i), FAILURE
        if self.may(s, "actor") and n.mach != GONE and (n.order or n.staged or n.torn == 1):
            promise = n.promise if self.rule["durable"] else (0, 0)
            dead = self.without_actor(n)
            yield f"actor {i} dies", self.node(f, i, promise=promise, **dead), FAILURE
        if n.mach == CUT:
            yield f"node {i} is back", self.node(s, i, mach=UP), END
            yield f"Ray declares node {i} dead", self.node(s, i, mach=ZOMBIE), STEP
        elif n.mach == ZOMBIE:
            yield f"Ray ends node {i}", self.gone(s, i), STEP
        elif n.mach == GONE:
            for k, o in enumerate(
                s.owners
            ):  # it has another name, so they hear the old one no more
                s = self.lose(s, k, i) if o else s
            yield f"machine {i} joins with its memory", self.node(s, i, mach=UP, returned=True), END
            empty = Node(path=(), seg=-1, returned=True, ever=True)
            yield f"machine {i} joins empty", s._replace(nodes=put(s.nodes, i, empty)), END

    def without_actor(self, n: Node) -> dict[str, Any]:
        """Return what is changed at a node by its actor's death."""
        forgotten = dict.fromkeys(("sealed", "staged", "refused", "order"), ())
        return {**forgotten, "torn": 2 if n.torn else 0}

    def gone(self, s: S, i: int) -> S:
        """Return the state in which a machine's processes are dead, except perhaps its worker."""
        dead = s.nodes[i]._replace(mach=GONE, ever=True, **self.without_actor(s.nodes[i]))
        owners = tuple(None if o and o.loc == i else o for o in s.owners)
        chiefs = tuple("" if c == i else x for c, x in enumerate(s.chiefs))
        cuts = tuple(pair for pair in s.cuts if i not in pair)
        return s._replace(nodes=put(s.nodes, i, dead), owners=owners, chiefs=chiefs, cuts=cuts)
