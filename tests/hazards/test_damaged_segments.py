"""Nothing from a segment is trusted: whatever stands in it, calls end in a result or an error.

Never in a signal, never in a hang, never in a write to anything else. Hypothesis thinks of damage;
the victim of it is a process of its own (every_call.py). SHMACC_FUZZ_EXAMPLES makes it look longer.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers import every_call
from helpers.apart import Apart, needs_own_shm
from helpers.damage import several
from helpers.every_call import PATIENCE, SHM_BYTES, Outcome, Scenario
from helpers.segment_file import SegmentFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.damage import Damage

pytestmark = needs_own_shm

EXAMPLES: Final = int(os.environ.get("SHMACC_FUZZ_EXAMPLES", "0"))

fuzz = settings(
    max_examples=EXAMPLES or 40,
    # The short slice is the same every time; a long look is a new one each time.
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class Victim:
    """The process that gets the damaged segments; a new one when it has died of one."""

    def __init__(self) -> None:
        """Nobody yet."""
        self._process: Apart | None = None
        self.tally: Counter[str] = Counter()
        self.segments = 0

    def outcomes(self, scenario: Scenario, damages: list[Damage]) -> list[Outcome]:
        """How every call ended after the damage."""
        if self._process is None:
            self._process = Apart(every_call.serve, shm=SHM_BYTES)
        process = self._process
        try:
            process.say(scenario)
            root = f"/proc/{process.pid}/root"
            victim, other = process.hear(PATIENCE)
            with SegmentFile(root + victim) as file, SegmentFile(root + other) as another:
                for damage in damages:
                    damage.do(file, another)
            process.say()
            outcomes: list[Outcome] = process.hear(PATIENCE)
        except BaseException:
            process.kill()
            self._process = None
            raise
        self.segments += 1
        self.tally.update(outcome.error or "result" for outcome in outcomes)
        return outcomes

    def end(self) -> None:
        """Let it see to it that nothing else was written to."""
        if self._process is not None:
            with self._process as process:
                process.say(None)
                process.result(PATIENCE)


@pytest.fixture(scope="module")
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    made = Victim()
    yield made
    made.end()
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        ends = ", ".join(f"{count} {end}" for end, count in made.tally.most_common())
        reporter.write_line(f"\n{made.segments} damaged segments; calls ended in: {ends}")


def check(victim: Victim, scenario: Scenario, *damages: Any) -> Counter[str]:
    """Every call ends well; how often in what."""
    outcomes = victim.outcomes(scenario, list(damages))
    bad = [outcome for outcome in outcomes if not outcome.fine]
    assert not bad
    return Counter(outcome.error or "result" for outcome in outcomes)


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


@fuzz
@given(scenario=scenarios, damages=several())
def test_damaged_at_rest(victim: Victim, scenario: Scenario, damages: list[Any]) -> None:
    check(victim, Scenario(**(vars(scenario) | {"attached": False})), *damages)


@fuzz
@given(scenario=scenarios, damages=several())
def test_damaged_while_attached(victim: Victim, scenario: Scenario, damages: list[Any]) -> None:
    check(victim, scenario, *damages)


@fuzz
@given(scenario=scenarios, damages=several())
def test_damaged_while_a_take_waits(victim: Victim, scenario: Scenario, damages: list[Any]) -> None:
    check(victim, Scenario(**(vars(scenario) | {"waiting": True})), *damages)


def test_undamaged(victim: Victim) -> None:
    """What the calls come to when nothing is wrong: else the rest would prove little."""
    for kind in ("sparse", "dense", "group"):
        for attached in (True, False):
            for lanes in (1, 3):
                scenario = Scenario(kind, attached=attached, lanes=lanes, contributors=True)
                counts = check(victim, scenario)
                assert counts["result"] > 20
                assert not counts["DataLossError"]
