"""Scenarios, and what things cost in them: bytes, seconds, and bytes a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shmacc._multihost.messages import Timing

WIDTH: Final = 64  # float32 values in a row of the table
ROW_BYTES: Final = WIDTH * 4 + 8  # a row of an update: values and index
SUM_BYTES: Final = ROW_BYTES + 8  # a row as hosts ship it, and as the chief gets it: with a count


@dataclass(frozen=True)
class Costs:
    """What hosts and the network take. docs/simulation.md says where the numbers come from."""

    bandwidth: float = 25e9 / 8  # of a NIC, in each direction
    latency: float = 50e-6  # from one host to another
    call: float = 0.13e-3  # processor time to send or receive one call or answer
    owner_call: float = 1 / 870  # the owner's time for a call, with its answer
    hold: float = 7.1e9  # a forwarder copies its segment's rows, by shard
    reduce: float = 6.3e9  # a shard adds up pieces
    join: float = 8.0e9  # the chief puts the mean's parts together
    put: float = 2.5e9  # the chief puts an update into Ray's store
    check: float = 13e-9  # for a row: a host checks an update, and reserves room for it
    make: float = 115e-9  # for a row: a host makes an update, by Adagrad


@dataclass(frozen=True)
class Scenario:
    """A job whose rounds need a gradient of each worker. Each host has a shard."""

    hosts: int
    workers: int = 8  # on each host
    touched: int = 500  # different rows of a gradient, all equally likely
    table: int = 1_000_000  # rows
    updates: bool = True  # the chief updates the parameters in each round
    shared: bool = False  # how hosts get an update; see `Stored`
    rounds: int = 3  # that are counted, after one that is not
    compute: float = 0.3  # median seconds that a gradient takes
    spread: float = 0.3  # the standard deviation of the logarithm of these times
    costs: Costs = field(default_factory=Costs)
    timing: Timing = field(default_factory=Timing)
    seed: int = 1
    longest: float = 3600.0  # simulated seconds, after which the job is given up

    def rows(self, gradients: int) -> float:
        """Return how many different rows this number of gradients is expected to touch."""
        return self.table * (1 - (1 - self.touched / self.table) ** gradients)

    def shipped(self, gradients: int) -> float:
        """Return the bytes of the sums of this number of gradients."""
        return self.rows(gradients) * SUM_BYTES

    @property
    def update(self) -> float:
        """How many rows an update has."""
        return self.rows(self.hosts * self.workers)
