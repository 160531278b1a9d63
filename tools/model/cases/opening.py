"""Names, files and semaphores."""

from cases.case import Case

_ONE_FILE = "one file under the name; clean robs nobody; all openers get through"

CASES = (
    Case("opening", "two", "DEATHS=1", f"2 openers and a cleaner: {_ONE_FILE}"),
    Case(
        "opening",
        "deaths",
        "DEATHS=2",
        f"2 openers and a cleaner, two die: {_ONE_FILE}",
        cycles=False,
    ),
    Case("opening", "three", "USERS=3 DEATHS=2", f"3 openers: {_ONE_FILE}", cycles=False),
    Case(
        "opening",
        "stopped",
        "DEATHS=1 STOPS=1",
        f"2 openers and a cleaner, one may be stopped: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "cleaners",
        "USERS=1 DEATHS=2 STOPS=1",
        f"1 opener and 2 cleaners: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "again",
        "TURNS=2",
        f"2 openers and a cleaner, twice each: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "child",
        "FORKS DEATHS=2 STOPS=1",
        f"an opener, its forked child and a cleaner: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "child_and_opener",
        "FORKS USERS=3 DEATHS=1",
        f"2 openers and the forked child of one: {_ONE_FILE}",
    ),
    Case(
        "opening",
        "stranger",
        "STRANGER FAILS DEATHS=1",
        f"2 openers of two users, who may give up on the way, and root's cleaner: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "gives_up",
        "FAILS REOPENS DEATHS=1",
        f"2 openers that may give up on the way, or open it once more, and a cleaner: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "loses",
        "LOSES DEATHS=1",
        f"2 openers and a cleaner, somebody else removes a semaphore: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "forced",
        "FORCES DEATHS=1",
        f"2 openers, and a cleaner that may remove what is in use: {_ONE_FILE}",
        cycles=False,
    ),
    Case(
        "opening",
        "orderly",
        "",
        "no death: not even an orphaned semaphore is left",
        quick=True,
    ),
    Case(
        "opening",
        "BROKEN_LOOK_FREE",
        "BROKEN_LOOK_FREE",
        "the second look goes without the name lock: clean robs the living",
    ),
    Case(
        "opening",
        "BROKEN_UNLINK_RACE",
        "BROKEN_UNLINK_RACE",
        "the name is removed without the lock: another file's",
    ),
    Case(
        "opening",
        "BROKEN_OWN_PRESENCE",
        "BROKEN_OWN_PRESENCE",
        "clean asks the kernel alone: robs its own process",
    ),
    Case(
        "opening",
        "BROKEN_TAKE_BACK",
        "BROKEN_TAKE_BACK FAILS",
        "a maker that cannot attach removes the name, and asks nobody: robs the living",
    ),
    Case(
        "opening",
        "BROKEN_NOT_ASKED",
        "BROKEN_NOT_ASKED",
        "clean does not ask whether a segment is being made: its semaphore goes",
    ),
    Case(
        "opening",
        "BROKEN_ASKED_LATE",
        "BROKEN_ASKED_LATE",
        "it asks after it looked for the segment, which was finished in between: likewise",
    ),
    Case(
        "opening",
        "BROKEN_FLOCK_LATE",
        "BROKEN_FLOCK_LATE",
        "the semaphore has its name before it says that its segment is being made: likewise",
    ),
    Case(
        "opening",
        "BROKEN_ORPHAN",
        "BROKEN_ORPHAN",
        "a semaphore is made after the last look: orphaned",
    ),
    Case(
        "opening",
        "BROKEN_FAILS",
        "BROKEN_FAILS FAILS",
        "who fails between making a semaphore and the second look leaves it: orphaned",
    ),
    Case(
        "opening",
        "BROKEN_NO_FINISH",
        "BROKEN_NO_FINISH DEATHS=1",
        "a dead remover's work is not finished: openers loop for ever",
    ),
    Case(
        "opening",
        "BROKEN_STRANGER",
        "BROKEN_STRANGER STRANGER DEATHS=1",
        "a stranger who may not finish it tries again for ever",
    ),
    Case(
        "opening",
        "BROKEN_CHILD",
        "BROKEN_CHILD FORKS",
        "a forked child does not look again: it uses what was removed as nobody's",
    ),
    Case(
        "opening",
        "BROKEN_CLEAN_MARKS",
        "BROKEN_CLEAN_MARKS FORKS",
        "clean marks what it removes: a forked child takes it for given up, and uses it",
    ),
)
