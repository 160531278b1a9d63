"""What an owner does on its own, in each of its phases."""

from collections.abc import Iterator
from typing import Any

from nodes import Nodes
from states import CUT, FAILURE, STEP, UNKNOWN, UP, Owner, S, Update, needed, put


class Owners(Nodes):
    """What owners do."""

    def phase(self, o: Owner, phase: str, **changes: object) -> Owner:
        """Return an owner in another phase."""
        known = tuple(r and needed(phase, r) for r in o.known)
        return o._replace(phase=phase, **{"known": known, **changes})

    def lose(self, s: S, k: int, i: int) -> S:
        """Return the state in which an owner counts a node as lost."""
        o = s.owners[k]
        lost = o._replace(living=o.living & ~(1 << i), known=put(o.known, i, None))
        return s._replace(owners=put(s.owners, k, lost))

    def ended(self, s: S, k: int) -> S:
        """Return the state in which no chief has a round of this owner."""
        return s._replace(chiefs=tuple("" if x and x[0] == k else x for x in s.chiefs))

    def owner(self, s: S, k: int, o: Owner) -> Iterator[tuple[str, S, int]]:
        """Yield what an owner does on its own."""

        def to(phase: str, **changes: object) -> S:
            return s._replace(owners=put(s.owners, k, self.phase(o, phase, **changes)))

        alive = [i for i, n in enumerate(s.nodes) if n.mach in {UP, CUT}]
        if o.phase == "L":
            yield from self.learns(s, k, o, alive)
            return
        for i in range(self.count):
            if o.living >> i & 1 and not (s.nodes[i].mach == UP and self.reach(s, i, o.loc)):
                yield f"owner {k} loses node {i}", self.lose(s, k, i), STEP
        heard = [(i, o.known[i]) for i in range(self.count) if o.living >> i & 1]
        all_heard = heard and all(o.living >> i & 1 for i in alive) and s.nodes[o.loc].mach == UP
        if self.rule["again"] and o.path and all_heard and not self.is_somewhere(s, o, heard):
            term = {"term": (o.term[0] + 1, k), "known": (None,) * self.count}
            new = to("L", living=0, chief=-1, u=(), **term)
            yield f"owner {k} learns again", self.ended(new, k), STEP
        x = s.chiefs[o.chief] if o.chief >= 0 else ""
        mine = x and x[0] == k and x[1] == o.grant
        talks = bool(mine) and self.reach(s, o.chief, o.loc)
        yield from getattr(self, f"in_{o.phase}")(s, k, o, to, heard, talks)
        for c, x in enumerate(s.chiefs):  # a chief that the owner has given up
            if x and x[0] == k and (o.chief != c or x[1] != o.grant):
                yield f"chief {c}'s block raises", s._replace(chiefs=put(s.chiefs, c, "")), STEP

    def learns(self, s: S, k: int, o: Owner, alive: list[int]) -> Iterator[tuple[str, S, int]]:
        """Yield the end of learning: the base, and the step."""
        heard = [r for r in o.known if r]
        usable = [o.known[i] for i in alive if o.known[i] and o.known[i].path]
        all_heard = all(o.known[i] for i in alive)
        if s.nodes[o.loc].mach != UP or not (all_heard or (usable and not self.rule["learn"])):
            return  # a node that is not up does not get Ray's list
        path, step = (), max([0, *(r.seg for r in heard), *(r.begun for r in heard)])
        if usable:
            by_step = not self.rule["term"]
            path = max(usable, key=lambda r: (r.begun if by_step else 0, r.path[-1])).path
        new = self.phase(o, "R", path=path, step=step, living=0)
        yield f"owner {k} leads", s._replace(owners=put(s.owners, k, new)), STEP

    def is_somewhere(self, s: S, o: Owner, heard: list[Any]) -> bool:
        """Whether some node has the owner's lineage, or can still get it by what is staged."""
        if o.phase == "C" and self.can_pull(s, o.loc, o.u):
            return True
        return any(
            self.same(r.path, o.path) or (o.phase == "C" and r.staged == o.u.id) for _, r in heard
        )

    def ahead(self, o: Owner, heard: list[Any]) -> int:
        """Return the highest step that some node needs to get the owner's copy and step."""
        least = [0]
        for _, r in heard:
            if r.path and self.rule["jump"]:
                least.append(r.seg + (not self.same(r.path, o.path)))
            if r.path and self.rule["begun"]:
                least.append(r.begun)
        return max(least)

    def in_R(self, s: S, k: int, o: Owner, to: Any, heard: Any, _: bool) -> Iterator[Any]:  # noqa: N802
        """Yield jumps, grants and restores."""
        if (step := self.ahead(o, heard)) > o.step:
            yield f"owner {k} jumps to {step}", to("R", step=step), STEP
            return
        at = {i for i, r in heard if self.counts(r, o)}
        free = [c for c, x in enumerate(s.chiefs) if x == "" and self.reach(s, c, o.loc)]
        if o.path and o.step < self.steps and any(o.known[i].content for i in at):
            for c in [c for c in free if c in at or not self.rule["own"]][:1]:
                yield f"owner {k} grants to chief {c}", to("G", chief=c, grant=o.grant + 1), STEP
        if self.may(s, "advance"):
            new = to("R", step=o.step + 1)._replace(fails=s.fails + 1)
            yield f"owner {k} advances", new, FAILURE
        if self.may(s, "restore") or not o.path:
            for c in free[:1]:
                parent = o.path[-1] if o.path else ()
                u = Update((*o.term, o.n + 1), parent, o.step, whole=True)
                new = to("S", chief=c, grant=o.grant + 1, u=u, n=o.n + 1)
                new = new._replace(
                    chiefs=put(s.chiefs, c, (k, o.grant + 1, "update", u)),
                    fails=s.fails + bool(o.path),
                )
                yield f"chief {c} restores", new, FAILURE if o.path else STEP

    def in_G(self, s: S, k: int, o: Owner, to: Any, heard: Any, _: bool) -> Iterator[Any]:  # noqa: N802
        """Yield the beginning of a block, once all gradients have come."""
        c, hold = o.chief, (o.term, o.grant)
        if c < 0 or s.chiefs[c] != "":
            yield f"owner {k} withdraws", to("R", chief=-1), STEP
            return
        if any(r.sealed != hold for _, r in heard if self.counts(r, o)):
            return
        got = [r.content[0] for _, r in heard if r.sealed == hold and r.content]
        own = o.known[c] is not None and o.known[c].sealed == hold  # else it was lost meanwhile
        if not got or not self.reach(s, c, o.loc) or not (own or not self.rule["own"]):
            yield f"owner {k} withdraws", to("R", chief=-1), STEP
            return
        wrong = [g for g in got if g != o.path[-1]]
        if wrong:
            raise AssertionError(f"GRAD {wrong} in a round of {o.path[-1]}")
        new = to("B")._replace(chiefs=put(s.chiefs, c, (k, o.grant, "in", ())))
        yield f"owner {k} opens a block for chief {c}", new, STEP

    def in_B(self, s: S, k: int, o: Owner, to: Any, _: Any, talks: bool) -> Iterator[Any]:  # noqa: N802
        """Yield what a chief does in its block."""
        c = o.chief
        if not talks:
            yield f"owner {k} loses its chief", to("R", chief=-1), STEP
            return
        u = Update((*o.term, o.n + 1), o.path[-1], o.step, whole=False)
        new = to("S", u=u, n=o.n + 1)
        updates = (k, o.grant, "update", u)
        yield f"chief {c} updates", new._replace(chiefs=put(s.chiefs, c, updates)), STEP
        if self.may(s, "raise"):
            new = self.ended(to("R", chief=-1), k)
            yield f"chief {c} raises", new._replace(fails=s.fails + 1), FAILURE

    def in_S(self, s: S, k: int, o: Owner, to: Any, heard: Any, talks: bool) -> Iterator[Any]:  # noqa: N802
        """Yield the commit of what is staged."""
        waited = [
            i
            for i, r in heard
            if (o.u.whole or (self.same(r.path, o.path) and self.is_below(r, o.step)))
            and (self.can_pull(s, i, o.u) or r.staged == o.u.id or not self.rule["cut"])
        ]
        staged = [i for i, r in heard if r.staged == o.u.id]
        if any(r.refused == o.u.id for _, r in heard):
            back = (k, o.grant, "in", ())
            new = self.ended(to("R", u=(), chief=-1), k) if o.u.whole else to("B", u=())
            if talks and not o.u.whole:
                new = new._replace(chiefs=put(s.chiefs, o.chief, back))
            yield f"owner {k} drops {o.u.id}", new, STEP
        elif staged and (set(waited) <= set(staged) or not self.rule["held"]):
            path = (*o.path, (*o.u.id, UNKNOWN))
            new = to("C", path=path, step=o.step + (o.u.whole and self.rule["raise"]))
            yield f"owner {k} commits {o.u.id}", new, STEP
        if not talks:
            yield f"owner {k} loses its chief", to("R", chief=-1, u=()), STEP
        elif self.may(s, "raise"):
            new = self.ended(to("R", chief=-1, u=()), k)
            yield f"chief {o.chief} raises", new._replace(fails=s.fails + 1), FAILURE

    def in_C(self, s: S, k: int, o: Owner, to: Any, heard: Any, talks: bool) -> Iterator[Any]:  # noqa: N802
        """Yield the end of a round, or of a restore, that is committed."""
        on = {i: r.path for i, r in heard if self.same(r.path, o.path)}
        waits = {
            i
            for i, r in heard
            if i not in on
            and r.refused != o.u.id
            and (o.u.whole or (self.same(r.path, o.path[:-1]) and self.is_below(r, o.step)))
            and (r.staged == o.u.id or self.can_pull(s, i, o.u) or not self.rule["cut"])
        }
        c, after = o.chief, o.step + (not o.u.whole)
        passes = o.u.whole and self.rule["raise"] and self.rule["pass"]
        if passes and (step := self.ahead(o, heard)) > o.step:
            yield f"owner {k} jumps to {step}", to("C", step=step), STEP
        if talks and ((c in on and not waits) or not self.rule["told"]):
            path = on.get(c) or next(iter(on.values()), (*o.path[:-1], (*o.u.id, 0)))
            told = (o.u.id, sum(1 << i for i in on or dict(heard)))
            new = (
                to("R", u=(), step=after, chief=-1, path=path)
                if o.u.whole
                else to("F", u=(), path=path)
            )
            new = self.ended(new, k) if o.u.whole else new
            yield f"chief {c} is told", new._replace(told=(*s.told, told)), STEP
        if talks and c not in on and o.known[c] and o.known[c].refused == o.u.id:
            yield f"chief {c} hears that its node cannot", self.ended(to("C", chief=-1), k), STEP
        if not talks and on and not waits:
            new = to("R", u=(), step=after, chief=-1, path=next(iter(on.values())))
            yield f"owner {k} ends the round itself", new, STEP
        if not talks and not self.rule["final"]:
            yield f"owner {k} gives the round up", to("R", chief=-1, u=(), path=o.path[:-1]), STEP

    def in_F(self, _: S, k: int, o: Owner, to: Any, *__: Any) -> Iterator[Any]:  # noqa: N802
        """Yield the end of a block whose update is in."""
        yield f"the block ends at {k}", self.ended(to("R", step=o.step + 1, chief=-1), k), STEP
