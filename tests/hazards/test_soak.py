"""Workers, takers and chiefs are killed at random, while the test keeps books of its own.

No gradient may be torn, lost or doubled. Each round is in the parameters exactly once. The
library's counters must agree with the books. Each death and failure is reported once. No living
process waits for long. `make soak` runs this for SOAK_SECONDS, which the kinds share.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from helpers.soak_campaigns import Campaign
from helpers.soak_plans import plans
from helpers.soak_training import Training

pytestmark = pytest.mark.beyond_asan

WORKERS: Final = 3
PATIENCE: Final = 2.0  # seconds: the longest wait of a living process
EACH: Final = 10.0  # seconds: a campaign's length in a long soak
KINDS: Final[dict[str, Callable[[], Any]]] = {
    **{plan.title: partial(Campaign, plan) for plan in plans(WORKERS)},
    "training": partial(Training, WORKERS),
}
SECONDS: Final = float(os.environ.get("SOAK_SECONDS", "5")) / len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_is_lost_or_doubled_whoever_is_killed(kind: str) -> None:
    seed = random.randrange(2**32)
    random.seed(seed)
    counts: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for _ in range(campaigns := max(1, round(SECONDS / EACH))):
        found = KINDS[kind]().run(SECONDS / campaigns)
        assert not found.faults, (seed, found)
        assert max(found.longest.values(), default=0.0) <= PATIENCE, (seed, found.longest)
        counts += found.counts
        longest = {what: max(at, longest.get(what, 0.0)) for what, at in found.longest.items()}
    waits = [f"longest wait {what} {at:.3f} s" for what, at in longest.items()]
    print(kind, *[f"{what} {count}" for what, count in counts.items()], *waits, sep="\n  ")  # noqa: T201
