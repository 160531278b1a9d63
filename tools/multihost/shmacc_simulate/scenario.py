"""Scenarios, the costs of hosts, networks and calls, and results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from shmacc._multihost.messages import Timing
from shmacc_simulate.popularity import Table

WIDTH = 64  # float32 values in a row of every table
ROW_BYTES = WIDTH * 4 + 8 + 8  # as shipped: values, index, count
SMALL_BYTES = 300  # a report, an order, a call without rows; each contributor adds 8


@dataclass(frozen=True)
class Rates:
    """Bytes of rows that one process handles in a second."""

    hold: float  # a forwarder copies its segment's rows, divided among the shards
    reduce: float  # a shard adds up pieces: bytes that come in
    join: float  # a chief puts parts together: bytes of the mean


@dataclass(frozen=True)
class Machine:
    """A cluster's hosts and network: bytes a second, and seconds."""

    bandwidth: float  # bytes a second of a NIC, in each direction
    latency: float  # seconds from one host to another
    call: float  # processor time to send or receive one call or answer
    owner_call: float  # the owner's time for a report or a chief's call, with its answer
    sparse: Rates
    dense: Rates
    retry: float = 0.2  # seconds until a call to a lost shard is repeated


# Measured on the machine of docs/many-hosts.md; `owner_call` and the bandwidth by `make bench-ray`:
# 870 reports a second; in 125 ms, bare Ray calls sent half of each host's 50.5 MB to the other
# host, and then half of 91.5 MB to the chief.
MEASURED: Final = Machine(
    bandwidth=(50.5e6 / 2 + 91.5e6 / 2) / 0.125,
    latency=0.0,
    call=0.13e-3,
    owner_call=1 / 870,
    sparse=Rates(hold=7.1e9, reduce=6.3e9, join=8.0e9),
    dense=Rates(hold=1.37e10, reduce=8.7e9, join=1.0e10),
)

# The same software on hosts of their own, with NICs of 25 Gb/s.
CLUSTER: Final = replace(MEASURED, bandwidth=25e9 / 8, latency=50e-6)


@dataclass(frozen=True)
class Scenario:
    """A job."""

    name: str  # in the tables
    hosts: int
    workers: int = 32  # on each host
    shards: int = 1  # spread over the hosts
    table: Table = field(default_factory=lambda: Table(100_000_000, 1.0))
    need: float = 0.8  # the part of all workers' gradients that a round requires
    rounds: int = 20  # after one that is not counted
    compute: float = 0.3  # median seconds that a gradient takes, with its apply
    spread: float = 0.3  # the standard deviation of the logarithm of these times
    pause: float = 0.0  # seconds from a round's end until the chief asks for the next one
    whole: bool = False  # the chief fetches the mean; else the rows stay at the shards
    deaths: float = 0.0  # deaths of hosts a second
    away: float = 5.0  # seconds that a dead host is away
    seed: int = 1
    machine: Machine = CLUSTER
    timing: Timing = field(default_factory=Timing)
    limit: float = 600.0  # simulated seconds after which the job is given up

    @property
    def required(self) -> int:
        """How many gradients a round requires."""
        return max(1, round(self.need * self.hosts * self.workers))

    def shipped(self, gradients: int) -> float:
        """Return the bytes of the sums of this number of gradients, over all shards."""
        return self.table.union(gradients) * (WIDTH * 4 if self.table.dense else ROW_BYTES)


@dataclass
class Round:
    """A round that was consumed: simulated times, and how many gradients it had."""

    asked: float
    began: float  # when its block began, with the mean
    ended: float
    count: int


@dataclass
class Result:
    """The result of a job, over its counted rounds; a job that was given up has none."""

    scenario: Scenario
    rounds: list[Round]
    seconds: float  # mean seconds of a round
    worst: float  # seconds of the longest round
    latency: float  # median seconds from asking to the block's beginning
    gigabytes: float  # sent between hosts in a round, in large messages
    messages: float  # sent between hosts in a round
    gradients: float  # in a round
    late: float  # share of the gradients that segments refused: their step was over or held
    lost: float  # share of the accepted gradients that got into no round
    died: int  # deaths of hosts
    regrants: int  # grants that came to nothing, and blocks whose shards had lost pieces
    voided: int  # void steps
    lost_hosts: int  # how often the owner considered a host lost
