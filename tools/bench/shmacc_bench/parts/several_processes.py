"""Measures processes that apply at the same time, and a process that waits in a take."""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from shmacc import NEVER_STALE, SparseConditionalAccumulator
from shmacc_bench.processes import Apart
from shmacc_bench.tables import Table, figure, spread
from shmacc_bench.workload import DTYPE, Workload, make_gradient

ROWS: Final = (10, 1_000, 10_000, 50_000)
WIDTH: Final = 64
LANES: Final = (1, 1, 2)  # how many lanes each accumulator has
PLAIN, OTHER, LANED = range(3)
ALONE: Final = "1 process"
TWO_LANES: Final = "2, two lanes"
VARIANTS: Final[Mapping[str, Sequence[tuple[int, int]]]] = {
    ALONE: ((PLAIN, 0),),
    "1, two lanes": ((LANED, 0),),
    "2, one lane": ((PLAIN, 0), (PLAIN, 1)),
    TWO_LANES: ((LANED, 0), (LANED, 1)),
    "2, an accumulator each": ((PLAIN, 0), (OTHER, 0)),
}
"""The processes of each variant: the index of an accumulator, and a number for its process."""

GOALS: Final = {1_000: 1.7, 10_000: 1.5}  # least speed-up by a second process, with two lanes
_GRADIENTS: Final = 4  # each process applies this many in turn, so that none stays in its cache
_LEAD: Final = 20_000_000  # ns before a common start, so that all have read their orders
_SETTLED: Final = 0.01  # seconds, untimed, after which the taker surely sleeps


class Member:
    """A process that uses another process's accumulator; both read the same clock."""

    def __init__(self, accumulator: SparseConditionalAccumulator) -> None:
        self.accumulator: Any = accumulator
        self.use(ROWS[0], 0)

    def use(self, rows: int, first: int) -> None:
        """Make gradients of `rows` rows, with seeds from `first` on."""
        workload = Workload("sparse", rows, WIDTH)
        made = [make_gradient(workload, first + number) for number in range(_GRADIENTS)]
        self.gradients = [(one.indices, one.values, None, NEVER_STALE) for one in made]

    def clock(self) -> int:
        """Return the time now, when this process has read the order."""
        return time.perf_counter_ns()

    def apply(self) -> int:
        """Apply once; return the time after it."""
        self.accumulator.apply_grad(*self.gradients[0])
        return time.perf_counter_ns()

    def apply_for(self, start: int, duration: int) -> float:
        """Apply for `duration` ns from `start`, at least once; return applies a second."""
        apply, gradients = self.accumulator.apply_grad, self.gradients
        while time.perf_counter_ns() < start:
            pass
        begun = now = time.perf_counter_ns()
        count = 0
        while count == 0 or now < start + duration:
            apply(*gradients[count % _GRADIENTS])
            count += 1
            now = time.perf_counter_ns()
        return count * 1e9 / (now - begun)

    def apply_each_step(self, count: int) -> list[int]:
        """Apply once in each of `count` steps, after a pause; return the time after each apply."""
        steps = self.accumulator.steps()
        moments = []
        for _ in range(count):
            next(steps)
            time.sleep(_SETTLED)
            moments.append(self.apply())
        return moments

    def take(self, required: int, count: int) -> list[int]:
        """Take `count` times; return the time after each take."""
        moments = []
        for _ in range(count):
            self.accumulator.take_grad(required)
            moments.append(time.perf_counter_ns())
        return moments

    def close(self) -> None:
        """Detach."""
        self.accumulator.close()


def measure(quick: bool) -> Iterator[Table]:
    """Yield how soon a waiting take returns, and the applies a second of all processes."""
    with ExitStack() as stack:
        shape = Workload("sparse", max(ROWS), WIDTH).shape
        accumulators = [
            SparseConditionalAccumulator(
                DTYPE, shape, f"bench.{os.getpid()}.{number}", unlink_on_close=True, lanes=lanes
            )
            for number, lanes in enumerate(LANES)
        ]
        for accumulator in accumulators:
            stack.callback(accumulator.close)
        members = {}
        for place in sorted({place for places in VARIANTS.values() for place in places}):
            members[place] = Apart(Member, accumulators[place[0]])
            stack.callback(members[place].end)
        yield _waits(members[PLAIN, 0], members[PLAIN, 1], 15 if quick else 200)
        yield _applies(accumulators, members, quick)


def _waits(taker: Apart, applier: Apart, trials: int) -> Table:
    woken, pipe = [], []
    for _ in range(trials):
        taker.order("take", 2, 1)
        applier.ask("apply")
        time.sleep(_SETTLED)
        returned = applier.ask("apply")
        woken.append((taker.answer()[0] - returned) / 1000)
        time.sleep(_SETTLED)
        sent = time.perf_counter_ns()
        pipe.append((taker.ask("clock") - sent) / 1000)
    taker.order("take", 1, trials)
    applied = applier.ask("apply_each_step", trials)
    in_steps = [(b - a) / 1000 for a, b in zip(applied, taker.answer(), strict=True)]
    table = Table("A waiting take returns after the last apply (us)", ("", "median [p10-p90]"))
    table.rows += [
        ("in another process", spread(woken)),
        ("where workers loop over steps()", spread(in_steps)),
        ("a message through a pipe", spread(pipe)),
    ]
    return table


def _applies(
    accumulators: Sequence[SparseConditionalAccumulator],
    members: Mapping[tuple[int, int], Apart],
    quick: bool,
) -> Table:
    table = Table("Applies a second, all processes together", ("rows", *VARIANTS))
    for rows in ROWS:
        for number, member in enumerate(members.values()):
            member.ask("use", rows, number * _GRADIENTS)
            member.ask("apply")
        turns = [
            {how: _rate([members[place] for place in places], 30 if quick else 50)
             for how, places in VARIANTS.items()}
            for _ in range(3 if quick else 20)
        ]  # fmt: skip
        for accumulator in accumulators:
            accumulator.take_grad(1)
        cells = [figure(statistics.median(turn[how] for turn in turns)) for how in VARIANTS]
        table.rows.append([f"{rows:,} x {WIDTH}", *cells])
        if rows in GOALS:
            took = statistics.median(turn[ALONE] / turn[TWO_LANES] for turn in turns)
            table.judged(f"{rows:,}: time by two lanes over one", took, 1 / GOALS[rows])
    return table


def _rate(members: Sequence[Apart], milliseconds: int) -> float:
    start = time.perf_counter_ns() + _LEAD
    for member in members:
        member.order("apply_for", start, milliseconds * 1_000_000)
    return float(sum(member.answer() for member in members))
