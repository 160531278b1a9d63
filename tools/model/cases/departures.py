"""Processes that are gone: recorded by sweeps, told once."""

from cases.case import Case

_ONCE = "each death and failure is told once, nothing else, and nothing is left over"

CASES = (
    Case(
        "departures",
        "sweepers",
        "SWEEPERS=2 DEATHS=2",
        f"2 sweeps in 2 lanes, a wait: {_ONCE}",
        quick=True,
    ),
    Case(
        "departures",
        "tellers",
        "TELLERS=2 DEATHS=3",
        f"a sweep, 2 waits: {_ONCE}",
    ),
    Case(
        "departures",
        "victims",
        "VICTIMS=2 DEATHS=3",
        f"2 that go, a sweep, a wait: {_ONCE}",
        cycles=False,
    ),
    Case(
        "departures",
        "stopped",
        "SWEEPERS=2 DEATHS=1 STOPS=1",
        f"2 sweeps, one may be stopped: {_ONCE}",
        cycles=False,
    ),
    Case(
        "departures",
        "BROKEN_FREE_FIRST",
        "BROKEN_FREE_FIRST DEATHS=2",
        "the entry is freed before the record has its fate: a death in between is forgotten",
        quick=True,
    ),
    Case(
        "departures",
        "BROKEN_NO_LOOK",
        "BROKEN_NO_LOOK DEATHS=2",
        "nobody looks for a record that a dead sweep has left: it stays",
    ),
    Case(
        "departures",
        "BROKEN_ONE_LOCK",
        "BROKEN_ONE_LOCK SWEEPERS=2 DEATHS=1",
        "a wait is told with one lock: a sweep in the other lane records it again",
    ),
    Case(
        "departures",
        "BROKEN_HALF_READ",
        "BROKEN_HALF_READ BROKEN_TELL_FIRST DEATHS=2",
        "a record without a fate is read: told twice",
    ),
    Case(
        "departures",
        "BROKEN_TELL_FIRST",
        "BROKEN_TELL_FIRST DEATHS=1",
        "nothing is swept before: a death that nobody has met is told too late",
    ),
)
