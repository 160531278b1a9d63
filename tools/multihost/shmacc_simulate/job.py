"""A job: puts all parts together and reports the result."""

from __future__ import annotations

import itertools
import statistics

from shmacc_simulate.chief import Chief
from shmacc_simulate.hosts import Host
from shmacc_simulate.owner import Owner
from shmacc_simulate.scenario import Result, Scenario
from shmacc_simulate.world import World


class Job:
    """A job that is simulated."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = world = World(scenario)
        self.died = 0
        self.owner = Owner(world)
        self.hosts = [Host(world, number, self.owner) for number in range(scenario.hosts)]
        self.chief = Chief(world, self.owner)

    def run(self) -> Result:
        """Let the job run its rounds; return the result."""
        scenario = self.scenario
        for host in self.hosts:
            host.start()
        self.chief.next_round()
        if scenario.deaths:
            self._next_death()
        rounds = self.chief.rounds
        self.world.clock.run(scenario.limit, lambda: len(rounds) > 0)
        network = self.world.network
        started = network.large_bytes, network.messages
        self.world.clock.run(scenario.limit, lambda: len(rounds) > scenario.rounds)
        return self._result(started)

    def _next_death(self) -> None:
        """Let hosts die and come back, except the first: it has the owner and the chief."""

        def strike() -> None:
            living = [host for host in self.hosts[1:] if host.alive]
            if living:
                self._kill(self.world.random.choice(living))
            self._next_death()

        self.world.clock.after(self.world.random.expovariate(self.scenario.deaths), strike)

    def _kill(self, host: Host) -> None:
        self.died += 1
        host.die()
        self.world.clock.after(self.scenario.away, host.start)

    def _result(self, started: tuple[float, int]) -> Result:
        rounds, counters, ledger = self.chief.rounds, self.owner.core.counters, self.world.ledger
        if len(rounds) <= self.scenario.rounds:
            rounds = []  # the job was given up within a round
        counted = rounds[1:]
        number = max(1, len(counted))
        ended = [entry.ended for entry in rounds]
        seconds = [after - before for before, after in itertools.pairwise(ended)]
        none = float("inf")
        return Result(
            scenario=self.scenario,
            rounds=counted,
            seconds=statistics.fmean(seconds) if seconds else none,
            worst=max(seconds, default=none),
            latency=statistics.median(r.began - r.asked for r in counted) if counted else none,
            gigabytes=(self.world.network.large_bytes - started[0]) / number / 1e9,
            messages=(self.world.network.messages - started[1]) / number,
            gradients=statistics.fmean(r.count for r in counted) if counted else 0.0,
            late=ledger.refused / max(1, ledger.refused + ledger.accepted),
            lost=ledger.lost / max(1, ledger.accepted),
            died=self.died,
            regrants=counters.withdrawn + counters.lost_blocks,
            voided=counters.voided,
            lost_hosts=counters.lost_hosts,
        )
