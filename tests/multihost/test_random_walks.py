"""Messages, machines, owners and chiefs fail in any order; rounds stay sound and go on.

Guards shmacc/_multihost: the whole protocol, with parameters and without.
"""

import logging
import os
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmacc_hosts.machine import Worker
from shmacc_hosts.walk import AtRandom
from shmacc_hosts.world import TIMING, World

pytestmark = pytest.mark.threads

# A longer run: SHMACC_WALKS=2000 pytest tests/multihost/test_random_walks.py
EXAMPLES = int(os.environ.get("SHMACC_WALKS", "25"))

Rates = Mapping[str, float]

WITHOUT_COPIES: dict[str, Rates] = {
    "messages": {"drop": 0.2, "double": 0.2, "late": 0.1},
    "actors": {"actor": 2, "drop": 0.05, "double": 0.1, "late": 0.02},
    "silent": {"silent": 0.5, "frozen": 0.2},
    "pairs": {"pair": 0.5},
    "returns": {"lost": 0.4},
    "shards": {"shards": 3},
    "owners": {"owner": 0.5},
    "chiefs": {"chief": 0.4, "raise": 0.3, "drop": 0.05},
    "moves": {"move": 1},
    "twins": {"twin": 0.2},
    "steps": {"same_step": 2, "actor": 1},
    "advances": {"advance": 2, "drop": 0.1, "double": 0.1, "late": 0.05},
    "everything": {
        "drop": 0.1, "double": 0.1, "late": 0.05, "actor": 0.5, "silent": 0.2, "lost": 0.1,
        "shards": 0.5, "owner": 0.1, "chief": 0.1, "raise": 0.1, "move": 0.3, "twin": 0.05,
        "same_step": 0.2,
    },
}  # fmt: skip
WITH_COPIES: dict[str, Rates] = {
    "messages": WITHOUT_COPIES["messages"],
    "actors": {"actor": 2, "drop": 0.05},
    "silent": {"frozen": 0.4, "silent": 0.4},
    "pairs": {"pair": 1, "slow": 0.1},
    "returns": {"lost": 0.4, "silent": 0.3},
    "owners": {"owner": 0.6, "silent": 0.4, "drop": 0.1},
    "chiefs": {"chief": 0.3, "raise": 0.3, "owner": 0.1, "drop": 0.05},
    "restores": {"restore": 0.3, "double": 0.2, "late": 0.1, "actor": 0.5},
    "differs": {"differs": 0.1, "actor": 0.3, "owner": 0.1},
    "refusals": {"refuse": 0.1, "slow": 0.1, "chief": 0.1},
    "moves": {"move": 1, "actor": 0.3},
    "twins": {"twin": 0.2, "owner": 0.1},
    "zombies": {"zombie": 0.3, "actor": 0.5, "late": 0.05},
    "advances": {"advance": 1, "late": 0.05},
    "everything": {
        "drop": 0.05, "double": 0.1, "late": 0.03, "slow": 0.03, "refuse": 0.02, "differs": 0.01,
        "chief": 0.1, "raise": 0.1, "restore": 0.05, "actor": 0.3, "frozen": 0.15, "silent": 0.1,
        "pair": 0.2, "lost": 0.15, "owner": 0.1, "zombie": 0.05, "advance": 0.1, "shards": 0.1,
        "move": 0.1, "twin": 0.05,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "shmacc")


def live_through(walk: AtRandom, seconds: float = 4) -> None:
    """Let faults strike for a while; then rounds must go on, and all copies become equal."""
    world = walk.world
    walk.run(seconds)
    walk.run(8, lambda: world.rounds >= 5)  # so that faults strike in several rounds
    walk.heal()
    comes(walk, 60, rounds(world, 3))
    if world.copies:
        comes(walk, 30, world.are_in_line)
    walk.break_one()
    comes(walk, 25, rounds(world, 3))
    walk.heal()
    if world.copies:
        world.last_step = 0  # chiefs ask for no more rounds
        comes(walk, 20, world.are_in_line)


def rounds(world: World, number: int) -> Callable[[], bool]:
    """Return a function that says whether `number` more rounds are over."""
    enough = world.rounds + number
    return lambda: world.rounds >= enough


def comes(walk: AtRandom, seconds: float, until: Callable[[], bool]) -> None:
    walk.run(seconds, until)
    assert until(), f"stuck: {until} {walk.world}"


def test_without_faults_a_round_has_every_accepted_gradient() -> None:
    world = World(hosts=4, required=8, copies=False)
    AtRandom(world, 0, {}).run(10)
    assert world.rounds > 20
    assert world.lost() == []
    assert world.owners[-1].step == world.rounds


@pytest.mark.parametrize("pairs", [[(1, 2)], [(1, 3)], [(1, 2), (1, 3), (2, 3)]])
def test_rounds_go_on_while_links_between_hosts_are_cut(pairs: list[tuple[int, int]]) -> None:
    """All hosts reach the owner, which is on host 0. Host 3 has no gradients of its own."""
    world = World(hosts=4, workers=3, shards=4, required=9, leaders=1, copies=False)
    world.machines[3].workers = []
    walk = AtRandom(world, 0, {})
    walk.run(2)
    world.cuts, world.faults.last = frozenset(pairs), True
    for seconds in TIMING.expiry + 2, 9 * TIMING.expiry:
        before = world.rounds
        walk.run(seconds)
        assert world.rounds > before + 3
    owner = world.owners[-1]
    assert owner.counters.withdrawn == 1
    world.cuts = frozenset()
    walk.run(2 * TIMING.expiry)
    assert set(owner._hosts.shard_hosts(4, world.now)) == {m.name for m in world.machines}


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("machines", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_processes_that_apply_as_one_contributor_are_reported_to_the_chief(
    seed: int, machines: int, *, copies: bool
) -> None:
    """A round needs all workers' gradients, and each machine has a worker of each contributor."""
    world = World(hosts=machines, leaders=1, required=2 * machines, copies=copies)
    for machine in world.machines:
        machine.workers = [Worker(0), Worker(1)]
    walk = AtRandom(world, seed, {})
    comes(walk, 30, lambda: world.happened["conflicts"] > 0)
    [owner] = world.owners
    assert (owner.counters.voided, owner.counters.rounds) == (2, 0)


@pytest.mark.parametrize("kind", WITHOUT_COPIES)
def test_whatever_goes_wrong_rounds_are_sound_and_go_on(kind: str) -> None:
    """If only messages, shards or chiefs are lost, every accepted gradient is in a round.

    Gradients that `advance_step` drops are not counted as lost.
    """
    world = World(workers=3, required=9, copies=False, leaders=1)
    live_through(AtRandom(world, 0, WITHOUT_COPIES[kind]))
    if kind in {"messages", "shards", "chiefs", "advances"}:
        assert world.lost() == []
        assert (world.happened["advance"] > 0) == (kind == "advances")


@pytest.mark.parametrize("kind", WITH_COPIES)
def test_whatever_goes_wrong_all_copies_get_the_same_updates(kind: str) -> None:
    for seed in range(3):
        live_through(AtRandom(World(), seed, WITH_COPIES[kind]))


@given(
    seed=st.integers(0, 2**32),
    copies=st.booleans(),
    kinds=st.sets(st.sampled_from(sorted(WITH_COPIES)), min_size=1, max_size=4),
    machines=st.integers(1, 4),
    chiefs=st.integers(1, 3),
    shards=st.integers(1, 3),
    part=st.sampled_from([1.0, 0.5, 0.1]),
    follows=st.booleans(),
    contributors=st.booleans(),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 25,  # CI's run is the same each time; the longer one looks further
    suppress_health_check=list(HealthCheck),
)
def test_rounds_and_copies_stay_sound_under_random_mixtures_of_faults(
    seed: int,
    kinds: set[str],
    machines: int,
    chiefs: int,
    shards: int,
    part: float,
    *,
    copies: bool,
    follows: bool,
    contributors: bool,
) -> None:
    known = WITH_COPIES if copies else WITHOUT_COPIES
    rates: dict[str, float] = {}
    for kind in sorted(kinds & known.keys()):
        rates |= {name: max(rate, rates.get(name, 0.0)) for name, rate in known[kind].items()}
    world = World(
        hosts=machines,
        leaders=chiefs,
        shards=shards,
        required=max(1, int(machines * 2 * part)),
        copies=copies,
        contributors=contributors,
        follows=follows,
    )
    live_through(AtRandom(world, seed, rates), 5)
