"""A small segment that claims to be a huge one costs nobody memory, whoever looks or attaches.

All its sizes agree with each other, and its checksums are right. Every public call is made on it
in a process that may use a little address space only: a result that was allocated because the
segment claims so much would be a MemoryError there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from helpers import every_call
from helpers import segment_layout as layout
from helpers.apart import Apart, needs_own_shm
from helpers.damage import Directory, SetField, Sizes, UndoLog
from helpers.every_call import PATIENCE, SHM_BYTES, Outcome, Scenario
from helpers.segment_file import SegmentFile
from helpers.support import SANITIZED

if TYPE_CHECKING:
    from helpers.damage import Damage

pytestmark = [
    needs_own_shm,
    pytest.mark.skipif(
        SANITIZED, reason="AddressSanitizer itself needs all the address space there is"
    ),
]

MIB: Final = 1 << 20
# For attaching to a few, whose tables are 5 MiB each, and for what calls are given and hand out.
ADDRESS_SPACE: Final = 48 * MIB
SMALL: Final = 300 << 10
NEVER: Final = {"MemoryError", "ResourceExhaustedError"}

SPARSE: Final = Scenario("sparse", shape=(3,), applies=3)
DENSE: Final = Scenario("dense", dtype="float64", shape=(3,), applies=3)


def sizes(*dims: int, rows: int = 1, reserved: int | None = layout.REGION_SPAN) -> Sizes:
    """So many rows of that shape, with an index that has room for them."""
    return Sizes(rows, dims, reserved, buckets=-(-rows // 10), count=3)


CLAIMS: Final[dict[str, tuple[Scenario, Damage]]] = {
    "2 million rows": (SPARSE, sizes(3, rows=2_000_000, reserved=64 * MIB)),
    "20 million rows": (SPARSE, sizes(3, rows=20_000_000)),
    "20 million empty rows": (SPARSE, sizes(0, rows=20_000_000)),
    "as many rows as there may be": (SPARSE, sizes(rows=layout.MAX_ROWS)),
    "one wide row": (SPARSE, sizes(1 << 26)),
    "a row as wide as its region": (SPARSE, sizes(1 << 37)),
    "more than it reserved": (SPARSE, sizes(3, rows=20_000_000, reserved=None)),
    "reserved only": (SPARSE, sizes(3, rows=3, reserved=layout.REGION_SPAN)),
    "a dense array of 512 MiB": (DENSE, sizes(1 << 26, rows=0)),
    "a dense array as large as its region": (DENSE, sizes(1 << 18, 1 << 19, rows=0)),
    "a large undo log": (SPARSE, UndoLog(((0, 1 << 15, 0),), 1 << 40, layout.REGION_SPAN, 1 << 40)),
    "an undo log that is read": (SPARSE, UndoLog(((0, 1 << 15, 0),) * 3, 3, None, 0)),
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


def outcomes_of(scenario: Scenario, *damages: Damage) -> list[Outcome]:
    """How every call ended after the damage."""
    with Apart(every_call.serve, ADDRESS_SPACE, shm=SHM_BYTES) as poor:
        poor.say(scenario)
        root = Path(f"/proc/{poor.pid}/root")
        victim, other = (root / path[1:] for path in poor.hear(PATIENCE))
        assert victim.stat().st_blocks * 512 < SMALL
        with SegmentFile(victim) as file, SegmentFile(other) as another:
            for damage in damages:
                damage.do(file, another)
        poor.say()
        outcomes: list[Outcome] = poor.hear(PATIENCE)
        poor.say(None)
        poor.result(PATIENCE)
    return outcomes


@pytest.mark.parametrize("attached", [False, True], ids=["at rest", "while attached"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_nothing_is_allocated_for_a_claim(claim: str, *, attached: bool) -> None:
    scenario, damage = CLAIMS[claim]
    scenario = Scenario(**(vars(scenario) | {"attached": attached}))
    outcomes = outcomes_of(scenario, damage)
    assert [outcome for outcome in outcomes if outcome.error in NEVER] == []


@pytest.mark.parametrize("scenario", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_what_it_has_is_enough_for_those_that_claim_nothing(scenario: Scenario) -> None:
    outcomes = outcomes_of(Scenario(**(vars(scenario) | {"attached": False})))
    assert [outcome for outcome in outcomes if outcome.error in NEVER | {"DataLossError"}] == []
