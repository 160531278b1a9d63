"""Machines, owners and chiefs fail in any order: copies stay one line, and rounds go on."""

import logging
import os
from collections.abc import Callable

import pytest
from helpers.copies.faults import Faults
from helpers.copies.world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.threads

# A longer run: SHMACC_COPIES_EXAMPLES=2000 pytest tests/multihost/test_copies_in_a_world.py
EXAMPLES = int(os.environ.get("SHMACC_COPIES_EXAMPLES", "40"))

KINDS = {
    "messages": Faults(drop=0.2, double=0.2, late=0.1),
    "actors": Faults(actors=2, drop=0.05),
    "silent": Faults(freezes=0.4, islands=0.4),
    "pairs": Faults(pairs=1, slow=0.1),
    "returns": Faults(reboots=0.3, losses=0.1, islands=0.3),
    "owners": Faults(owners=0.6, islands=0.4, drop=0.1),
    "chiefs": Faults(chiefs=0.2, raises=0.3, owners=0.1, drop=0.05),
    "restores": Faults(restores=0.3, double=0.2, late=0.1, actors=0.5),
    "differs": Faults(differs=0.1, actors=0.3, owners=0.1),
    "errors": Faults(errors=0.1, slow=0.1, chiefs=0.05),
    "zombies": Faults(zombies=0.3, actors=0.5, late=0.05),
    "advances": Faults(advances=1, late=0.05),
    "everything": Faults(
        drop=0.05, double=0.1, late=0.03, slow=0.03, errors=0.02, differs=0.01, chiefs=0.05,
        raises=0.1, restores=0.05, actors=0.3, freezes=0.15, islands=0.1, pairs=0.2, reboots=0.1,
        losses=0.05, owners=0.1, zombies=0.05, advances=0.1,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "shmacc")


def live_through(world: World, seconds: float = 4) -> None:
    """Inject faults for a while; then rounds must go on, and all machines get back in line."""
    world.run(seconds)
    world.troubles.heal()
    comes(world, 60, rounds(world, 3))
    comes(world, 30, world.are_in_line)
    world.troubles.break_one()
    comes(world, 25, rounds(world, 3))
    world.troubles.heal()
    world.trains = False
    comes(world, 20, world.are_in_line)


def rounds(world: World, number: int) -> Callable[[], bool]:
    """Return what says whether so many more rounds are over."""
    enough = len(world.rounds) + number
    return lambda: len(world.rounds) >= enough


def comes(world: World, seconds: float, until: Callable[[], bool]) -> None:
    world.run(seconds, until=until)
    assert until(), f"stuck: {until} {world}"


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_goes_wrong_copies_are_one_line(kind: str) -> None:
    for seed in range(3):
        live_through(World(seed, faults=Faults(**vars(KINDS[kind]))))


@given(
    seed=st.integers(0, 2**32),
    kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    machines=st.integers(1, 4),
    chiefs=st.integers(1, 3),
    part=st.sampled_from([1.0, 0.5, 0.1]),
    follows=st.booleans(),
    contributors=st.booleans(),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 40,  # CI's run is the same each time; the longer one looks further
    suppress_health_check=list(HealthCheck),
)
def test_random_mixtures(
    seed: int,
    kinds: set[str],
    machines: int,
    chiefs: int,
    part: float,
    *,
    follows: bool,
    contributors: bool,
) -> None:
    mixed = {name: max(getattr(KINDS[kind], name) for kind in kinds) for name in vars(Faults())}
    world = World(
        seed,
        machines=machines,
        chiefs=chiefs,
        required=max(1, int(machines * 2 * part)),
        contributors=contributors,
        # True: workers wait for the next step after each gradient.
        follows=follows,
        faults=Faults(**mixed),
    )
    live_through(world, 5)
