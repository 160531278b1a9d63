"""Search the states of the model of copies, and find a fault for each rule that is left out.

    python tools/model/copies/check.py             # two and three nodes; some minutes of a core
    python tools/model/copies/check.py --quick     # what the tests run
    python tools/model/copies/check.py --large     # more failures at once; an hour
    python tools/model/copies/check.py --nodes 3 --failures 1 --kinds pair --without cut

Faults that are looked for in each state:
    GRAD   A gradient in a round was not computed from the owner's copy.
    SEEN   A segment is at a step before the parameters of that step.
    ONCE   A copy has an update twice.
    FORK   Living nodes' copies are not in one line.
    LOST   An update that a chief was told of is missing in the owner's line while a node lives that
           has it, or that took part.
Over all states:
    STUCK  From some state the living parts cannot finish without another failure.
    WAITS  From some state a round waits for the end of a failure, though an owner and a chief's
           node with its copy can go on.

A search visits all states that are reached with at most so many failures. A walk goes a random way
with many failures, then without any until all is in line.
"""

import argparse
import gc
import random
import sys
import time
from array import array
from typing import Any, NamedTuple

from model import Model
from states import FAILURE, KINDS, RULES, STEP, S


class Found(NamedTuple):
    """What a search has found."""

    states: int
    fault: str = ""
    path: str = ""  # the steps that lead to it
    limited: bool = False  # not all states were visited


class States:
    """States by number; parts that are equal are kept once, and compared by identity."""

    def __init__(self) -> None:
        self.all: list[S] = []
        self.why: list[tuple[int, str]] = []
        self._numbers: dict[Any, int] = {}
        self._kept: dict[Any, Any] = {}
        self._ids: set[int] = set()

    def _one(self, part: Any) -> Any:
        if id(part) not in self._ids:
            part = self._kept.setdefault(part, part)
            self._ids.add(id(part))
        return part

    def number(self, state: S, before: int, what: str) -> int:
        """Return the number of a state, which a step led to."""
        nodes, owners = tuple(map(self._one, state.nodes)), tuple(map(self._one, state.owners))
        rest = (state.reg, self._one(state.chiefs), state.told, state.cuts, state.fails)
        key = (*map(id, nodes), *map(id, owners), *rest)
        number = self._numbers.setdefault(key, len(self.all))
        if number == len(self.all):
            self.all.append(tuple.__new__(S, (nodes, owners, *rest)))
            self.why.append((before, what))
        return number

    def path(self, number: int) -> str:
        """Return the steps that led to a state."""
        steps = []
        while number > 0:
            number, what = self.why[number]
            steps.append(what)
        return "; ".join(reversed(steps))


class Edges:
    """Steps from state to state."""

    def __init__(self) -> None:
        self._from, self._to = array("I"), array("I")

    def add(self, one: int, other: int) -> None:
        """Note a step."""
        self._from.append(one)
        self._to.append(other)

    def cannot_reach(self, goals: bytearray) -> list[int]:
        """Return the states from which no steps lead to a goal."""
        before: list[list[int]] = [[] for _ in goals]
        for one, other in zip(self._from, self._to, strict=True):
            before[other].append(one)
        good, new = bytearray(goals), [i for i, goal in enumerate(goals) if goal]
        while new:
            for one in before[new.pop()]:
                if not good[one]:
                    good[one] = 1
                    new.append(one)
        return [i for i, is_good in enumerate(good) if not is_good]


def search(model: Model, limit: int, *, over_all: bool = True) -> Found:
    """Visit the model's states, breadth first; over_all: look for STUCK and WAITS, too."""
    states, steps, own = States(), Edges(), Edges()
    states.number(model.start, -1, "")
    done, goes_on = bytearray(), bytearray()
    at = 0
    while at < len(states.all):
        state = states.all[at]
        try:
            model.check(state)
            for what, after, kind in model.successors(state):
                to = states.number(model.finish(after), at, what)
                if kind != FAILURE and over_all:
                    steps.add(at, to)
                    if kind == STEP:
                        own.add(at, to)
        except AssertionError as fault:
            return Found(len(states.all), str(fault), states.path(at))
        done.append(model.done(state))
        goes_on.append(model.goes_on(state))
        at += 1
        if len(states.all) > limit:
            return Found(len(states.all), limited=True)
    for what, edges, goals in [("STUCK", steps, done), ("WAITS", own, goes_on)]:
        bad = edges.cannot_reach(goals) if over_all else []
        if bad:
            return Found(at, f"{what} in {len(bad)} states", states.path(bad[0]))
    return Found(at)


def walk(model: Model, seed: int, length: int) -> Found:
    """Go a random way; then without failures to the end."""
    choose, state, steps = random.Random(seed), model.start, []
    quiet = 0
    try:
        while not (quiet and model.done(state)):
            model.check(state)
            nexts = list(model.successors(state))
            mine = [step for step in nexts if step[2] != FAILURE]
            others = [step for step in nexts if step[2] == FAILURE]
            if not quiet and others and choose.random() < 0.05:  # noqa: PLR2004
                mine = others
            if not mine and not model.done(state):
                return Found(len(steps), "STUCK", "; ".join(steps))
            if not mine:
                mine = others or [("the end", state, STEP)]
            what, state, _ = choose.choice(mine)
            state = model.finish(state)
            steps.append(what)
            quiet += len(steps) > length
            if quiet > 40 * length:
                return Found(len(steps), "STUCK, perhaps by chance", "; ".join(steps))
    except AssertionError as fault:
        return Found(len(steps), str(fault), "; ".join(steps))
    return Found(len(steps))


def moved_on(model: Model, what: str) -> None:
    """Let the model start where these steps lead."""
    for wanted in filter(None, (step.strip() for step in what.split(";"))):
        labels = {label: after for label, after, _ in model.successors(model.start)}
        found = next((label for label in labels if label.startswith(wanted)), None)
        if found is None:
            raise LookupError(f"no step {wanted!r} among {sorted(labels)}")
        model.start = model.finish(labels[found])


def round_of(node: int, owner: int, others: tuple[int, ...] = ()) -> str:
    """Return the steps of a round with one gradient, of one node and perhaps of others."""

    def all_of(what: str) -> str:
        return "".join(f"{what.format(n)}; " for n in (node, *others))

    exchange = all_of(f"node {{0}} and owner {owner}")
    return (
        f"w{node} reads; w{node} applies; {exchange}owner {owner} grants; {exchange}{exchange}"
        f"owner {owner} opens; chief {node} updates; {exchange}{exchange}owner {owner} commits; "
        f"{exchange}{all_of('{0} begins; {0} changes')}{exchange}chief {node} is told; "
        f"the block ends at {owner}; {exchange}{all_of('{0} moves')}"
    )


# A round that node 0 makes alone; then its machine is lost, and chief 1's owner leads.
_ALONE = round_of(0, 0)
_LOST = "node 0 is lost; chief 1 makes owner 1; node 1 and owner 1 (L); owner 1 leads; "
# The same round is told, but has not ended; node 1 has a gradient of the same step.
_TOLD = "w1 reads; w1 applies; " + _ALONE.partition("the block ends")[0]
# Node 1's machine is lost, with its memory.
_EMPTY = "node 1 is lost; machine 1 joins empty; "
# An update of chief 0; it is staged and committed.
_UPDATE = (
    "w0 reads; w0 applies; node 0 and owner 0; node 1 and owner 0; owner 0 grants; "
    "node 0 and owner 0; node 0 and owner 0; node 1 and owner 0; node 1 and owner 0; "
    "owner 0 opens; chief 0 updates; "
)
_STAGED = (
    "node 0 and owner 0 (S); node 0 and owner 0 (S); node 1 and owner 0 (S); "
    "node 1 and owner 0 (S); owner 0 commits; "
)
# A worker reads half of it.
_TORN = "node 1 and owner 0 (C); 1 begins; actor 1 dies; w1 reads; w1 applies; "
# The machine of the update's owner is declared dead, but still runs.
_DECLARED = _UPDATE + (
    "node 0 is silent; Ray declares node 0; chief 1 makes owner 1; node 1 and owner 1 (L); "
    "owner 1 leads; "
)
# Node 1's segment is a step ahead of the owner's, with the same copy.
_AHEAD = (
    "owner 0 advances; w0 reads; w0 applies; node 1 and owner 0; 1 moves to 1; w1 reads; "
    "w1 applies; node 1 is lost; owner 0 dies; chief 0 makes owner 1; node 0 and owner 1 (L); "
    "owner 1 leads; "
)
_FORGOTTEN = "node 1 and owner 1 (R); actor 1 dies; "


_RESTORES = _AHEAD + "chief 0 restores; "


class Case(NamedTuple):
    """What is searched.

    Attributes:
        nodes: How many nodes.
        steps: At which step rounds end.
        failures: How many failures there may be, those of `start` included.
        kinds: Of which kinds they may be.
        without: A rule that is left out; a fault must be found, except without "held".
        start: Steps that come first.
        size: "quick", "" or "large".
    """

    nodes: int
    steps: int
    failures: int
    kinds: str
    without: str = ""
    start: str = ""
    size: str = ""

    def run(self, limit: int) -> bool:
        """Search, and print what is found; return whether it is as expected."""
        began = time.monotonic()
        model = Model(
            self.nodes, self.steps, self.failures, self.without.split(","), self.kinds.split(",")
        )
        moved_on(model, self.start)
        found = search(model, limit)
        verdict = f"found: {found.fault}" if found.fault else "holds"
        if found.limited:
            verdict = "no fault, not all states"
        rule = f", without {self.without!r}" if self.without else ""
        print(
            f"{self.nodes} nodes, {self.steps} steps, {self.failures} of {self.kinds}{rule}: "
            f"{found.states:,} states, {time.monotonic() - began:.0f} s: {verdict}",
            flush=True,
        )
        wanted = bool(self.without) and self.without != "held"
        if bool(found.fault) != wanted:
            print(f"    {found.path}", flush=True)
        return bool(found.fault) == wanted


CASES = (
    Case(2, 1, 1, "chief", size="quick"),
    Case(2, 1, 1, "raise", size="quick"),
    Case(2, 1, 1, "actor", size="quick"),
    Case(2, 1, 1, "refuse", size="quick"),
    Case(2, 1, 1, "owner"),
    Case(2, 1, 1, "restore"),
    Case(2, 1, 1, "lease"),
    Case(2, 1, 1, "pair"),
    Case(2, 1, 1, "lost"),
    Case(2, 2, 1, "differs"),
    Case(2, 2, 1, "advance"),
    Case(2, 2, 3, "advance,lost,owner", start=_AHEAD, size="quick"),
    Case(2, 1, 1, "silent", size="large"),
    Case(2, 1, 2, "actor,chief"),
    Case(2, 1, 2, "chief,refuse"),
    Case(2, 1, 2, "actor,refuse", size="large"),
    Case(2, 1, 2, "actor,owner", size="large"),
    Case(2, 1, 2, "actor,restore", size="large"),
    Case(2, 2, 1, "owner", size="large"),
    Case(2, 2, 4, "advance,lost,owner,restore", start=_RESTORES, size="quick"),
    Case(2, 2, 1, "lost", start=_ALONE + "w0 reads; w0 applies; " + _LOST, size="quick"),
    Case(2, 2, 2, "lost,owner", start=_ALONE + _ALONE + _LOST + round_of(1, 1), size="large"),
    Case(2, 1, 2, "silent,actor,zombie", start=_DECLARED, size="large"),
    Case(3, 1, 0, "none"),
    Case(3, 1, 1, "chief", size="large"),
    Case(3, 1, 1, "pair", size="large"),
    # Each rule left out
    Case(2, 1, 1, "owner", "told", size="quick"),
    Case(2, 1, 1, "owner", "learn", size="quick"),
    Case(2, 1, 1, "owner", "promise", size="quick"),
    Case(2, 1, 1, "chief", "final", size="quick"),
    Case(2, 1, 1, "actor", "first", size="quick"),
    Case(2, 1, 1, "lost", "parent", size="quick"),
    Case(2, 2, 3, "advance,lost,owner", "below", _AHEAD, size="quick"),
    Case(2, 1, 1, "restore", "raise", size="quick"),
    Case(2, 2, 4, "advance,lost,owner,restore", "pass", _RESTORES, size="quick"),
    Case(2, 1, 0, "none", "held", size="quick"),
    Case(2, 2, 1, "differs", "digest", size="quick"),
    Case(2, 2, 1, "lost", "lineage", _ALONE + "w0 reads; w0 applies; " + _LOST, size="quick"),
    Case(2, 1, 1, "lost", "jump", _ALONE + _LOST, size="quick"),
    Case(2, 1, 1, "lost", "up", _TOLD, size="quick"),
    Case(2, 1, 1, "lost", "own", _LOST, size="quick"),
    Case(2, 1, 1, "lost", "again", round_of(1, 0) + _EMPTY, size="quick"),
    Case(2, 1, 2, "actor,owner", "begun", _UPDATE + _STAGED + _TORN, size="quick"),
    Case(2, 1, 1, "chief", "cut", size="quick"),
    Case(2, 2, 2, "lost,owner", "term", _ALONE + _ALONE + _LOST + round_of(1, 1), size="quick"),
    Case(2, 1, 2, "silent,actor,zombie", "durable", _DECLARED + _FORGOTTEN + _STAGED, size="quick"),
    Case(
        2, 1, 1, "silent,zombie", "resign", _DECLARED + "owner 0 raises; " + _STAGED, size="quick"
    ),
)
_OF_WALKS = ",".join(kind for kind in KINDS if kind != "zombie")


def walks(nodes: int, number: int) -> bool:
    """Go so many random ways; return whether no fault was found."""
    began, steps = time.monotonic(), 0
    for seed in range(number):
        found = walk(Model(nodes, 4, 6, (), _OF_WALKS.split(",")), seed, 150)
        steps += found.states
        if found.fault:
            print(f"{nodes} nodes, walk {seed}: found: {found.fault}\n    {found.path}", flush=True)
            return False
    took = time.monotonic() - began
    print(f"{nodes} nodes, {number} walks: {steps:,} steps, {took:.0f} s: no fault", flush=True)
    return True


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="only what the tests run")
    parser.add_argument("--large", action="store_true", help="the large searches, too")
    parser.add_argument("--limit", type=int, default=4_000_000, help="the most states")
    parser.add_argument("--nodes", type=int, help="one search, with so many nodes")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--failures", type=int, default=1)
    parser.add_argument("--kinds", default="chief", help=f"of failures, of {', '.join(KINDS)}")
    parser.add_argument("--without", default="", help=f"a rule of {', '.join(RULES)}")
    parser.add_argument("--start", default="", help="steps that come first")
    asked = parser.parse_args()
    gc.disable()  # states have no cycles
    if asked.nodes:
        of = (asked.nodes, asked.steps, asked.failures, asked.kinds, asked.without, asked.start)
        return not Case(*of).run(asked.limit)
    sizes = {"quick"} if asked.quick else {"quick", "", *(["large"] if asked.large else [])}
    chosen = [case for case in CASES if case.size in sizes]
    wrong = [case for case in chosen if not case.run(asked.limit)]
    number = 20 if asked.quick else 10_000 if asked.large else 1000
    wrong += [nodes for nodes in (2, 3) if not walks(nodes, number)]
    print(f"{len(chosen)} searches, {2 * number} walks; not as expected: {wrong or 'nothing'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
