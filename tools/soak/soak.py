"""Kills workers and takers at random, for long, and keeps the books. See ``--help``."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final

# One NumPy thread in each process: the processes keep all cores busy.
# NumPy reads this when it is first imported, which the next line does.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from shmacc import testing
from shmacc_soak.books import Count, Findings
from shmacc_soak.campaign import Campaign
from shmacc_soak.plans import plans
from shmacc_soak.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS: Final = 3
PATIENCE: Final = 2.0  # seconds: the longest wait of a living process


def main() -> int:
    """Kill workers and takers at random, replace them, and keep the books.

    Campaign follows upon campaign, each with another kind of accumulator; workers fail, too, and
    half of the runs are finished. The last kind trains parameters, with chiefs that are killed in
    updates, saves and loads. Ends with status 1 if a gradient was torn, lost or doubled, if a round
    is in the parameters twice or not at all, if they are not those of one process alone to the bit,
    if the library's counters disagree with the books, if a death or a failure was told twice, or
    not at all, or if a living process waited for longer than 2 s.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, help="how long, in all (default: %(default)s)")
    add("--each", type=float, default=10.0, help="how long a campaign is, at most")
    add("--training", action="store_true", help="train parameters, nothing else")
    add("--seed", type=int, default=random.randrange(2**32), help="of whom is killed when")
    asked = parser.parse_args()
    random.seed(asked.seed)
    kinds: list[Callable[[], Campaign | Training]] = [partial(Training, WORKERS)]
    if not asked.training:
        kinds[:0] = [partial(Campaign, plan) for plan in plans(WORKERS)]
    rounds = max(1, round(asked.seconds / asked.each / len(kinds)))
    total = Findings()
    with testing.isolated_namespace() as namespace:
        start = time.monotonic()
        for number in range(rounds * len(kinds)):
            left = start + asked.seconds - time.monotonic()
            campaign = kinds[number % len(kinds)]()
            found = campaign.run(max(left / (rounds * len(kinds) - number), 0.1))
            print(f"{campaign.title}: {_in_words(found)}", file=sys.stderr)
            total += found
        leaked = testing.leaked_names(namespace)
    print(f"{time.monotonic() - start:.0f} s, seed {asked.seed}")
    for what in Count:
        print(f"{what.value:<45}{total.counts[what]:>15,}")
    for waited, longest in total.longest.items():
        print(f"{f'longest wait {waited}':<45}{longest * 1e3:>12,.0f} ms")
    if leaked:
        print(f"left in /dev/shm: {leaked}", file=sys.stderr)
    return 1 if total.faults or _longest(total) > PATIENCE or leaked else 0


def _in_words(found: Findings) -> str:
    said = Count.KILLED, Count.ACCEPTED, Count.TAKES
    numbers = "".join(f"{what} {found.counts[what]}, " for what in said)
    return f"{numbers}faults {found.faults}, longest wait {_longest(found) * 1e3:.0f} ms"


def _longest(found: Findings) -> float:
    return max(found.longest.values(), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
