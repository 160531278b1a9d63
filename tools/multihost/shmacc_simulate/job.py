"""A job: puts all parts together, and says what its rounds have cost."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from shmacc_simulate.chief import Chief, Round, Update
from shmacc_simulate.host import Host
from shmacc_simulate.owner import Owner
from shmacc_simulate.world import World

if TYPE_CHECKING:
    from shmacc_simulate.scenario import Scenario


class Job:
    """A job that is simulated."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario)
        self.owner = Owner(self.world)
        self.hosts = [Host(self.world, at, self.owner) for at in range(scenario.hosts)]
        self.chief = Chief(self.world, self.owner)

    def run(self) -> Round:
        """Let the job make its rounds; return medians over those that are counted.

        Raises:
            RuntimeError: They do not end.
        """
        rounds, wanted = self.chief.rounds, self.scenario.rounds + 1
        self.world.clock.run(self.scenario.longest, lambda: len(rounds) >= wanted)
        if len(rounds) < wanted:
            raise RuntimeError(f"Only {len(rounds)} rounds have ended: {self.scenario}")
        seconds, updates, *spent = zip(*rounds[1:], strict=True)
        update = Update(*map(statistics.median, zip(*updates, strict=True)))
        return Round(statistics.median(seconds), update, *map(statistics.median, spent))
