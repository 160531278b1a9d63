"""What is checked: each case is one model with one set of flags, searched exhaustively."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One search.

    Attributes:
        model: The file, without its suffix.
        name: Unique within the model; a broken variant has the name of its flag.
        flags: What spin's preprocessor defines.
        says: What holds if the search finds nothing; for a broken variant: what is wrong with it.
        cycles: Whether to search for cycles (livelocks) as well as for violated assertions.
        quick: Whether it belongs to the short slice that the tests run.
    """

    model: str
    name: str
    flags: str
    says: str
    cycles: bool = True
    quick: bool = False

    @property
    def broken(self) -> bool:
        """Whether spin must find an error in it."""
        return self.name.startswith("BROKEN_")


_ONE_OWNER = "never two owners; whoever lives gets the lock"
_WHOLE = "nothing torn, lost or doubled"
_ONE_FILE = "one file under the name; clean robs nobody; all openers get through"
_PLACES = "who has claimed is seen and not swept; the dead keep nobody out"
_LINE = "first come first served among the living; taken once; nobody waits in vain"
_WAKE = "wake-ups alone suffice"

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
    Case("commit", "two", "DEATHS=2", f"2 processes, 2 operations: {_WHOLE}", cycles=False),
    Case(
        "commit",
        "three",
        "WORKERS=3 OPERATIONS=1 DEATHS=2",
        f"3 processes, two die: {_WHOLE}",
        cycles=False,
    ),
    Case("commit", "runs", "RUN=2 DEATHS=1", f"rows saved in runs: {_WHOLE}"),
    Case(
        "commit",
        "leavings",
        "NO_POISON DEATHS=1",
        f"with what the dead really leave: {_WHOLE}",
        cycles=False,
    ),
    Case(
        "commit",
        "dense",
        "DENSE WORKERS=3 DEATHS=2",
        f"dense, 3 processes: {_WHOLE}",
        cycles=False,
    ),
    Case(
        "commit",
        "reader",
        "READER DEATHS=2",
        "a reader without the lock sees one commit, or knows that it did not",
        cycles=False,
        quick=True,
    ),
    Case(
        "commit",
        "BROKEN_COMMIT_FIRST",
        "BROKEN_COMMIT_FIRST DEATHS=1",
        "the commit word is written before the rows: torn",
        quick=True,
    ),
    Case(
        "commit",
        "BROKEN_SAVE_ORDER",
        "BROKEN_SAVE_ORDER DEATHS=1",
        "undo records count before they are written: torn",
    ),
    Case(
        "commit",
        "BROKEN_BEGIN_ORDER",
        "BROKEN_BEGIN_ORDER DEATHS=1",
        "the journal is valid before it is emptied: torn",
    ),
    Case(
        "commit",
        "BROKEN_UNDO_ORDER",
        "BROKEN_UNDO_ORDER DEATHS=2",
        "undo commits before the rows are back: torn by a second death",
    ),
    Case(
        "commit",
        "BROKEN_UNDO_ROOM",
        "BROKEN_UNDO_ROOM DEATHS=1",
        "the longer undo log is not committed before it is used",
    ),
    Case(
        "commit",
        "BROKEN_INDEX_TRUST",
        "BROKEN_INDEX_TRUST DEATHS=1",
        "index entries of the dead are believed: rows lost",
    ),
    Case(
        "commit",
        "BROKEN_NEW_ROWS",
        "BROKEN_NEW_ROWS DEATHS=1",
        "undo does not count what the dead left in the index: it runs full",
    ),
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
    Case(
        "line",
        "deaths",
        "TIMEOUTS DEATHS=2",
        f"2 takers, 1 apply: {_LINE}",
    ),
    Case(
        "line",
        "stopped",
        "TIMEOUTS DEATHS=1 STOPS=1",
        f"2 takers, 1 apply, one may be stopped: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "applies",
        "APPLIERS=2 DEATHS=1",
        f"2 takers, 2 applies: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "takers",
        "TAKERS=3 DEATHS=1",
        f"3 takers, 1 apply: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "threads",
        "SIBLINGS TIMEOUTS DEATHS=1 STOPS=1",
        f"2 takers in one process: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "newcomer",
        "NEWCOMER DEATHS=1 STOPS=1 GRADIENTS=1",
        f"a newcomer may get a dead one's entry: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "cancel",
        "CANCELLER DEATHS=1 GRADIENTS=1",
        f"with a cancel: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "cancel_stopped",
        "CANCELLER STOPS=1 GRADIENTS=1",
        "a cancel is heard even if a stopped process has the lock",
        cycles=False,
    ),
    Case(
        "line",
        "looks",
        "LOOKS=2 TIMEOUTS DEATHS=1 STOPS=1",
        f"2 takers that look for signals before they commit, 1 apply: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "looks_cancel",
        "LOOKS=1 CANCELLER DEATHS=1 GRADIENTS=1",
        f"the same with a cancel: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "partials",
        "PARTIALS LOOKS=1 TIMEOUTS DEATHS=1",
        f"2 takers of anything or nothing, which look, 1 apply: {_LINE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices_looks",
        "NO_SLICES LOOKS=2 ADVANCER TIMEOUTS",
        f"looks, advance_step and timeouts, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices_partials",
        "NO_SLICES PARTIALS LOOKS=1 APPLIERS=2 GRADIENTS=1 TIMEOUTS",
        f"partials of anything, 2 applies, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices",
        "NO_SLICES TIMEOUTS",
        f"2 takers, 1 apply, no death: {_WAKE}",
        cycles=False,
        quick=True,
    ),
    Case(
        "line",
        "no_slices_applies",
        "NO_SLICES APPLIERS=2 TIMEOUTS",
        f"2 takers, 2 applies, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices_takers",
        "NO_SLICES TAKERS=3 TIMEOUTS",
        f"3 takers, 1 apply, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices_cancel",
        "NO_SLICES CANCELLER TIMEOUTS GRADIENTS=1",
        f"cancel and timeouts, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices_advance",
        "NO_SLICES ADVANCER TIMEOUTS",
        f"advance_step and timeouts, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "no_slices_turns",
        "NO_SLICES TURNS=2 GRADIENTS=3",
        f"two takes each, no death: {_WAKE}",
        cycles=False,
    ),
    Case(
        "line",
        "BROKEN_SEEN_LATE",
        "BROKEN_SEEN_LATE NO_SLICES TIMEOUTS",
        "futex words are read after the look: a wake-up is lost",
    ),
    Case(
        "line",
        "BROKEN_NO_TICKET",
        "BROKEN_NO_TICKET TIMEOUTS",
        "a head that just left is taken for one that does not come",
    ),
    Case(
        "line",
        "BROKEN_CANCEL_GAP",
        "BROKEN_CANCEL_GAP CANCELLER GRADIENTS=1",
        "a take that has joined asks its ticket alone: the cancel of this moment passes by",
    ),
    Case(
        "line",
        "BROKEN_LEAVE_SILENT",
        "BROKEN_LEAVE_SILENT NO_SLICES TIMEOUTS",
        "who times out wakes nobody",
    ),
    Case(
        "line",
        "BROKEN_LOOK_BLIND",
        "BROKEN_LOOK_BLIND LOOKS=1 PARTIALS",
        "after a look the copy is handed out as it is: gradients come twice",
    ),
    Case(
        "line",
        "BROKEN_PARTIAL_ROBS",
        "BROKEN_PARTIAL_ROBS PARTIALS",
        "a partial of whatever is there takes the head's round",
    ),
    Case(
        "line",
        "BROKEN_TRIM",
        "BROKEN_TRIM NO_SLICES TIMEOUTS",
        "who leaves shortens the table without the lock: somebody who joins is not seen",
    ),
    Case(
        "line",
        "BROKEN_SLICE",
        "BROKEN_SLICE DEATHS=1",
        "a slice looks only for the dead: the head of a dead waker waits for ever",
    ),
    Case(
        "line",
        "BROKEN_OWN_PRESENCE",
        "BROKEN_OWN_PRESENCE SIBLINGS",
        "the kernel alone is asked who lives: a thread sweeps out its sibling",
    ),
    Case(
        "line",
        "BROKEN_NO_TOKEN",
        "BROKEN_NO_TOKEN NEWCOMER DEATHS=1 GRADIENTS=1",
        "presence without token: the dead live on in a newcomer",
    ),
    Case(
        "line",
        "BROKEN_ONE_BYTE",
        "BROKEN_ONE_BYTE NEWCOMER DEATHS=1 STOPS=1 GRADIENTS=1",
        "one byte allocates and proves life: a stopped newcomer lends it to the dead",
    ),
)
