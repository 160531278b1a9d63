"""Nothing from a segment is trusted: whatever stands in it, calls end in a result or an error.

Never in a signal, never in a hang, never in a write to anything else. Hypothesis thinks of damage;
the victim of it is a process of its own (every_call.py). SHMACC_FUZZ_EXAMPLES makes it look longer.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import needs_own_shm
from helpers.damage import several
from helpers.every_call import Scenario, Victim
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    max_examples=EXAMPLES or 60,
    # The short slice is the same every time; a long look is a new one each time.
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(scenario=scenarios, how=st.sampled_from(HOW), damages=several())
def test_damaged(
    victim: Victim, scenario: Scenario, how: dict[str, bool], damages: list[Any]
) -> None:
    """At rest, while attached, and while a take waits."""
    outcomes = victim.outcomes(replace(scenario, **how), *damages)  # type: ignore[arg-type]
    assert [outcome for outcome in outcomes if not outcome.fine] == []


@pytest.mark.parametrize("kind", ["sparse", "dense", "group"])
def test_undamaged(victim: Victim, kind: str) -> None:
    """What the calls come to when nothing is wrong: else the rest would prove little."""
    for attached, lanes in (True, 1), (False, 3):
        scenario = Scenario(kind, attached=attached, lanes=lanes, contributors=True)
        outcomes = victim.outcomes(scenario)
        assert [outcome for outcome in outcomes if not outcome.fine] == []
        ends = Counter(outcome.error for outcome in outcomes)
        assert ends[""] > 20
        assert not ends["DataLossError"]
