"""Everything goes wrong, one thing after the other, while rounds go on; and the books are kept.

One of each kind under pytest; `make soak-ray` goes on at random for SOAK_SECONDS.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ray
from on_ray.books import MEMBERS, Books, wait_for

import shmacc
import shmacc.ray
from shmacc.errors import CancelledError, FailedPreconditionError
from shmacc.ray._parts import find_actor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from on_ray.nodes import Nodes

SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
TIMING = shmacc.ray.Timing(lease=2.0, grace=0.5, chief_lease=4.0)
FROZEN = TIMING.lease + 1.0
RANKS, REQUIRED = 8, 4  # two on each of four nodes; one of these may always be away


class Chaos:
    """A training, and somebody who strikes it. The fourth node is the one that is replaced."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.happened = nodes, Counter[str]()
        self.random = random.Random(24)
        self.extra = nodes.add()
        self.arrays = shmacc.ray.PublishedArrays({"step": np.int64(0)}, "chaos.arrays")
        self.group = shmacc.ray.AccumulatorGroup(MEMBERS, "chaos", timing=TIMING)
        self.books = Books(nodes, "chaos", folder, self.group.global_step)
        for rank in range(RANKS):
            self.books.start(rank, self.node(rank))
        with nodes.on(1):
            self.copy = shmacc.SharedArrays.attach("chaos.arrays", timeout=60)
        self.step = 0  # the highest that the chief knows of
        self.longest = dict.fromkeys(("wait", "publish", "end"), 0.0)
        self.strikes: list[tuple[str, Callable[[], None]]] = [
            ("workers killed", self.kill_worker),
            ("hosts' actors killed", lambda: self.kill(self.host())),
            ("hosts' actors frozen", lambda: self.freeze(self.host())),
            ("owners frozen", lambda: self.freeze("chaos/owner")),
            ("owners killed", lambda: self.kill("chaos/owner")),
            ("keepers killed", lambda: self.kill(self.keeper())),
            ("keepers frozen", lambda: self.freeze(self.keeper())),
            ("nodes replaced", self.replace),
        ]

    def node(self, rank: int) -> int:
        return self.extra if rank % 4 == 3 else rank % 4

    def host(self) -> str:
        return f"chaos/host {self.nodes.id(self.node(self.random.randrange(4)))}"

    def keeper(self) -> str:
        return f"chaos.arrays/keeper {self.nodes.id(self.random.choice((1, 2)))}"

    def kill_worker(self) -> None:
        rank = self.random.randrange(RANKS)
        self.books.kill(rank)
        self.books.start(rank, self.node(rank))

    def pid(self, part: str) -> int | None:
        """None: it is just being made again."""
        with contextlib.suppress(ray.exceptions.RayError):
            if (actor := find_actor(part)) is not None:
                pid: int = ray.get(actor.pid.remote(), timeout=10)
                return pid
        return None

    def kill(self, part: str) -> None:
        if (pid := self.pid(part)) is not None:
            os.kill(pid, signal.SIGKILL)

    def freeze(self, part: str) -> None:
        if (pid := self.pid(part)) is not None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(FROZEN)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def replace(self) -> None:
        """Have a machine die, and another one in its place."""
        ranks = [rank for rank in range(RANKS) if self.node(rank) == self.extra]
        self.nodes.remove(self.extra)
        for rank in ranks:
            self.books.kill(rank)
        self.extra = self.nodes.add()
        for rank in ranks:
            self.books.start(rank, self.extra)

    def strike_all(self, training: threading.Thread) -> None:
        """Strike once in each way, and then at random."""
        end = time.monotonic() + SECONDS
        left = list(self.strikes)
        while training.is_alive() and (left or time.monotonic() < end):
            name, strike = left.pop(0) if left else self.random.choice(self.strikes)
            strike()
            self.happened[name] += 1
            time.sleep(self.random.uniform(0, 1))

    def round(self, required: int = REQUIRED) -> None:
        """Have a round, or take up the thread again where an owner was lost."""
        times = [time.monotonic()]
        try:
            self.step = max(self.step, self.group.global_step)
            with self.group.round(required, timeout=180) as taken:
                times.append(time.monotonic())
                self.arrays["step"][...] = taken.step + 1
                self.arrays.publish({"step": None}, timeout=180)
                times.append(time.monotonic())
                assert self.copy["step"] == taken.step + 1, "published, and not there"
        except FailedPreconditionError as error:
            self.happened["rounds ended"] += 1
            if "set_global_step" in str(error):
                # Higher than all that it may have been at: workers never wait for a lower one.
                self.step += RANKS
                self.group.set_global_step(self.step)
        except CancelledError:
            self.happened["rounds ended"] += 1
        else:
            self.happened["rounds"] += 1
            self.books.enter(taken, required)
        times.append(time.monotonic())
        for name, (begin, end) in zip(self.longest, itertools.pairwise(times), strict=False):
            self.longest[name] = max(self.longest[name], end - begin)

    def end(self) -> None:
        self.books.end()
        self.copy.close()
        self.group.unlink()
        self.arrays.unlink()
        self.arrays.close()
        self.nodes.remove(self.extra)


@pytest.fixture
def chaos(nodes: Nodes, tmp_path: Path) -> Iterator[Chaos]:
    made = Chaos(nodes, tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_chaos(chaos: Chaos) -> None:
    over, failures = threading.Event(), list[BaseException]()

    def train() -> None:
        try:
            while not over.is_set():
                chaos.round()
        except BaseException as error:  # noqa: BLE001  the test's
            failures.append(error)

    training = threading.Thread(target=train)  # Ray adds nodes in the main thread only
    training.start()
    try:
        chaos.strike_all(training)
    finally:
        over.set()
        training.join()
    for failure in failures:
        raise failure
    strikes = sum(chaos.happened[name] for name, _ in chaos.strikes)
    assert all(chaos.happened[name] for name, _ in chaos.strikes)
    rounds = chaos.happened["rounds"]
    while chaos.happened["rounds"] == rounds:  # the first one may find that the owner was killed
        chaos.round(RANKS)  # all are there again
    before = set(chaos.books.lost())
    lost = len(before)
    for _ in range(3):
        chaos.round(RANKS)
    sys.stdout.write(
        f"{dict(chaos.happened)}; {len(chaos.books.consumed)} gradients, {lost} lost; "
        f"the longest times in a round: { {n: round(s, 1) for n, s in chaos.longest.items()} } s\n"
    )
    assert set(chaos.books.lost()) == before, "nothing went wrong, and a gradient is lost"
    # Each time, at most those that were accepted on hosts which were lost or begun again.
    assert lost <= RANKS * (strikes + chaos.happened["rounds ended"])


_CHIEF = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray, shmacc.ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.2", log_to_driver=False)
group = shmacc.ray.AccumulatorGroup.attach("chaos")
try:
    with group.round(int(sys.argv[2]), timeout=60) as taken:
        print(*sorted(taken["rows"].indices.tolist()), flush=True)
        sys.stdin.readline()
except shmacc.errors.FailedPreconditionError as error:
    print(error)
"""


def test_a_chief_that_is_stopped_in_its_block_has_lost_it(chaos: Chaos) -> None:
    chaos.round()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _CHIEF, chaos.nodes.cluster.address, str(REQUIRED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as chief:
        assert chief.stdout is not None
        rows = [int(row) for row in chief.stdout.readline().split()]
        chief.send_signal(signal.SIGSTOP)
        try:
            with chaos.group.round(REQUIRED, timeout=60) as taken:
                part: Any = taken["rows"]
                assert set(rows) <= set(part.indices.tolist()), "the same gradients, or more"
                chaos.books.enter(taken, REQUIRED)
        finally:
            chief.send_signal(signal.SIGCONT)
        output, _ = chief.communicate("\n", timeout=60)
        assert "ended before its block" in output
    chaos.round()
    wait_for(lambda: chaos.group.global_step == taken.step + 2)
    assert chaos.books.lost() == []
