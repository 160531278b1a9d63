"""The cases of the search: some have all rules of the protocol, others lack one rule."""

from __future__ import annotations

import time
from typing import NamedTuple

from shmacc_hosts.faults import CHOICES, EVENTS
from shmacc_hosts.rules import without
from shmacc_hosts.search import Found, begun, moved_on, search


def talk(owner: int, *machines: int) -> str:
    """Return the steps in which each machine reports to an owner and gets its order, twice."""
    return 2 * "".join(f"m{number} report {owner}?; " for number in machines)


def staged(owner: int, chief: int, *machines: int) -> str:
    """Return the steps in which a chief's update is staged at these machines and committed.

    The round has one gradient, which comes from the first machine.
    """
    first, talks = machines[0], talk(owner, *machines)
    opens = f"m{first} read?; m{first} apply?; {talks}c{chief} call ask?; {talks}{talks}"
    return f"{opens}c{chief} decide update; {talks}{talks}"


def round_of(owner: int, chief: int, *machines: int) -> str:
    """Return the steps of a whole round with its update."""
    talks = talk(owner, *machines)
    make = "".join(f"m{number} make; m{number} made; " for number in machines)
    move = "".join(f"m{number} act; " for number in machines)
    return (
        f"{staged(owner, chief, *machines)}{make}{talks}c{chief} decide leave; {talks}{move}{talks}"
    )


_UPDATE = staged(0, 0, 0, 1).partition("decide update; ")[0] + "decide update; "
_STAGED = _UPDATE + talk(0, 0, 1) * 2
# Machine 0 makes a round alone (`_ALONE`). Then the owner is on machine 1, which lacks this round.
_ALONE = "silent 1; o0 lease_ends host1; " + round_of(0, 0, 0)
_LEADS = "lost 0; join 1; c1 find?; m1 report 1; m1 report 1; o1 learning_ends; m1 report 1; "
# While an update is staged, Ray declares owner 0's machine dead, but the machine still runs.
_DECLARED = _UPDATE + (
    "silent 0; declare 0; c1 find; m1 report 1; m1 report 1; o1 learning_ends; m1 report 1; "
)
_MADE = "m0 make; m0 made; m1 make; "
# Machine 1's segment is a step ahead of the next owner, with the same copy. Then machine 1 is lost.
_AHEAD = (
    "advance 0; m1 report 0; m1 act; m1 read; m1 apply; lost 1; owner 0; c0 find?; m0 report 1; "
    "m0 report 1; o1 learning_ends; m0 report 1; "
)
_OPEN = "m0 read; m0 apply; m0 report 1; c0 call ask; "
# Machine 1 has begun an update, and a worker has read the half-changed copy; then the owner dies.
_TORN = (
    "m0 report 0?; m1 report 0; m0 report 0?; m1 report 0; m1 make; actor 1; m1 read; m1 apply; "
    "m1 start; chief 0; owner 0; c1 find?; " + talk(1, 0, 1) + "o1 learning_ends?; " + talk(1, 0, 1)
)
# All copies are lost. An owner on machine 1, whose clock is behind, begins another line of changes
# and makes an update. Then machine 0 comes back with its old copy.
_ANEW = (
    "lost 1; lost 0; back_empty 1; c1 find behind; m1 start; m1 report 1; o1 learning_ends?; "
    f"{talk(1, 1)}c1 call ask?; {talk(1, 1)}m1 make; m1 made; {talk(1, 1)}m1 act; "
    f"{round_of(1, 1, 1)}back 0; "
)
_CUT_OFF = staged(0, 1, 1, 0, 2).partition("c1 decide")[0] + "pair (1, 2); c1 decide update; "


class Case(NamedTuple):
    """One search.

    Attributes:
        kinds: The kinds of failures that may happen, with commas between them.
        failures: How many failures may happen after `start`.
        start: The first steps; failures in them do not count.
        without: A rule that is left out; then the search must find a fault, except for "held".
        last_step: The step at which the world stops making rounds.
        machines: The number of machines.
        size: "quick" (the tests make this search, too), "" (it is slow), or "large" (hours).
    """

    kinds: str = ""
    failures: int = 0
    start: str = ""
    without: str = ""
    last_step: int = 1
    machines: int = 2
    size: str = ""

    def find(self, limit: int) -> Found:
        """Search at most `limit` states; return the fault that was found, if any."""
        world = begun(self.machines)
        world.kinds, world.failures = frozenset({*EVENTS, *CHOICES} - {"refuse"}), 99
        world.last_step, world.hears_zombies = self.last_step, "zombie" in self.kinds
        with without(self.without):
            try:
                moved_on(world, self.start)
            except AssertionError as fault:
                return Found(0, str(fault), self.start)
            world.fails, world.failures = 0, self.failures
            world.kinds = frozenset(self.kinds.split(","))
            return search(world, limit)

    def run(self, limit: int) -> bool:
        """Search, and print the result; return whether it is as expected."""
        began = time.monotonic()
        found = self.find(limit)
        verdict = f"found: {found.fault[:100]}" if found.fault else "holds"
        if found.limited:
            verdict = "no fault, not all states"
        rule = f", without {self.without!r}" if self.without else ""
        print(
            f"{self.machines} machines, {self.last_step} steps, {self.failures} of "
            f"{self.kinds or 'none'}{' later on' if self.start else ''}{rule}: "
            f"{found.states:,} states, {time.monotonic() - began:.0f} s: {verdict}",
            flush=True,
        )
        wanted = bool(self.without) and self.without != "held"
        as_expected = bool(found.fault) == wanted
        if not as_expected:
            print(f"    {found.path}", flush=True)
        return as_expected


CASES = (
    Case(size="quick"),
    Case("chief", 1, _STAGED, size="quick"),
    Case("none", 0, _ALONE + _LEADS + "back 0; "),
    Case("none", 0, _AHEAD + _OPEN + talk(1, 0) + "back 1; m1 start; ", last_step=2, size="quick"),
    Case("none", 0, _ANEW, last_step=2),
    *(Case(kind, 1, _STAGED) for kind in ("actor", "owner", "differs", "lease", "pair", "lost")),
    *(Case(kind, 1) for kind in ("chief", "raise", "actor", "refuse", "restore")),
    *(Case(kind, 1, size="large") for kind in ("owner", "lease", "pair", "lost", "silent")),
    *(Case(kind, 1, last_step=2, size="large") for kind in ("differs", "advance")),
    Case("silent,actor,zombie", 1, _DECLARED, size="large"),
    Case("lost,owner,restore", 1, _AHEAD + "back 1; ", size="large"),
    Case("actor,chief", 2, size="large"),
    Case(machines=3, size="large"),
    Case("pair", 1, staged(0, 0, 0, 1, 2), machines=3, size="large"),
    Case("twin", 1, size="quick"),
    Case("twin", 1, "twin (0, 0, 1); ", last_step=2, size="large"),
    Case("twin", 1, machines=3, size="large"),
    # Cases without one rule
    Case("twin", 1, "", "once", size="quick"),
    Case("owner", 1, _STAGED, "resume", size="quick"),
    Case("owner", 1, _STAGED, "told", size="quick"),
    Case("none", 0, _ALONE + "join 1; m1 report 0; owner 0; ", "learn", size="quick"),
    Case("zombie", 0, _DECLARED + talk(0, 0, 1) * 2 + _MADE, "promise", size="quick"),
    Case("chief", 1, _STAGED, "final", size="quick"),
    Case("actor", 1, _STAGED, "first", size="quick"),
    Case("differs", 1, _STAGED, "parent", size="quick"),
    Case("none", 0, _AHEAD + _OPEN + talk(1, 0) + "back 1; m1 start; ", "below", 2, size="quick"),
    Case("none", 0, "c0 decide restore; ", "raise", 0, size="quick"),
    Case("none", 0, _AHEAD + "c0 decide restore; m0 report 1; m0 make?; back 1; ", "pass", 2,
         size="quick"),
    Case("none", 0, "", "held"),
    Case("differs", 1, _STAGED, "digest", 2, size="quick"),
    Case("none", 0, _ALONE + "m0 read; m0 apply; " + _LEADS + round_of(1, 1, 1)
         + "m1 read; m1 apply; m1 report 1; c1 call ask; back 0; ", "lineage", 2, size="quick"),
    Case("none", 0, _ALONE + _LEADS + "back 0; ", "jump", size="quick"),
    Case("none", 0, _AHEAD + round_of(1, 0, 0) + _OPEN + "back 1; ", "up", 2, size="quick"),
    Case("none", 0, _ALONE + "join 1; ", "own", 2, size="quick"),
    Case("none", 0, "o0 lease_ends host0; " + round_of(0, 1, 1) + "lost 1; back_empty 1; ",
         "again", size="quick"),
    Case("none", 0, _UPDATE + _TORN, "begun", size="quick"),
    Case("none", 0, _CUT_OFF, "cut", machines=3, size="quick"),
    Case("owner", 1, _ALONE + round_of(0, 0, 0) + _LEADS + round_of(1, 1, 1)
         + "back 0; m0 start; ", "term", 2, size="quick"),
    Case("none", 0, _ANEW, "anew", 2, size="quick"),
    Case("zombie", 0, _DECLARED + "actor 1; m1 start; " + talk(0, 0, 1) * 2 + _MADE, "durable",
         size="quick"),
    Case("zombie", 0, _DECLARED + talk(0, 0, 1) + "c0 call ask; " + talk(0, 0, 1) * 2
         + "c0 decide update; " + talk(0, 0, 1) * 2 + _MADE, "resign", size="quick"),
)  # fmt: skip
