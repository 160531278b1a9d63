"""What is simulated, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmacc._multihost.messages import Timing
from shmacc_simulate.machine import CLUSTER, Machine
from shmacc_simulate.popularity import Table

WIDTH = 64  # of every table, in float32
ROW_BYTES = WIDTH * 4 + 8 + 8  # as shipped: values, index, count
SMALL_BYTES = 300  # of a report, an order, a call without rows; a contributor is 8 more


@dataclass(frozen=True)
class Scenario:
    """A job.

    Attributes:
        name: Its name in the report.
        hosts: How many.
        workers: Of each host.
        shards: How many; spread over the hosts.
        table: What gradients touch.
        need: Which part of all workers' gradients a round requires.
        rounds: How many are simulated, after one that is not counted.
        compute: Seconds that a gradient takes, in the median, with its apply.
        spread: Of these times: the deviation of their logarithm.
        pause: Seconds from a round's end until the chief asks for the next one.
        whole: Whether the chief fetches the mean, or the rows stay at the shards.
        deaths: Host deaths a second; a host is away for `away` seconds.
        away: How long.
        seed: Of everything that is random.
        machine: What things cost.
        timing: How long the parts wait for each other.
        limit: Simulated seconds after which the job is given up.
    """

    name: str
    hosts: int
    workers: int = 32
    shards: int = 1
    table: Table = field(default_factory=lambda: Table(100_000_000, 1.0))
    need: float = 0.8
    rounds: int = 20
    compute: float = 0.3
    spread: float = 0.3
    pause: float = 0.0
    whole: bool = False
    deaths: float = 0.0
    away: float = 5.0
    seed: int = 1
    machine: Machine = CLUSTER
    timing: Timing = field(default_factory=Timing)
    limit: float = 600.0

    @property
    def required(self) -> int:
        """How many gradients a round requires."""
        return max(1, round(self.need * self.hosts * self.workers))

    def shipped(self, gradients: int) -> float:
        """Return the bytes of the sums of so many gradients, over all shards."""
        return self.table.union(gradients) * (WIDTH * 4 if self.table.dense else ROW_BYTES)


@dataclass
class Round:
    """A round that was consumed.

    Attributes:
        asked: When the chief asked for it.
        began: When its block began: the mean is there.
        ended: When it was consumed.
        count: Its gradients.
    """

    asked: float
    began: float
    ended: float
    count: int


@dataclass
class Result:
    """What came of a job, over its counted rounds; a job that was given up has none.

    Attributes:
        scenario: The job.
        rounds: The rounds that were consumed.
        seconds: Of a round, the mean, and the worst.
        worst: The longest.
        latency: From asking to the block's beginning, the median.
        gigabytes: Between hosts, a round, in large messages.
        messages: Between hosts, a round.
        gradients: Of a round.
        late: Gradients that segments refused since their step was over or sealed, of all.
        lost: Gradients that were accepted and got into no round, of all.
        died: Deaths of hosts.
        regrants: Grants that came to nothing, and batches that shards had lost.
        voided: Steps that were void.
        lost_hosts: How often the owner took a host for lost.
        cancelled: Rounds whose chief the owner took for lost.
    """

    scenario: Scenario
    rounds: list[Round]
    seconds: float
    worst: float
    latency: float
    gigabytes: float
    messages: float
    gradients: float
    late: float
    lost: float
    died: int
    regrants: int
    voided: int
    lost_hosts: int
    cancelled: int
