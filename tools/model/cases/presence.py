"""The table of processes."""

from cases.case import Case

_PLACES = "who has claimed is seen and not swept; the dead keep nobody out"

CASES = (
    Case("presence", "three", "DEATHS=1", f"3 processes: {_PLACES}"),
    Case(
        "presence",
        "deaths",
        "DEATHS=2 ENTRIES=2",
        f"3 processes for 2 entries, two die: {_PLACES}",
        cycles=False,
    ),
    Case(
        "presence",
        "stopped",
        "DEATHS=1 STOPS=1 ENTRIES=2",
        f"3 processes for 2 entries, one may be stopped: {_PLACES}",
        cycles=False,
    ),
    Case("presence", "crowded", "CROWDED", f"3 processes, all entries are of the dead: {_PLACES}"),
    Case(
        "presence",
        "again",
        "TURNS=2 ENTRIES=2",
        f"3 processes for 2 entries, twice each: {_PLACES}",
        cycles=False,
    ),
    Case(
        "presence",
        "threads",
        "SIBLINGS PROCESSES=2 CROWDED ENTRIES=2 DEATHS=1",
        f"2 processes, 3 threads, all entries are of the dead: {_PLACES}",
        cycles=False,
    ),
    Case(
        "presence",
        "orderly",
        "",
        f"3 processes, no death: {_PLACES}",
        quick=True,
    ),
    Case(
        "presence",
        "BROKEN_NO_BYTE",
        "BROKEN_NO_BYTE",
        "`top` is lowered without the entry's byte: below one in use",
    ),
    Case(
        "presence",
        "BROKEN_LOOK_ONCE",
        "BROKEN_LOOK_ONCE DEATHS=1",
        "`top` is lowered after a look that was before the byte: below a dead one's",
    ),
    Case(
        "presence",
        "BROKEN_PLAIN_STORE",
        "BROKEN_PLAIN_STORE",
        "`top` is lowered by a store: it may have risen since",
    ),
    Case(
        "presence",
        "BROKEN_TOP_LATE",
        "BROKEN_TOP_LATE",
        "the token is written before `top` has risen: nobody sees it",
    ),
    Case(
        "presence",
        "BROKEN_PLACED_EARLY",
        "BROKEN_PLACED_EARLY SIBLINGS PROCESSES=2 CROWDED ENTRIES=2",
        "a sweep takes the byte that another thread of its process has just taken, and drops it",
    ),
    Case(
        "presence",
        "BROKEN_INDEX_LATE",
        "BROKEN_INDEX_LATE SIBLINGS PROCESSES=2 CROWDED ENTRIES=2",
        "the token is written before the process knows its entry: its other thread sweeps it",
    ),
    Case(
        "presence",
        "BROKEN_BLIND_SWEEP",
        "BROKEN_BLIND_SWEEP",
        "a token is cleared that is not the one that was judged: a newcomer's",
    ),
    Case(
        "presence",
        "BROKEN_SAME_TOKEN",
        "BROKEN_SAME_TOKEN TURNS=2",
        "a process has one token for all its life: its second stay is swept for its first",
    ),
    Case(
        "presence",
        "BROKEN_FULL",
        "BROKEN_FULL CROWDED",
        "a full table is not swept: the dead keep everybody out",
    ),
)
