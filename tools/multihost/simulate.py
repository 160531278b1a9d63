"""Simulates what a round with its update costs over 10 to 300 hosts, and prints a table."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final

from shmacc_hosts.costs import ROW_BYTES, Costs, Scenario
from shmacc_hosts.in_time import InTime

ROUNDS: Final = {10: 5, 100: 2, 300: 1}  # by number of hosts: how many rounds count
TOUCHED: Final = 500, 20_000
COLUMNS: Final = (
    *("hosts", "MB of an update", "round without", "with it", "with it, at best"),
    *("put", "pull", "pull at best", "check", "making", "messages"),
    *(
        "GB out of the chief's node",
        "GB at best",
        "GB without",
        "at a time",
        "owner's calls",
        "without",
    ),
)


def line(scenario: Scenario) -> list[str]:
    """Simulate a job in three ways; return a line of the table."""
    ways = scenario, replace(scenario, shared=True), replace(scenario, updates=False)
    ray, best, without = (InTime(each).finish() for each in ways)
    update = best.update
    seconds = [without.seconds, ray.seconds, best.seconds, update.put, ray.update.pull, *update[1:]]
    return [
        f"{scenario.hosts}",
        f"{scenario.update * ROW_BYTES / 1e6:.0f}",
        *(f"{each:.3f}" for each in seconds),
        *(f"{each.out / 1e9:.2g}" for each in (ray, best, without)),
        f"{ray.most / 1e9:.2g}",
        *(f"{each.calls:,.0f}" for each in (best, without)),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabits", type=float, default=25, help="a second, of each host's NIC")
    given = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "| ---: " * len(COLUMNS) + "|")
    costs = Costs(bandwidth=given.gigabits * 1e9 / 8)
    for touched in TOUCHED:
        for hosts, rounds in ROUNDS.items():
            scenario = Scenario(hosts, touched=touched, rounds=rounds, costs=costs)
            print("| " + " | ".join(line(scenario)) + " |", flush=True)


if __name__ == "__main__":
    main()
