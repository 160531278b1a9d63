"""What all parts of a job share: the time, the network, the books, and what is drawn at random."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from shmacc_simulate.books import Books
from shmacc_simulate.events import Clock
from shmacc_simulate.network import Network

if TYPE_CHECKING:
    from shmacc_simulate.scenario import Scenario


class World:
    """What all parts of a job share."""

    def __init__(self, scenario: Scenario) -> None:
        machine = scenario.machine
        self.scenario = scenario
        self.rates = machine.dense if scenario.table.dense else machine.sparse
        self.clock = Clock()
        self.network = Network(self.clock, scenario.hosts, machine.bandwidth, machine.latency)
        self.books = Books(scenario.required)
        self.random = random.Random(scenario.seed)
        self._numbers = itertools.count(1)

    def new_number(self) -> int:
        """Return a number that nothing else has."""
        return next(self._numbers)

    def compute_time(self) -> float:
        """Return how long a gradient takes."""
        return self.scenario.compute * self.random.lognormvariate(0.0, self.scenario.spread)
