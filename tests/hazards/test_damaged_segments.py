"""The library trusts nothing in a segment: on any contents, calls return or raise an error.

No call crashes, hangs or writes elsewhere. Hypothesis chooses the damage, and a separate process
makes the calls (every_call.py). Set SHMACC_FUZZ_EXAMPLES for a longer search.

Some damage is forged: sizes and loop bounds agree with each other, and checksums are valid. An
endless loop would hold the locks, and no signal would end it. An array as large as the segment
claims would use up the machine's memory.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, needs_own_shm
from helpers.damage import Damage, Directory, Elsewhere, SetField, Sizes, UndoLog, several
from helpers.every_call import PATIENCE, SHM_BYTES, Scenario, Victim
from helpers.segment_file import SegmentFile
from helpers.support import SANITIZED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmacc
from shmacc import Parameters, errors, inspection, optim
from shmacc._base import names

pytestmark = needs_own_shm

EXAMPLES: Final = 3 * int(os.environ.get("SHMACC_FUZZ_EXAMPLES", "0"))


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    made = Victim()
    yield made
    made.end()


scenarios = st.builds(
    Scenario,
    kind=st.sampled_from(("sparse", "dense", "group")),
    dtype=st.sampled_from(
        ("float32", "float64", "int64", "uint64", "int8", "float16", "complex64")
    ),
    shape=st.sampled_from(((), (3,), (2, 4))),
    applies=st.integers(0, 3),
    taken=st.booleans(),
    order=st.integers(0, 1000),
    lanes=st.sampled_from((1, 1, 3)),
    contributors=st.booleans(),
)
HOW: Final[list[dict[str, bool]]] = [{"attached": False}, {}, {"waiting": True}]


@settings(
    max_examples=EXAMPLES or 45,
    # A short run always tries the same examples; a long run tries new ones.
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(scenario=scenarios, how=st.sampled_from(HOW), damages=several())
def test_every_call_on_a_damaged_segment_ends(
    victim: Victim, scenario: Scenario, how: dict[str, bool], damages: list[Any]
) -> None:
    """The segment is damaged at rest, while attached, and while a take waits."""
    outcomes = victim.outcomes(replace(scenario, **how), *damages)  # type: ignore[arg-type]
    assert [outcome for outcome in outcomes if not outcome.fine] == []


@pytest.mark.parametrize("kind", ["sparse", "dense", "group"])
def test_every_call_works_on_an_undamaged_segment(victim: Victim, kind: str) -> None:
    """If a call failed here, the tests of damage would prove little."""
    for attached, lanes in (True, 1), (False, 3):
        scenario = Scenario(kind, attached=attached, lanes=lanes, contributors=True)
        outcomes = victim.outcomes(scenario)
        assert [outcome for outcome in outcomes if not outcome.fine] == []
        ends = Counter(outcome.error for outcome in outcomes)
        assert ends[""] > 20
        assert not ends["DataLossError"]


# --- forged bounds of loops -----------------------------------------------------------------------


MOST: Final = (1 << 64) - 1
MIB: Final = 1 << 20
_PAGE: Final = 4096
_SAVED: Final = f"{names.SHM_DIRECTORY}/saved.npz"  # the victim has its own /dev/shm
ROWS: Final = Scenario("sparse", applies=3, contributors=True)
DENSE: Final = Scenario("dense", applies=3)
LANES: Final = Scenario("group", applies=3, lanes=2, contributors=True)


@dataclass(frozen=True)
class FullIndex:
    """Fill the index: no bucket has a free entry, and no entry leads to a row."""

    def do(self, file: SegmentFile, _: SegmentFile) -> None:
        member = file.committed("member")
        bucket = layout.Bucket((1 << 15,) * 10, member.index_stamp, (1 << 31,) * 10)
        index = file.table.first(f"bucket{member.index}")
        file.write(index, bytes(bucket) * member.index_buckets)


FORGED: Final[dict[str, tuple[Scenario, Damage]]] = {
    "events": (ROWS, SetField("next_event", "word", MOST)),
    "an event": (ROWS, SetField("event", "serial", MOST, number=MOST % 64 % 32)),
    "undo records of no rows": (ROWS, UndoLog(((0, 0, 0),) * 9, 1 << 62, 4096, 0)),
    "undo records": (ROWS, UndoLog(((0, 1, 0),), 1 << 62, None, 1 << 62)),
    "undo records of a dense member": (DENSE, UndoLog(((0, 0, 0),), 1 << 62, 4096, 0)),
    "undo records in a lane": (LANES, Elsewhere(1, 1, UndoLog(((0, 0, 2),), 1 << 62, 4096, 0))),
    "an index without room": (ROWS, FullIndex()),
    "an index of contributors without room": (ROWS, Elsewhere(0, 1, FullIndex())),
    "an index in a lane without room": (LANES, Elsewhere(1, 1, FullIndex())),
    "no buckets": (ROWS, SetField("member", "index_buckets", 0)),
    "rows": (ROWS, SetField("member", "rows", layout.MAX_ROWS)),
    "rows of no bytes": (ROWS, Sizes(1 << 20, (0,), None, 1 << 20, 3)),
    "an array of no gradients": (DENSE, SetField("member", "row_elements", 1 << 36)),
    "dimensions": (ROWS, SetField("shape", "rank", MOST, number=0)),
    "rounds that were idle": (ROWS, SetField("member", "round", 0)),
    "a round to come": (ROWS, SetField("lane", "round", MOST)),
    "the number of the round": (ROWS, SetField("round", "round", MOST)),
    "rounds of little memory": (ROWS, SetField("lane", "small_rounds", MOST)),
    "participants": (ROWS, SetField("participants_top", "word", (1 << 32) - 1)),
    "the departed": (ROWS, SetField("departed_top", "word", (1 << 32) - 1)),
    "one who is being written": (ROWS, SetField("departed", "token", 1 << 3)),
    "waiters": (ROWS, SetField("queue", "top", (1 << 32) - 1)),
    "tickets": (ROWS, SetField("queue", "next_ticket", MOST)),
    "cancels": (ROWS, SetField("queue", "cancelled_through", MOST)),
    "finishes": (ROWS, SetField("round", "restores", MOST)),
    "when others may come": (ROWS, SetField("fairness", "keep_off_ns", (1 << 63) - 1)),
    "generations": (ROWS, SetField("round", "needs", MOST)),
    "opened rounds": (ROWS, SetField("round", "holder_serial", MOST)),
    "a lane's generation": (LANES, SetField("lane_generation", "word", MOST)),
}


def _outcomes(victim: Victim, scenario: Scenario, damage: Damage) -> list[Any]:
    """Return how every call ended, on a segment at rest and on an attached one."""
    return [
        outcome
        for attached in (False, True)
        for outcome in victim.outcomes(
            replace(scenario, attached=attached, order=int(attached)), damage
        )
    ]


@pytest.mark.parametrize("bound", FORGED)
def test_every_call_with_a_forged_loop_bound_ends(victim: Victim, bound: str) -> None:
    outcomes = _outcomes(victim, *FORGED[bound])
    assert [outcome for outcome in outcomes if not outcome.fine] == []


# --- claimed sizes -------------------------------------------------------------------------------

SPARSE: Final = Scenario("sparse", shape=(3,), applies=3)
DOUBLES: Final = Scenario("dense", dtype="float64", shape=(3,), applies=3)


def sizes(*dims: int, rows: int = 1, reserved: int | None = layout.REGION_SPAN) -> Sizes:
    """Return consistent sizes for this many rows of this shape, with a large enough index."""
    return Sizes(rows, dims, reserved, buckets=-(-rows // 10), count=3)


CLAIMS: Final[dict[str, tuple[Scenario, Damage]]] = {
    "2 million rows": (SPARSE, sizes(3, rows=2_000_000, reserved=64 * MIB)),
    "20 million empty rows": (SPARSE, sizes(0, rows=20_000_000)),
    "as many rows as there may be": (SPARSE, sizes(rows=layout.MAX_ROWS)),
    "one wide row": (SPARSE, sizes(1 << 26)),
    "a row as wide as its region": (SPARSE, sizes(1 << 37)),
    "more than it reserved": (SPARSE, sizes(3, rows=20_000_000, reserved=None)),
    "reserved only": (SPARSE, sizes(3, rows=3, reserved=layout.REGION_SPAN)),
    "a dense array of 512 MiB": (DOUBLES, sizes(1 << 26, rows=0)),
    "a dense array as large as its region": (DOUBLES, sizes(1 << 18, 1 << 19, rows=0)),
    "a large undo log": (SPARSE, UndoLog(((0, 1 << 15, 0),), 1 << 40, layout.REGION_SPAN, 1 << 40)),
    "an undo log that is read": (SPARSE, UndoLog(((0, 1 << 15, 0),) * 3, 3, None, 0)),
    "what is kept for others": (SPARSE, SetField("kept_free", "word", 0xDCF9 << 48 | 1 << 40)),
    "processes": (SPARSE, SetField("participants_top", "word", (1 << 32) - 1)),
    "takes": (SPARSE, SetField("queue", "top", (1 << 32) - 1)),
    "dimensions of the declared shape": (SPARSE, Directory("declared_rank", 1 << 31)),
    "dimensions of the round": (SPARSE, SetField("shape", "rank", 1 << 60, number=0)),
    "the name of a member": (SPARSE, Directory("name_length", (1 << 32) - 1)),
    "its directory": (SPARSE, SetField("config", "directory_bytes", 1 << 20)),
    "members": (SPARSE, SetField("config", "members", 4096)),
    "lanes": (SPARSE, SetField("config", "lanes", 32)),
    "its name's length": (SPARSE, SetField("config", "name_length", (1 << 32) - 1)),
}
NEVER: Final = {"MemoryError", "ResourceExhaustedError"}


@pytest.fixture(scope="module")
def poor() -> Iterator[Victim]:
    """Yield a victim that has 48 MiB of address space for segments and all calls."""
    made = Victim(48 * MIB)
    yield made
    made.end()


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer itself needs all address space")
@pytest.mark.parametrize("claim", CLAIMS)
def test_no_call_allocates_a_size_that_a_segment_only_claims(poor: Victim, claim: str) -> None:
    outcomes = _outcomes(poor, *CLAIMS[claim])
    assert [outcome for outcome in outcomes if outcome.error in NEVER] == []


@pytest.mark.skipif(SANITIZED, reason="AddressSanitizer itself needs all address space")
@pytest.mark.parametrize("scenario", [SPARSE, DOUBLES], ids=["sparse", "dense"])
def test_a_poor_process_has_enough_for_undamaged_segments(poor: Victim, scenario: Scenario) -> None:
    outcomes = poor.outcomes(replace(scenario, attached=False))
    assert [outcome for outcome in outcomes if outcome.error in NEVER | {"DataLossError"}] == []


# --- parameters ----------------------------------------------------------------------------------


def _apply_beside_many(*, pipe: Pipe) -> str:
    rows = np.arange(100_000)
    with shmacc.SparseConditionalAccumulator("f4", None, "many") as acc:
        acc.apply_grad(rows, np.ones((rows.size, 1), np.float32))
        pipe.turn(names.segment_name("many").path)
        with pytest.raises(errors.DataLossError, match="index is full"):
            acc.apply_grad(rows + rows.size, np.ones((rows.size, 1), np.float32))
    return "ended"


def test_a_full_index_is_searched_once_and_not_for_each_row() -> None:
    with Apart(_apply_beside_many, shm=SHM_BYTES) as victim:
        with SegmentFile(f"/proc/{victim.pid}/root{victim.hear(PATIENCE)}") as file:
            FullIndex().do(file, file)
        victim.say()
        assert victim.result(PATIENCE) == "ended"


def _saved(member: int, entries: int, listed: int, *regions: tuple[int, int]) -> bytes:
    return bytes(layout.SavedArray(member, entries, listed, regions))


# Forged undo logs of an update, and the number of entries that the segment claims for each.
JOURNALS: Final = {
    "entries of no bytes": (_saved(0, 1 << 62, 0), 1 << 62),
    "listed entries of no bytes": (_saved(0, 1 << 62, 1), 1 << 62),
    "entries of a byte": (_saved(0, 1 << 62, 0, (1, 1 << 40)), 1 << 62),
    "entries past the last": (_saved(0, 1 << 62, 0, (1, 0)), 1 << 62),
    "arrays without entries": (_saved(0, 0, 0) * 9, 1 << 62),
    "an array of another number": (_saved(MOST, 1, 0), 1),
    "nothing": (b"", 1 << 62),
}

UPDATES: Final[dict[str, Callable[[Parameters, Any], object]]] = {
    "update": lambda params, taken: params.update(taken),
    "state": lambda params, _: params.state(timeout=1),
    "attach": lambda _, __: Parameters.attach("p").close(),
    "check": lambda _, __: inspection.check("p"),
    "load": lambda params, _: shmacc.load(_SAVED, {"p": params}),
}


def _forge(path: str, log: bytes, counted: int) -> None:
    with SegmentFile(path) as file:
        number = file.current("lane")
        state = file.record("lane", number)
        for name in ("undo log", "undo rows"):
            state.reserved[layout.LANE_REGIONS.index(name)] = _PAGE
            file.write(file.table.region(name), bytes(_PAGE))
        file.put("lane", state, number)
        file.write(file.table.region("undo log"), log)
        file.put("journal", layout.Journal(state.generation + 1, counted, 0))


def _use(call: str, *, pipe: Pipe) -> None:
    contents = {"a": np.ones((4, 2), np.float32)}
    with (
        Parameters(contents, "p", optimizer=optim.SGD(1.0)) as params,
        shmacc.ConditionalAccumulator("f4", (4, 2)) as acc,
    ):
        shmacc.save(_SAVED, {"p": params})
        acc.apply_grad(np.ones((4, 2)))
        # The block must not end normally.
        with suppress(ZeroDivisionError), acc.round(1) as taken:
            pipe.turn(names.segment_name("p").path)
            with suppress(errors.DataLossError):
                UPDATES[call](params, taken)
            raise ZeroDivisionError


@pytest.mark.parametrize(("call", "journal"), [
    *((call, "nothing") for call in UPDATES),
    *(("update", journal) for journal in list(JOURNALS)[:-1]),
])  # fmt: skip
def test_every_call_on_parameters_with_a_forged_undo_log_ends(call: str, journal: str) -> None:
    log, counted = JOURNALS[journal]
    with Apart(_use, call, shm=SHM_BYTES) as victim:
        _forge(f"/proc/{victim.pid}/root{victim.hear(PATIENCE)}", log, counted)
        victim.say()
        victim.result(PATIENCE)
