"""The whole model: all steps, and what must hold in each state."""

import itertools
from collections.abc import Iterator

from owners import Owners
from states import CUT, GONE, UP, S, ids, put


class Model(Owners):
    """All steps that each part may make, except by the rules that are left out."""

    def successors(self, s: S) -> Iterator[tuple[str, S, int]]:
        """Yield each step, with the state after it and what it is."""
        yield from self.world(s)
        for i, n in enumerate(s.nodes):
            if n.mach != GONE:
                yield from self.actor(s, i)
                for k, o in enumerate(s.owners):
                    if o and self.reach(s, i, o.loc):
                        yield from self.exchange(s, i, k)
            yield from self.worker(s, i)
        for k, o in enumerate(s.owners):
            if o:
                yield from self.owner(s, k, o)

    def check(self, s: S) -> None:
        """Raise AssertionError if an invariant does not hold."""
        limit = 6 + 2 * self.fails + self.steps
        if any(o and (o.term[0] > limit or o.step > limit) for o in s.owners):
            raise AssertionError(f"UNBOUNDED {s.owners}")
        self.check_nodes(s)
        line = [
            ids(n.path)
            for n in s.nodes
            if n.mach in {UP, CUT} and n.path and not n.torn and not n.returned
        ]
        line.sort(key=len)
        for shorter, longer in itertools.pairwise(line):
            if longer[: len(shorter)] != shorter:
                raise AssertionError(f"FORK {shorter} {longer}")
        o = s.owners[s.reg]
        for u, who in s.told if o and o.phase != "L" else ():
            if u not in ids(o.path) and any(
                n.mach in {UP, CUT}
                and ((who >> i & 1 and not n.ever) or (u in ids(n.path) and not n.returned))
                for i, n in enumerate(s.nodes)
            ):
                raise AssertionError(f"LOST {u}: the owner is at {o.path}")

    def check_nodes(self, s: S) -> None:
        """Raise AssertionError if an invariant of a node does not hold."""
        for n in s.nodes:
            if len(set(ids(n.path))) < len(n.path):
                raise AssertionError(f"ONCE {n.path}")
            if n.mach == GONE or n.torn or n.returned:
                continue
            if n.seg >= max(0, n.begun) and n.tag not in n.path:
                raise AssertionError(f"SEEN step {n.seg} of {n.tag} over {n.path}")

    def done(self, s: S) -> bool:
        """Whether the steps are over and all living nodes are in line."""
        o = s.owners[s.reg]
        if not (o and o.phase == "R" and o.step >= self.steps and s.nodes[o.loc].mach == UP):
            return False
        return all(
            n.mach == UP and self.same(n.path, o.path) and n.seg == o.step and not n.torn
            for n in s.nodes
            if n.mach in {UP, CUT}
        )

    def goes_on(self, s: S) -> bool:
        """Whether rounds may stand still: the steps are over, or something blocks them.

        They are blocked if no owner leads, or no chief on a node with the owner's copy reaches it.
        """
        o = s.owners[s.reg]
        if not o or o.phase == "L" or s.nodes[o.loc].mach != UP or not o.path:
            return True
        if o.step >= self.steps:
            return True
        return not any(
            self.reach(s, c, o.loc) and s.nodes[c].mach == UP and self.same(s.nodes[c].path, o.path)
            for c in range(len(s.chiefs))
        )

    def finish(self, s: S) -> S:
        """Return the state without what no part can use any more: that makes fewer states.

        Chiefs of owners that are gone see an error at once.
        """
        for c, x in enumerate(s.chiefs):
            if x and not s.owners[x[0]]:
                s = s._replace(chiefs=put(s.chiefs, c, ""))
        for i, n in enumerate(s.nodes):
            step = n.worker and n.worker[0]
            if n.worker and (step < n.seg or n.content or (n.sealed and step == n.seg)):
                s = self.node(s, i, worker=())  # it is refused
        return s
