"""The lock."""

from cases.case import Case

_ONE_OWNER = "never two owners; whoever lives gets the lock"

CASES = (
    Case("lock", "three", "DEATHS=2 STOPS=1", f"3 processes: {_ONE_OWNER}"),
    Case(
        "lock",
        "threads",
        "SIBLINGS DEATHS=2 STOPS=1",
        f"2 processes, 3 threads: {_ONE_OWNER}",
    ),
    Case(
        "lock",
        "rounds",
        "THREADS=2 ROUNDS=4 DEATHS=2 STOPS=1",
        f"2 processes, 4 rounds: {_ONE_OWNER}",
        quick=True,
    ),
    Case("lock", "no_slices", "NO_SLICES", "3 processes, no death: tokens alone suffice"),
    Case(
        "lock",
        "BROKEN_OWNER_GAP",
        "BROKEN_OWNER_GAP DEATHS=1",
        "the owner is recorded after a gap that nothing covers: two owners",
        quick=True,
    ),
    Case(
        "lock",
        "BROKEN_OWNER_WAIT",
        "BROKEN_OWNER_WAIT DEATHS=1",
        "the same gap, without takeover in it: locked for ever",
    ),
    Case(
        "lock",
        "BROKEN_NO_MUTEX",
        "BROKEN_NO_MUTEX SIBLINGS",
        "threads rely on the record lock of their process: two owners",
    ),
    Case(
        "lock",
        "BROKEN_POST_FIRST",
        "BROKEN_POST_FIRST NO_SLICES",
        "the token is given back before the lock: the last one is lost",
    ),
)
