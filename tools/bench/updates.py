"""Times updates of parameters, and whole rounds with them, beside NumPy and torch.

`make bench-updates`, in the environment of `make test-home`, on a machine that does nothing else.

30,000 rows drawn at random of 1,000,000 x 64 float32, and a dense array of 1,000,000; one thread,
in turns. The whole round: two workers apply 50,000 ids each, as real ones are (they repeat, and are
not sorted), and the chief makes Adagrad's update; beside torch, with tensors in shared memory, a
gradient that the chief adds up and coalesces, and `torch.optim.Adagrad`. Prints a table in
Markdown, and ends with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are passed on

from shmacc import AccumulatorGroup, Parameters, optim
from shmacc_bench.cases import IDS
from shmacc_bench.workload import make_gradient

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Turn = Callable[[], float]

ROWS, WIDTH = 1_000_000, 64
TOUCHED: Final = 30_000
DENSE: Final = 1_000_000
WORKERS: Final = 2
RATE: Final = 0.05
CONTEXT: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was done.
        against: By whom else.
        limit: The target: at most so many times as long.
        mine: Seconds, turn by turn.
        theirs: Seconds, turn by turn.
    """

    what: str
    against: str
    limit: float
    mine: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """The median over the turns."""
        return statistics.median(a / b for a, b in zip(self.mine, self.theirs, strict=True))

    def __str__(self) -> str:
        """In Markdown."""
        mine, theirs = (statistics.median(of) * 1e3 for of in (self.mine, self.theirs))
        verdict = "met" if self.ratio <= self.limit else "MISSED"
        return (
            f"| {self.what} | {mine:.2f} ms | {self.against} | {theirs:.2f} ms | "
            f"{self.ratio:.3f} | {self.limit} | {verdict} |"
        )


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=21, help="(default: %(default)s)")
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    print(f"load before: {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {turns} turns\n")
    print("| what | shmacc | beside | takes | ratio | target | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    met = True
    for rows in (sparse, dense, whole_rounds):
        for row in rows(turns):
            print(row, flush=True)
            met &= row.ratio <= row.limit
    print(f"\nload after: {os.getloadavg()[0]:.1f}")
    return 0 if met else 1


def in_turns(turns: int, *of: Turn) -> list[list[float]]:
    """Time each in each turn; the first two turns are not counted."""
    found = [[one() for one in of] for _ in range(turns + 2)][2:]
    return [list(times) for times in zip(*found, strict=True)]


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that it takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


class Ours:
    """An array with an optimizer, and the gradients of its rounds."""

    def __init__(self, contents: Any, optimizer: optim.Optimizer, *, rows: bool) -> None:
        """Make both segments, without names."""
        self.params = Parameters({"a": contents}, optimizer=optimizer)
        self.group = AccumulatorGroup(self.params.member_specs(["a"] if rows else []))

    def update(self, gradient: Any) -> float:
        """Make a round, and time the update in it."""
        self.group.apply({"a": gradient}, self.group.global_step)
        with self.group.round(1) as taken:
            return timed(lambda: self.params.update(taken))


def rows_and_values(number: int) -> tuple[Any, Any]:
    """Make a gradient of rows that are drawn at random, in ascending order."""
    rng = np.random.default_rng(number)
    rows = np.sort(rng.choice(ROWS, TOUCHED, replace=False))
    return rows, rng.standard_normal((TOUCHED, WIDTH), np.float32)


def sparse(turns: int) -> list[Row]:
    """Adagrad and SGD of rows."""
    gradients = [rows_and_values(number) for number in range(8)]
    at = 0

    def given() -> tuple[Any, Any]:
        nonlocal at
        at += 1
        return gradients[at // 3 % len(gradients)]  # the same for all three of a turn

    table = np.ones((ROWS, WIDTH), np.float32)
    squares = np.full((ROWS, WIDTH), 0.1, np.float32)
    weights = torch.nn.Parameter(torch.ones(ROWS, WIDTH))
    found = []
    for name, optimizer, theirs, limits in (
        ("Adagrad", optim.Adagrad(RATE), torch.optim.Adagrad([weights], lr=RATE), (0.33, 0.18)),
        ("SGD", optim.SGD(RATE), torch.optim.SGD([weights], lr=RATE), (0.45, 0.45)),
    ):
        ours = Ours(np.ones((ROWS, WIDTH), np.float32), optimizer, rows=True)

        def by_numpy(name: str = name) -> float:
            i, v = given()

            def update() -> None:
                if name == "Adagrad":
                    squares[i] += v * v
                    table[i] -= RATE * v / np.sqrt(squares[i])
                else:
                    table[i] -= RATE * v

            return timed(update)

        def by_torch(theirs: Any = theirs) -> float:
            i, v = given()
            weights.grad = torch.sparse_coo_tensor(
                torch.from_numpy(i)[None], torch.from_numpy(v), (ROWS, WIDTH), is_coalesced=True
            )
            return timed(theirs.step)

        def by_shmacc(ours: Ours = ours) -> float:
            return ours.update(given())

        mine, numpys, torchs = in_turns(turns, by_shmacc, by_numpy, by_torch)
        what = f"{name}, {TOUCHED:,} of {ROWS:,} x {WIDTH}"
        found += [
            Row(what, "NumPy, in place", limits[0], mine, numpys),
            Row(what, f"torch.optim.{name}", limits[1], mine, torchs),
        ]
        ours.params.close()
        ours.group.close()
    return found


def dense(turns: int) -> list[Row]:
    """Adam of a dense array."""
    gradient = np.random.default_rng(1).standard_normal(DENSE, np.float32)
    ours = Ours(np.ones(DENSE, np.float32), optim.Adam(RATE), rows=False)
    weights = torch.nn.Parameter(torch.ones(DENSE))
    weights.grad = torch.from_numpy(gradient)
    theirs = torch.optim.Adam([weights], lr=RATE)
    mine, torchs = in_turns(turns, lambda: ours.update(gradient), lambda: timed(theirs.step))
    return [Row(f"Adam, {DENSE:,}", "torch.optim.Adam", 1.0, mine, torchs)]


def work(number: int, pipe: Connection, group: AccumulatorGroup, shared: list[Any]) -> None:
    """Be a worker of both: apply when asked to."""
    torch.set_num_threads(1)
    given = make_gradient(IDS, number)
    gradient = {"a": (given.indices, given.values)}
    of_torch = torch.from_numpy(given.indices), torch.from_numpy(given.values)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        if asked == "ours":
            group.apply(gradient, group.global_step, contributor=number)
        else:
            for to, of in zip(shared, of_torch, strict=True):
                to.copy_(of)
        pipe.send(None)


def whole_rounds(turns: int) -> list[Row]:
    """Two workers' gradients, their sum, and the update."""
    ours = Ours(np.ones((ROWS, WIDTH), np.float32), optim.Adagrad(RATE), rows=True)
    weights = torch.nn.Parameter(torch.ones(ROWS, WIDTH).share_memory_())
    theirs = torch.optim.Adagrad([weights], lr=RATE)
    shared = [
        [
            torch.empty(IDS.rows, dtype=torch.int64).share_memory_(),
            torch.empty(IDS.rows, WIDTH).share_memory_(),
        ]
        for _ in range(WORKERS)
    ]
    pipes, processes = [], []
    for number in range(WORKERS):
        pipe, other = CONTEXT.Pipe()
        arguments = (number, other, ours.group, shared[number])
        processes.append(CONTEXT.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()

    def all_apply(whose: str) -> None:
        for pipe in pipes:
            pipe.send(whose)

    def by_shmacc() -> None:
        all_apply("ours")
        with ours.group.round(WORKERS) as taken:
            ours.params.update(taken)
        for pipe in pipes:
            pipe.recv()

    def by_torch() -> None:
        all_apply("theirs")
        for pipe in pipes:
            pipe.recv()
        ids = torch.cat([of_worker[0] for of_worker in shared])
        values = torch.cat([of_worker[1] for of_worker in shared])
        gradient = torch.sparse_coo_tensor(ids[None], values / WORKERS, (ROWS, WIDTH))
        weights.grad = gradient.coalesce()
        theirs.step()

    mine, torchs = in_turns(turns, lambda: timed(by_shmacc), lambda: timed(by_torch))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    what = f"a whole round, {WORKERS} workers, {IDS.rows:,} Zipf ids x {WIDTH}, Adagrad"
    return [Row(what, "torch, by hand", 0.33, mine, torchs)]


if __name__ == "__main__":
    raise SystemExit(main())
