"""Messages and hosts fail in any order: rounds over many hosts stay correct, and go on."""

import os

import pytest
from helpers.multihost_actors import TIMING
from helpers.multihost_world import Faults, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.threads

# A longer run: SHMACC_MULTIHOST_EXAMPLES=2000 pytest tests/multihost/test_random_schedules.py
EXAMPLES = int(os.environ.get("SHMACC_MULTIHOST_EXAMPLES", "12"))

KINDS = {
    "messages": Faults(drop=0.2, double=0.2, late=0.1),
    "forwarders": Faults(drop=0.05, double=0.1, late=0.02, forwarders=2),
    "hosts": Faults(hosts=0.5),
    "links": Faults(links=0.5),
    "reboots": Faults(reboots=0.5),
    "shards": Faults(shards=3),
    "owners": Faults(owners=0.5),
    "chiefs": Faults(chiefs=0.2, raises=0.3, drop=0.05),
    "moves": Faults(moves=1),
    "zombies": Faults(zombies=0.2),
    "steps": Faults(steps=2, forwarders=1),
    "advances": Faults(advances=2, drop=0.1, double=0.1, late=0.05),
    "everything": Faults(
        drop=0.1, double=0.1, late=0.05, forwarders=0.5, hosts=0.2, reboots=0.2, shards=0.5,
        owners=0.1, chiefs=0.05, raises=0.1, moves=0.3, zombies=0.05, steps=0.2,
    ),
}  # fmt: skip


def live_through(world: World, seconds: float = 4) -> None:
    """Inject faults for a while; then rounds must go on. The world checks each round."""
    world.run(seconds)
    world.heal()
    world.run(6)  # leases end, forwarders come back
    before = len(world.rounds)
    world.run(10, until=lambda: len(world.rounds) >= before + 3)
    assert len(world.rounds) >= before + 3, f"stuck: {world.owner.hosts()} {world.owner.counters}"


def test_without_faults_a_round_has_every_accepted_gradient() -> None:
    world = World(0, hosts=4, workers=2)
    world.run(10)
    assert len(world.rounds) > 20
    assert world.lost() == []
    assert [step for step, _ in world.rounds] == list(range(len(world.rounds)))


@pytest.mark.parametrize("pairs", [[(1, 2)], [(1, 3)], [(1, 2), (1, 3), (2, 3)]])
def test_rounds_go_on_while_links_between_hosts_are_cut(pairs: list[tuple[int, int]]) -> None:
    """All hosts reach the owner, which is on host 0. Host 3 has no gradients of its own."""
    world = World(0, hosts=4, shards=4, required=9)
    for worker in world.workers:
        worker.alive = worker.host.name != "host3"
    world.run(2)
    world.cuts = {frozenset({f"host{one}", f"host{two}"}) for one, two in pairs}
    for seconds in TIMING.expiry + 2, 9 * TIMING.expiry:
        before = len(world.rounds)
        world.run(seconds)
        assert len(world.rounds) > before + 3
    assert world.owner.counters.withdrawn == 1
    world.cuts.clear()
    world.run(2 * TIMING.expiry)
    assert set(world.owner._hosts.shard_hosts(4, world.now)) == {h.name for h in world.hosts}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_goes_wrong_rounds_are_sound_and_go_on(kind: str) -> None:
    """If only messages, shards or chiefs are lost, every accepted gradient is in a round.

    Only `advance_step` may drop gradients.
    """
    loses_nothing = kind in {"messages", "shards", "chiefs", "advances"}
    world = World(3 if loses_nothing else 0, faults=Faults(**vars(KINDS[kind])))
    live_through(world)
    if loses_nothing:
        assert world.lost() == []
        assert (world.happened["advances"] > 0) == (kind == "advances")


@given(
    seed=st.integers(0, 2**32),
    kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    hosts=st.integers(1, 4),
    shards=st.integers(1, 3),
    part=st.sampled_from([1.0, 0.5]),
    follows=st.booleans(),
    contributors=st.booleans(),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 12,  # CI's run is the same each time; the longer one looks further
    suppress_health_check=list(HealthCheck),
)
def test_random_schedules(
    seed: int,
    kinds: set[str],
    hosts: int,
    shards: int,
    part: float,
    *,
    follows: bool,
    contributors: bool,
) -> None:
    mixed = {name: max(getattr(KINDS[kind], name) for kind in kinds) for name in vars(Faults())}
    required = max(1, int(hosts * 2 * part))
    world = World(
        seed,
        hosts=hosts,
        workers=2,
        shards=shards,
        required=required,
        contributors=contributors,
        # True: workers wait for the next step after each gradient.
        follows=follows,
        faults=Faults(**mixed),
    )
    live_through(world, 3)
