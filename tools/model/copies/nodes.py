"""What a node does: its worker, its reports and orders, its actor."""

from collections.abc import Iterator

from states import FAILURE, STEP, UNKNOWN, Node, Order, Owner, Report, S, ids, needed, put
from world import World


class Nodes(World):
    """What nodes do."""

    def worker(self, s: S, i: int) -> Iterator[tuple[str, S, int]]:
        """Yield what a worker does: read the step, then the copy; apply a gradient."""
        n = s.nodes[i]
        if not n.worker:
            if 0 <= n.seg < self.steps and n.path and not n.content:
                read = (n.seg, "torn" if n.torn else n.path[-1])
                yield f"w{i} reads", self.node(s, i, worker=read), STEP
        elif n.worker[0] >= n.seg >= 0 and not n.content and not n.sealed:
            # As in TensorFlow, a later step is accepted, too.
            yield f"w{i} applies", self.node(s, i, worker=(), content=(n.worker[1],)), STEP

    def exchange(self, s: S, i: int, k: int) -> Iterator[tuple[str, S, int]]:
        """Yield a report of a node to an owner, with the owner's order."""
        o, n = s.owners[k], s.nodes[i]
        if n.torn:
            return  # it does one thing at a time
        if o.term < n.promise and self.rule["promise"]:
            above = (n.promise[0] + 1, k)
            if o.phase == "L":
                o = o._replace(term=above, known=(None,) * self.count)
                yield f"owner {k} raises its term", s._replace(owners=put(s.owners, k, o)), STEP
            elif self.rule["resign"]:
                yield f"owner {k} ends", s._replace(owners=put(s.owners, k, None)), STEP
            else:
                owners = put(s.owners, k, o._replace(term=above))
                yield f"owner {k} raises its term and leads on", s._replace(owners=owners), STEP
            return
        staged = n.staged and n.staged.id
        report = Report(n.path, n.begun, n.seg, n.content, n.sealed, staged, n.refused)
        o = o._replace(known=put(o.known, i, needed(o.phase, report)))
        if self.rule["promise"]:
            n = n._replace(promise=o.term)
        if o.phase != "L":
            o = o._replace(living=o.living | 1 << i)
            n = self.obey(s, i, k, n, o)
        elif n.order and n.order.term < o.term and self.rule["promise"]:
            n = n._replace(order=(), sealed=())
        new = s._replace(nodes=put(s.nodes, i, n), owners=put(s.owners, k, o))
        if new != s:
            yield f"node {i} and owner {k} ({o.phase})", new, STEP

    def obey(self, s: S, i: int, k: int, n: Node, o: Owner) -> Node:
        """Return the node after it has received the owner's order."""
        whole = bool(o.u) and o.u.whole
        hold = (o.term, o.grant) if o.phase in "GBSCF" and not whole else ()
        stage = o.u if o.phase in "SC" else ()
        n = n._replace(order=Order(o.term, o.path, o.step, hold, stage))
        if not hold:
            n = n._replace(sealed=())
        elif o.phase == "G" and self.counts(n, o):
            n = n._replace(sealed=hold)
        u = n.order.stage
        fits = u and (u.whole or (n.path and n.path[-1] == u.parent) or not self.rule["parent"])
        new = u and u.id != n.refused
        if fits and new and (u.whole or self.is_below(n, u.step)) and self.can_pull(s, i, u):
            n = n._replace(staged=u)
        in_line = n.path and n.path == o.path[: len(n.path)]
        if k == s.reg and in_line and (n.tag in n.path or n.seg < n.begun):
            n = n._replace(returned=False)
        return n

    def counts(self, at: Node | Report, o: Owner) -> bool:
        """Whether the gradients of a node are of the owner's step and copy."""
        if at.seg != o.step or (self.rule["begun"] and at.begun > at.seg):
            return False
        return self.same(at.path, o.path) or not self.rule["lineage"]

    def actor(self, s: S, i: int) -> Iterator[tuple[str, S, int]]:
        """Yield what a node's actor does on its own: change the copy, then move the segment."""
        n = s.nodes[i]
        if n.torn == 2:  # noqa: PLR2004  its actor is dead: the next one puts the old copy back
            yield f"{i} recovers", self.node(s, i, torn=0), STEP
            return
        if not n.order or not n.order.path:
            return
        step, u = n.order.step, n.order.stage
        if self.may(s, "refuse") and u and not n.torn and u.id not in {n.refused, *ids(n.path)}:
            f = s._replace(fails=s.fails + 1)
            yield f"{i} refuses", self.node(f, i, refused=u.id), FAILURE
        if n.torn:
            yield from self.changed(s, i)
        elif self.fits(n):
            yield f"{i} begins", self.begun(s, i, self.after(n)), STEP
        elif not self.same(n.path, n.order.path):
            if (step > n.seg or not self.rule["up"]) and self.sources(s, i):
                yield f"{i} begins to restore", self.begun(s, i, step), STEP
        elif n.seg < step:
            yield f"{i} moves to {step}", self.moved(s, i), STEP
        if not n.torn and not self.rule["first"] and n.seg < step:
            yield f"{i} moves early to {step}", self.moved(s, i), STEP

    def fits(self, n: Node) -> bool:
        """Whether the node has staged what makes its copy the one that it is ordered to have."""
        u, path = n.staged, n.order.path
        if not u or u.id != path[-1][:3] or self.same(n.path, path):
            return False
        if u.whole:
            return n.order.step > n.seg or not self.rule["up"]
        fits = self.same(n.path, path[:-1]) or not self.rule["parent"]
        return fits and self.is_below(n, u.step)

    def is_below(self, at: Node | Report, step: int) -> bool:
        """Whether a node's segment is not past the step of a round: its update may be made."""
        return at.seg <= step or not self.rule["below"]

    def after(self, n: Node) -> int:
        """Return the step to which what the node has staged leads."""
        return n.order.step if n.staged.whole else n.staged.step + 1

    def begun(self, s: S, i: int, step: int) -> S:
        """Return the state in which a node's copy is being changed."""
        begun = max(s.nodes[i].begun, step) if self.rule["begun"] else s.nodes[i].begun
        return self.node(s, i, begun=begun, torn=1)

    def changed(self, s: S, i: int) -> Iterator[tuple[str, S, int]]:
        """Yield the commit of a change that a node has begun."""
        n = s.nodes[i]
        done = {"torn": 0, "begun": max(n.begun, n.order.step)}
        if not self.fits(n):
            for j in self.sources(s, i):
                yield f"{i} restores", self.node(s, i, path=s.nodes[j].path, **done), STEP
            if not self.sources(s, i):
                yield f"{i} cannot restore", self.node(s, i, torn=0), STEP
            return
        u, name = n.staged, n.order.path[-1]
        before = n.order.path[:-1] if u.whole else n.path
        done["begun"] = max(n.begun, self.after(n))
        done["staged"] = () if self.rule["parent"] else u
        path = (*before, (*name[:3], 0))
        yield f"{i} changes its copy", self.node(s, i, path=path, **done), STEP
        if self.may(s, "differs") and not u.whole:
            f = s._replace(fails=s.fails + 1)
            other = (*before, (*name[:3], 1))
            yield f"{i} differs", self.node(f, i, path=other, **done), FAILURE

    def sources(self, s: S, i: int) -> list[int]:
        """Return a node that has the copy that this one is ordered to have."""
        path = s.nodes[i].order.path
        if path[-1][3] == UNKNOWN:
            return []
        others = (j for j in range(self.count) if j != i and self.reach(s, i, j))
        return [j for j in others if self.same(s.nodes[j].path, path) and not s.nodes[j].torn][:1]

    def moved(self, s: S, i: int) -> S:
        """Return the state in which a node's segment is at the order's step, and empty."""
        order = s.nodes[i].order
        tag = s.nodes[i].path[-1] if self.rule["first"] else order.path[-1]
        return self.node(s, i, seg=order.step, content=(), sealed=(), tag=tag)
