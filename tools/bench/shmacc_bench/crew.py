"""Further processes that use one accumulator together: what several of them at once are timed with.

A member blocks on its pipe between orders and costs nothing then. What is to happen at the same
time is ordered with a moment to start at, on the clock that all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any, cast

from shmacc_bench.peers import peer_class

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from shmacc_bench.peers.base import Peer
    from shmacc_bench.workload import Gradient

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
LEAD_NS = 20_000_000  # enough for every member to have read its order and to wait for the start


class Member:
    """The side of one further process: an order is the name of a method and its arguments."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.prepared: list[Any] = []

    def use(self, gradients: Sequence[Gradient]) -> None:
        """Prepare the gradients that further orders apply, one after the other."""
        self.prepared = [self.peer.prepare(gradient) for gradient in gradients]

    def clock(self) -> int:
        """Return when this order was read."""
        return time.perf_counter_ns()

    def apply(self) -> tuple[int, int]:
        """Apply once; return when it was called and when it returned."""
        begun = time.perf_counter_ns()
        self.peer.apply(self.prepared[0])
        return begun, time.perf_counter_ns()

    def apply_for(self, start: int, duration: int) -> tuple[int, int]:
        """Apply from `start` on for `duration`; return how many, and the nanoseconds they took.

        At least once, however late a busy machine lets this process run.
        """
        apply, prepared = self.peer.apply, self.prepared
        _wait_until(start)
        begun = now = time.perf_counter_ns()
        count = 0
        while count == 0 or now < start + duration:
            apply(prepared[count % len(prepared)])
            count += 1
            now = time.perf_counter_ns()
        return count, now - begun

    def apply_on_and_on(self) -> None:
        """Apply until this process is killed."""
        while True:
            self.peer.apply(self.prepared[0])

    def take(self, num_required: int) -> tuple[int, int]:
        """Take; return when it was called and when it returned."""
        begun = time.perf_counter_ns()
        self.peer.take(num_required)
        return begun, time.perf_counter_ns()

    def apply_each_step(self, count: int, pause: float) -> list[tuple[int, int]]:
        """Apply once in each of so many steps, after a pause; return when each came and ended."""
        times: list[tuple[int, int]] = []
        steps = cast("Any", self.peer).accumulator.steps()
        while len(times) < count:
            next(steps)
            came = time.perf_counter_ns()
            time.sleep(pause)
            times.append((came, self.apply()[1]))
        return times

    def take_each(self, count: int) -> list[int]:
        """Take so many times, each as soon as there is one gradient; return when each returned."""
        return [self.take(1)[1] for _ in range(count)]


def main(name: str, ticket: Any, orders: Connection) -> None:
    """Join the accumulator and follow orders until the pipe is closed."""
    peer = peer_class(name).join(ticket)
    member = Member(peer)
    orders.send("joined")
    while True:
        try:
            order, arguments = orders.recv()
        except EOFError:
            break
        orders.send(getattr(member, order)(*arguments))
    with contextlib.suppress(Exception):  # it may have been removed already
        _leave(peer)


def _leave(peer: Peer) -> None:
    """Let go without removing: that is for the one who made it."""
    accumulator = getattr(peer, "accumulator", None)
    if accumulator is not None:
        accumulator.close()


class Crew:
    """The processes, seen from the one that started them."""

    def __init__(self, name: str, peer: Peer, size: int) -> None:
        """Start `size` processes that all join the peer's accumulator."""
        self.name = name
        self.peer = peer
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.joined = 0
        for _ in range(size):
            self.add()
        self.wait_joined()

    def add(self) -> None:
        """Start one more process; `wait_joined` waits for it."""
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=main, args=(self.name, self.peer.ticket(), theirs))
        process.daemon = True
        process.start()
        theirs.close()
        self.pipes.append(mine)
        self.processes.append(process)

    def wait_joined(self) -> None:
        """Wait until all that were added have joined."""
        while self.joined < len(self.pipes):
            self.answer(self.joined, START_SECONDS)
            self.joined += 1

    def order(self, number: int, order: str, *arguments: Any) -> None:
        """Give an order to one member."""
        self.pipes[number].send((order, arguments))

    def answer(self, number: int, seconds: float = ANSWER_SECONDS) -> Any:
        """Return a member's answer; TimeoutError if it does not come."""
        if not self.pipes[number].poll(seconds):
            raise TimeoutError(f"process {number} of {self.name} did not answer")
        return self.pipes[number].recv()

    def ask(self, number: int, order: str, *arguments: Any) -> Any:
        """Give an order and return the answer."""
        self.order(number, order, *arguments)
        return self.answer(number)

    def soon(self) -> int:
        """Return a moment that every member can be ready at."""
        return time.perf_counter_ns() + LEAD_NS

    def kill(self, number: int) -> None:
        """End a member as the kernel does when memory runs out."""
        os.kill(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].join()

    def close(self) -> None:
        """Let all members go, and end those that do not."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.pipes, self.processes = [], []


def _wait_until(moment: int) -> None:
    """Sleep until just before the moment, then watch the clock."""
    time.sleep(max(0.0, (moment - time.perf_counter_ns()) / 1e9 - 0.001))
    while time.perf_counter_ns() < moment:
        pass
