"""What all parts of a job share."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from shmacc_simulate.clock import Clock, Processor
from shmacc_simulate.ledger import Ledger
from shmacc_simulate.network import Network

if TYPE_CHECKING:
    from shmacc._base.lineage import Lineage
    from shmacc_simulate.scenario import Scenario

HOME = 0
"""The host of the owner and the chief. The protocol knows each host by its number in digits."""


class World:
    """What all parts of a job share.

    Attributes:
        shards: The threads of the shards; each host has one.
        paths: The updates that the copy of each host has.
        applied_at: When the last gradient was accepted.
        moved_at: When the last segment moved to the next step.
    """

    def __init__(self, scenario: Scenario) -> None:
        costs, hosts = scenario.costs, range(scenario.hosts)
        self.scenario, self.costs = scenario, costs
        self.clock = Clock()
        self.network = Network(self.clock, len(hosts), costs.bandwidth, costs.latency)
        self.shards = [Processor(self.clock) for _ in hosts]
        self.ledger = Ledger(scenario.hosts * scenario.workers)
        self.random = random.Random(scenario.seed)
        self.numbers = itertools.count(1)
        self.paths: list[tuple[Lineage, ...]] = [() for _ in hosts]
        self.applied_at = self.moved_at = 0.0
