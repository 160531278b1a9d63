"""The command line of the soak."""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from shmacc import testing
from shmacc_soak.books import FAULTS, Count, Findings
from shmacc_soak.campaign import Campaign, Effort
from shmacc_soak.plans import plans
from shmacc_soak.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable


def main(arguments: list[str] | None = None) -> int:
    """Kill workers and takers at random, replace them, and keep the books.

    Campaign follows upon campaign, each with another kind of accumulator; workers fail, too, and
    half of the runs are finished. The last kind trains parameters, with chiefs that are killed in
    updates, saves and loads. Ends with status 1 if a gradient was torn, lost or doubled, if a round
    is in the parameters twice or not at all, if they are not those of one process alone to the bit,
    if the library's counters disagree with the books, if a death or a failure was told twice, or
    not at all, or if a living process waited for longer than --patience.
    """
    asked = _asked(arguments)
    random.seed(asked.seed)
    effort = Effort(asked.workers, asked.takers, asked.pause)
    kinds: list[Callable[[], Campaign | Training]] = [
        partial(Campaign, plan, effort) for plan in plans(asked.workers)
    ]
    kinds += [partial(Training, effort)]
    if asked.training:
        kinds = kinds[-1:]
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
    print(_table(total))
    if leaked:
        print(f"left in /dev/shm: {leaked}", file=sys.stderr)
    return 1 if total.faults or _longest(total) > asked.patience or leaked else 0


def _asked(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)

    def add(name: str, kind: type, default: float, what: str, at_least: float = 0) -> None:
        def checked(text: str) -> float:
            number: float = kind(text)
            if not number >= at_least:
                raise argparse.ArgumentTypeError(f"expected at least {at_least}, got {text}")
            return number

        checked.__name__ = kind.__name__  # argparse names it where a text is no number
        shown = f"{what} (default: {default})"
        parser.add_argument(f"--{name}", type=checked, default=default, help=shown)

    add("seconds", float, 600.0, "how long, in all", 0.1)
    add("each", float, 10.0, "how long a campaign is, at most", 0.1)
    add("workers", int, 3, "processes that apply", 1)
    add("takers", int, 2, "processes that take", 1)
    add("pause", float, 4e-3, "seconds between kills, on average", 1e-4)
    parser.add_argument("--training", action="store_true", help="train parameters, nothing else")
    add("patience", float, 2.0, "the longest wait of a living process")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="of whom is killed when"
    )
    return parser.parse_args(arguments)


def _in_words(found: Findings) -> str:
    said = Count.KILLED, Count.ACCEPTED, Count.TAKES
    numbers = "".join(f"{what} {found.counts[what]}, " for what in said)
    return f"{numbers}faults {found.faults}, longest wait {_longest(found) * 1e3:.0f} ms"


def _longest(found: Findings) -> float:
    return max(found.longest.values(), default=0.0)


def _table(found: Findings) -> str:
    lines = [(what.value, f"{found.counts[what]:,}") for what in Count]
    lines += [(f"longest wait {what}", f"{at * 1e3:,.0f} ms") for what, at in found.longest.items()]
    shown = [f"{what:<45}{figure:>15}" for what, figure in lines]
    shown += [f"{what}: {means}" for what, means in FAULTS.items() if found.counts[what]]
    return "\n".join(shown)
