"""Times updates of parameters, beside NumPy and torch.

`make bench-updates`, in the environment of `make test-home`, on a machine that does nothing else.

30,000 rows drawn at random of 1,000,000 x 64 float32, and a dense array of 1,000,000; one thread,
in turns. Prints a table in Markdown, and ends with status 1 if a target is missed. Whole rounds
with updates are in `make bench`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shmacc import AccumulatorGroup, Parameters, optim

if TYPE_CHECKING:
    from collections.abc import Callable

    Turn = Callable[[], float]

ROWS, WIDTH = 1_000_000, 64
TOUCHED: Final = 30_000
DENSE: Final = 1_000_000
RATE: Final = 0.05


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
    for rows in (sparse, dense):
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


if __name__ == "__main__":
    raise SystemExit(main())
