"""Simulates rounds over up to hundreds of hosts, and prints tables; see `shmacc_simulate`."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Final

from shmacc._multihost.messages import Timing
from shmacc_simulate.job import Job
from shmacc_simulate.popularity import Table
from shmacc_simulate.scenario import CLUSTER, MEASURED, Result, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Column = tuple[str, Callable[[Result], str]]

FAST_OWNER: Final = dataclasses.replace(CLUSTER, owner_call=0.1e-3)

ROUNDS: Final = {2: 30, 10: 30, 30: 20, 100: 8, 300: 2}  # by the number of hosts


def sweep() -> list[Scenario]:
    """Return jobs with more and more hosts, and the same with other owners, timing or shards."""
    measured, fast = "the owner as measured", "an owner of 10,000 calls a second"
    chatty, often = "as measured, and no host slows down", Timing(heartbeats=1e6)
    return [
        *(Scenario(measured, n, shards=n, rounds=rounds) for n, rounds in ROUNDS.items()),
        *(Scenario(fast, n, shards=n, rounds=r, machine=FAST_OWNER) for n, r in ROUNDS.items()),
        Scenario(chatty, 100, shards=100, rounds=ROUNDS[100], timing=often),
        Scenario(chatty, 300, shards=300, timing=often, limit=10.0),
        *(Scenario("one shard", n, rounds=3, limit=250.0) for n in ROUNDS),
    ]


def tables() -> list[Scenario]:
    """Return jobs over tables of all sizes and popularities."""
    of = [Table(1_000_000, None)]
    of += [Table(rows, e) for rows in (10**6, 10**8, 10**9) for e in (0.0, 1.0, 1.2)]
    return [Scenario("", 100, shards=100, rounds=2, table=table) for table in of]


def deaths() -> list[Scenario]:
    """Return jobs whose hosts die, with the default lease of 2 s and with 5 s."""
    return [
        Scenario(f"{title}, {lease}", 30, shards=shards, rounds=rounds, deaths=rate, timing=timing)
        for title, shards, rate, rounds in (
            ("none", 30, 0.0, 30),
            ("one death in 20 s", 30, 0.05, 150),
            ("one in 5 s", 30, 0.2, 60),
            ("one in 5 s, and the one shard lives", 1, 0.2, 15),
        )
        for lease, timing in (("lease 2 s", Timing()), ("lease 5 s", Timing(lease=5.0)))
        if rate or lease == "lease 2 s"
    ]


def small() -> Scenario:
    """Return the job that `make bench-ray` measures, too."""
    return Scenario(
        "as measured",
        2,
        4,
        2,
        Table(1_000_000, 0.0),
        need=1.0,
        compute=0.1,
        pause=1.0,
        whole=True,
        machine=MEASURED,
    )


MEASURED_SECONDS: Final = 0.160  # docs/many-hosts.md
BARE_SECONDS: Final = 0.125


def _seconds(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.2f} s"


def _table(result: Result) -> str:
    table = result.scenario.table
    return f"{table.rows:.0e} rows, {table.popularity}".replace("e+0", "e")


def _gain(result: Result) -> str:
    scenario = result.scenario
    gain = scenario.workers * scenario.shipped(1) / scenario.shipped(scenario.workers)
    return f"{gain:.1f} x"


NAME: Final[Column] = ("what differs", lambda r: r.scenario.name)
SHARDS: Final[Column] = ("shards", lambda r: f"{r.scenario.shards}")
COLUMNS: Final[Sequence[Column]] = (
    ("round", lambda r: _seconds(r.seconds)),
    ("GB a round", lambda r: f"{r.gigabytes:.3g}" if r.rounds else "-"),
    ("messages a round", lambda r: f"{r.messages:,.0f}" if r.rounds else "-"),
    ("gradients a round", lambda r: f"{r.gradients:,.0f}" if r.rounds else "-"),
)
HOSTS: Final[Sequence[Column]] = (
    NAME,
    ("hosts x workers", lambda r: f"{r.scenario.hosts} x {r.scenario.workers}"),
    SHARDS,
    *COLUMNS,
    ("refused as late", lambda r: f"{r.late:.0%}" if r.rounds else "-"),
)
TABLES: Final[Sequence[Column]] = (
    ("table", _table),
    *COLUMNS,
    ("gain of adding up first", _gain),
    ("rows of the mean", lambda r: f"{r.scenario.shipped(round(r.gradients)) / 1e9:.2g} GB"),
)
DEATHS: Final[Sequence[Column]] = (
    NAME,
    SHARDS,
    ("deaths", lambda r: f"{r.died} in {len(r.rounds)} rounds"),
    *COLUMNS[:2],
    ("worst round", lambda r: _seconds(r.worst)),
    ("refused as late", lambda r: f"{r.late:.0%}"),
    ("accepted, but lost", lambda r: f"{r.lost:.1%}" if r.lost else "0"),
    ("grants withdrawn, batches lost", lambda r: f"{r.regrants}"),
    ("void steps", lambda r: f"{r.voided}"),
)


def show() -> None:
    """Simulate everything; print the tables, with "none" where no round ended in time."""
    _print("Hosts", sweep(), HOSTS)
    _print("Tables: 100 hosts and 100 shards", tables(), TABLES)
    _print("Deaths: 30 hosts, one is away for 5 s with all that was on it", deaths(), DEATHS)
    one = Job(small()).run()
    print(
        f"The cluster that was measured: {one.latency * 1e3:.0f} ms simulated, "
        f"{MEASURED_SECONDS * 1e3:.0f} ms measured, {BARE_SECONDS * 1e3:.0f} of them transfers; "
        f"{one.gigabytes * 1e3:.0f} MB from one host to the other"
    )


def _print(title: str, scenarios: Iterable[Scenario], columns: Sequence[Column]) -> None:
    print(f"## {title}\n")
    print("| " + " | ".join(name for name, _ in columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for scenario in scenarios:
        result = Job(scenario).run()
        print("| " + " | ".join(shown(result) for _, shown in columns) + " |", flush=True)
    print()


if __name__ == "__main__":
    logging.getLogger("shmacc").setLevel(logging.ERROR)  # void steps are in the tables
    show()
