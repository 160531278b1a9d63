"""What `make simulate` simulates, and the page that it writes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from shmacc._multihost.messages import Timing
from shmacc_simulate import report
from shmacc_simulate.job import simulate
from shmacc_simulate.machine import CLUSTER, MEASURED
from shmacc_simulate.popularity import Table
from shmacc_simulate.scenario import Result, Scenario

if TYPE_CHECKING:
    from pathlib import Path

FAST_OWNER: Final = dataclasses.replace(CLUSTER, owner_call=0.1e-3)
RAY: Final = dataclasses.replace(CLUSTER, bandwidth=MEASURED.bandwidth)

_MEASURED, _FAST, _CHATTY, _ONE = (
    "the owner as measured",
    "an owner of 10,000 calls a second",
    "as measured, and no host slows down",
    "one shard",
)


def sweep() -> dict[str, list[Scenario]]:
    """Return jobs of more and more hosts, by what else differs."""
    many = (2, 10, 30, 100, 300)
    chatty = dataclasses.replace(Timing(), heartbeats=1e6)
    return {
        _MEASURED: [Scenario(_MEASURED, n, shards=n, rounds=_rounds(n)) for n in many],
        _FAST: [Scenario(_FAST, n, shards=n, rounds=_rounds(n), machine=FAST_OWNER) for n in many],
        _CHATTY: [
            Scenario(_CHATTY, 100, shards=100, rounds=_rounds(100), timing=chatty),
            Scenario(_CHATTY, 300, shards=300, timing=chatty, limit=10.0),
        ],
        _ONE: [Scenario(_ONE, n, rounds=3, limit=250.0) for n in many],
    }


def _rounds(hosts: int) -> int:
    return {2: 30, 10: 30, 30: 20, 100: 8, 300: 2}[hosts]


def tables() -> list[Scenario]:
    """Return jobs over tables of all sizes and popularities."""
    of = [Table(1_000_000, None)]
    of += [Table(rows, e) for rows in (10**6, 10**8, 10**9) for e in (0.0, 1.0, 1.2)]
    return [Scenario("", 100, shards=100, rounds=2, table=table) for table in of]


def deaths() -> list[Scenario]:
    """Return jobs whose hosts die: with the default lease of 2 s, unless they say otherwise."""
    longer = dataclasses.replace(Timing(), lease=5.0)
    return [
        Scenario(f"{title}, {lease}", 30, shards=shards, rounds=rounds, deaths=rate, timing=timing)
        for title, shards, rate, rounds in (
            ("none", 30, 0.0, 30),
            ("one death in 20 s", 30, 0.05, 150),
            ("one in 5 s", 30, 0.2, 60),
            ("one in 5 s, and the one shard lives", 1, 0.2, 15),
        )
        for lease, timing in (("lease 2 s", Timing()), ("lease 5 s", longer))
        if rate or lease == "lease 2 s"
    ]


def small() -> Scenario:
    """Return the job that is measured, too: `make bench-ray`."""
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


def write(directory: Path) -> None:
    """Simulate everything; write the results and the plots."""
    lines = {title: [_shown(job) for job in jobs] for title, jobs in sweep().items()}
    report.draw(lines, directory)
    by_hosts = [result for results in lines.values() for result in results]
    one = _shown(small())
    columns = (report.SECONDS, report.BYTES, report.MESSAGES, report.GRADIENTS)
    over_tables = [_shown(job) for job in tables()]
    with_deaths = [_shown(job) for job in deaths()]
    bandwidth = [
        _shown(Scenario(name, 100, shards=100, rounds=5, machine=machine))
        for name, machine in (("25 Gb/s", CLUSTER), (f"{RAY.bandwidth * 8e-9:.1f} Gb/s", RAY))
    ]
    ratio = one.latency / MEASURED_SECONDS
    text = f"""# Results of the simulation

Written by `make simulate`; what the words mean is in [Simulation](../simulation.md).

## Hosts

A table of 1e8 rows of 64 float32, Zipf 1.0; a gradient touches 50,000 of them. "None": no round was
over after 10 simulated seconds.

{report.table(by_hosts, (report.NAME, report.HOSTS, report.SHARDS, *columns, report.LATE))}

![Seconds a round](seconds.svg)
![Bytes a round](bytes.svg)
![Messages a round](messages.svg)

## Tables

100 hosts and 100 shards.

{report.table(over_tables, (report.TABLE, *columns, report.GAIN, report.MEAN))}

## Network

100 hosts and 100 shards, the table of the first section.

{report.table(bandwidth, (report.NAME, *columns))}

## Deaths

30 hosts; a host is away for 5 s, and what was on it is gone; its shard is then on another host.

{
        report.table(
            with_deaths,
            (
                report.NAME,
                report.SHARDS,
                report.DIED,
                report.SECONDS,
                report.WORST,
                report.BYTES,
                report.LATE,
                report.LOST,
                report.REGRANTS,
                report.VOIDED,
            ),
        )
    }

## The small cluster

2 hosts of 4 gradients of 50,000 x 64 of 1,000,000 rows, 2 shards, from the chief's call to the mean
in its process: {one.latency * 1e3:.0f} ms simulated, {
        MEASURED_SECONDS * 1e3:.0f} ms measured, a ratio of {ratio:.2f}. The transfers
alone, which the bandwidth was taken from, are {BARE_SECONDS * 1e3:.0f} ms of both.
{one.gigabytes * 1e3:.0f} MB went from one host to the other.
"""
    (directory / "results.md").write_text(text, encoding="utf-8")


def _shown(job: Scenario) -> Result:
    result = simulate(job)
    name = job.name or f"{job.table.rows:,} rows, {job.table.popularity}"
    rounds = f"{result.seconds:.2f} s a round"
    print(f"{name}: {job.hosts} hosts, {job.shards} shards, {rounds}", flush=True)
    return result
