"""Two trainings on one cluster, and a process that kills or stops their parts, one by one."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.support import stopped
from on_ray.journals import many_members
from on_ray.nodes import Nodes, pid_of, wait_for
from on_ray.other_chief import OtherChief
from on_ray.training import PATIENCE, Training, parameters_of

import shmacc.ray

TIMING = shmacc.ray.Timing(lease=2.0, grace=0.5, chief_lease=4.0)
FROZEN = TIMING.lease + 1.0
BLOCK = TIMING.chief_lease + 2.0
_LONG_BLOCK = 90.0  # seconds of a block in a long soak
_LONG_SOAK = 300.0


class Chaos:
    """Two trainings, and strikes against their parts. Only the fourth node is ever replaced.

    On each of four nodes the first training has two workers, the one with many members one worker.
    After one strike of each kind, random strikes follow for `seconds`.
    """

    def __init__(self, nodes: Nodes, folder: Path, seconds: float = 0.0) -> None:
        self.nodes, self._seconds = nodes, seconds
        self.happened = Counter[str]()
        self.random = random.Random(24)
        self.extra = nodes.add()
        self.chief = OtherChief(nodes)
        params = parameters_of("chaos")
        members = params.member_specs()
        self.first = Training(
            nodes, "chaos", members, self._homes(8), 4, folder / "chaos", TIMING, params
        )
        self.many = Training(
            nodes, "many", many_members(500), self._homes(4), 3, folder / "many", TIMING
        )
        self.trainings = [self.first, self.many]
        self.strikes: dict[str, Callable[[], None]] = {
            "workers killed": self._kill_worker,
            "hosts' actors killed": lambda: self._kill(pid_of(self._host())),
            "hosts' actors frozen": lambda: self._freeze(pid_of(self._host())),
            "owners frozen": lambda: self._freeze(pid_of(self._owner())),
            "owners killed": lambda: self._kill(pid_of(self._owner())),
            "chiefs stopped": self._stop_chief,
            "long blocks begun": self._have_a_long_block,
            "copies killed": lambda: self._in_update(self._kill),
            "copies frozen": lambda: self._in_update(self._freeze),
            "nodes replaced": self._replace,
        }
        if nodes.wires is not None:
            self.strikes["links cut"] = self._cut
        if nodes.storage is not None:
            self.strikes["heads restarted"] = self._restart_head

    def run(self) -> None:
        """Strike once in each way, then at random; compare all rounds with the journals."""
        with self._trained():
            end = time.monotonic() + self._seconds
            left = list(self.strikes)
            while all(each.is_alive() for each in self.trainings) and (
                left or time.monotonic() < end
            ):
                name = left.pop(0) if left else self.random.choice(list(self.strikes))
                self.strikes[name]()
                self.happened[name] += 1
                time.sleep(self.random.uniform(0, 1))
        assert all(self.happened[name] for name in self.strikes)
        assert self.many.happened["long blocks"] > 0
        for training in self.trainings:
            training.settle(self.happened.total())

    @contextlib.contextmanager
    def _trained(self) -> Iterator[None]:
        """Let the trainings run in the block; raise their exceptions rather than the block's."""
        for training in self.trainings:
            training.start()
        try:
            yield
        finally:
            with contextlib.ExitStack() as all_of_them:
                for training in self.trainings:
                    all_of_them.callback(training.stop)

    # Targets of the strikes

    def _homes(self, ranks: int) -> dict[int, int]:
        return {rank: self.extra if rank % 4 == 3 else rank % 4 for rank in range(ranks)}

    def _training(self) -> Training:
        return self.random.choice(self.trainings)

    def _owner(self) -> str:
        return f"{self._training().name}/owner"

    def _host(self, training: Training | None = None) -> str:
        node = self.random.choice((0, 1, 2, self.extra))
        return f"{(training or self._training()).name}/host {self.nodes.id(node)}"

    # The strikes

    def _kill_worker(self) -> None:
        journals = self._training().journals
        rank = self.random.choice(list(journals.homes))
        journals.kill(rank)
        journals.start(rank, journals.homes[rank])

    def _kill(self, pid: int | None) -> None:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def _freeze(self, pid: int | None) -> None:
        if pid is not None:
            with stopped(pid):
                time.sleep(FROZEN)

    def _in_update(self, strike: Callable[[int | None], None]) -> None:
        """Strike a node's actor while copies are being changed."""
        pid = pid_of(self._host(self.first))
        self.first.updates.clear()
        self.first.updates.wait(PATIENCE)
        time.sleep(self.random.uniform(0, 0.05))
        strike(pid)

    def _stop_chief(self) -> None:
        """Stop a chief in its block until the other chief has ended a round of that step."""
        training = self._training()
        step, _ = self.chief.enter(training.name, training.required)
        with self.chief.stopped():
            wait_for(lambda: training.closed >= step or not training.is_alive(), PATIENCE)
        assert "ended before its block" in self.chief.leave()

    def _have_a_long_block(self) -> None:
        """Let the next block last longer than the lease: heartbeats must keep it open."""
        is_long = self._seconds >= _LONG_SOAK and self.happened["long blocks begun"]
        self.many.block = _LONG_BLOCK if is_long else BLOCK

    def _replace(self) -> None:
        """Remove a machine, and add another one in its place."""
        with self.nodes.gone(self.extra):
            pass
        for journals in (training.journals for training in self.trainings):
            for rank in [rank for rank, home in journals.homes.items() if home == self.extra]:
                journals.kill(rank)
                journals.start(rank, self.extra)

    def _cut(self) -> None:
        """Cut a node off for longer than its lease, and repair its link before Ray notices."""
        assert self.nodes.wires is not None
        wire = self.nodes.wires.wire(self.random.choice((1, 2, self.extra)))
        self.nodes.wires.cut(wire)
        time.sleep(FROZEN)
        self.nodes.wires.mend(wire)

    def _restart_head(self) -> None:
        with self.nodes.headless():
            time.sleep(FROZEN)

    def end(self) -> None:
        self.chief.end()
        for training in self.trainings:
            training.end()
        self.nodes.remove(self.extra)
