"""Single operations beside those of peers, each in its own process; they take turns."""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shmacc_bench import timing
from shmacc_bench.processes import Apart, FailedError
from shmacc_bench.tables import Table, figure, paired
from shmacc_bench.workload import IDS, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MINE: Final = "shmacc"
COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    "torch and a lock": ("torch", "torch-1"),
    "TensorFlow, one process": ("tf-local",),
    "TensorFlow, across processes": ("tf-server",),
    "NumPy and a lock": ("numpy",),
    "np.add of the same bytes": ("np.add",),
}
"""Title: peers, of which the faster one counts."""

TORCH, LOCAL, SERVER, NUMPY, ADD = COLUMNS
Goals = dict[str, float]
"""Column: the highest ratio of shmacc's time to its peers'."""


@dataclass(frozen=True)
class Family:
    """An operation on several workloads, which are the rows of a table."""

    title: str
    operation: str
    workloads: Mapping[Workload, Goals]
    columns: Sequence[str]


def _rows(*of: tuple[int, int, Goals]) -> dict[Workload, Goals]:
    return {Workload("sparse", rows, width): goals for rows, width, goals in of}


_APPLY: Final = _rows(
    (10, 64, {TORCH: 0.25}),
    (1_000, 64, {TORCH: 1.0}),
    (10_000, 64, {ADD: 2.2}),
    (50_000, 64, {ADD: 1.5, LOCAL: 1 / 3.2}),
    (50_000, 8, {TORCH: 0.4}),
    (100_000, 1, {TORCH: 1.3}),
)
_ROUND: Final[Goals] = {LOCAL: 1 / 3, SERVER: 1 / 10, TORCH: 1.0}
_WIDE: Final = Workload("sparse", 50_000, 64)
_NARROW: Final = Workload("sparse", 100_000, 1)
FAMILIES: Final = (
    Family("Apply", timing.APPLY, _APPLY, tuple(COLUMNS)),
    Family(
        "Round of two applies and a take", timing.ROUND, dict.fromkeys(_APPLY, _ROUND),
        (TORCH, LOCAL, SERVER, NUMPY),
    ),
    Family(
        "Apply of ids by Zipf's law", timing.APPLY,
        {IDS: {}, replace(IDS, order="zipf-sorted"): {}}, (TORCH, NUMPY),
    ),
    Family(
        "Apply of other rows each time, in a full table", timing.APPLY_OTHERS,
        {
            replace(_NARROW, order="shuffled"): {TORCH: 1.5},
            replace(_WIDE, order="shuffled"): {TORCH: 0.9},
            Workload("sparse", 10_000, 64, table_rows=100_000, order="shuffled"): {TORCH: 0.9},
        },
        (TORCH,),
    ),
    Family(
        "Apply to a full table, which grows", timing.APPLY_FULL,
        {Workload("sparse", 1_000, 8, table_rows=10**size): {} for size in (3, 4, 5, 6)},
        (TORCH, LOCAL, NUMPY),
    ),
    Family(
        "First apply to a new segment", timing.APPLY_NEW,
        {Workload("sparse", 10_000, 64, table_rows=100_000): {}}, (TORCH,),
    ),
    Family(
        "Apply, dense", timing.APPLY,
        {
            Workload("dense", 250_000): {ADD: 1.4},
            Workload("dense", 4_000_000): {ADD: 1.3},
            Workload("dense", 25_000_000): {ADD: 1.3},
        },
        (TORCH, LOCAL, ADD),
    ),
    Family("Round, dense", timing.ROUND, {Workload("dense", 250_000): {TORCH: 0.8}}, (TORCH,)),
)  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int  # turns of each peer
    turn: int  # nanoseconds of a turn
    most: int  # samples in a turn
    enough: float  # nanoseconds after which a slow peer has no more turns
    fewest: int  # turns that every peer has, however slow


FULL: Final = Effort(rounds=15, turn=12_000_000, most=200, enough=5e8, fewest=5)
QUICK: Final = Effort(rounds=5, turn=6_000_000, most=100, enough=3e8, fewest=3)


def measure(quick: bool) -> Iterator[Table]:
    """Yield a table for each family; a quick one has the workloads that have goals."""
    with ExitStack() as stack:
        crew = Crew(stack)
        for family in FAMILIES:
            chosen = _quick(family) if quick else family
            if chosen.workloads:
                yield table(chosen, crew, QUICK if quick else FULL)


def _quick(family: Family) -> Family:
    """Return the workloads that have goals, without a server, which is slow to start."""
    goals = [{name: of for name, of in each.items() if name != SERVER}
             for each in family.workloads.values()]  # fmt: skip
    workloads = {w: of for w, of in zip(family.workloads, goals, strict=True) if of}
    columns = [name for name in family.columns if any(name in of for of in workloads.values())]
    return replace(family, workloads=workloads, columns=columns)


class Crew:
    """The peers' processes, each started when it is first needed."""

    def __init__(self, stack: ExitStack) -> None:
        """Start without peers; the stack ends those that are opened."""
        self._stack = stack
        self._peers: dict[str, Apart | None] = {}

    def open(self, name: str, workload: Workload) -> Apart | None:
        """Return the peer with this workload open; None if it cannot, and say why."""
        if name not in self._peers:
            self._peers[name] = self._tried(name, lambda: Apart(timing.Timed, name))
            if peer := self._peers[name]:
                self._stack.callback(peer.end)
        peer = self._peers[name]
        if peer is None or self._tried(name, lambda: self._checked(peer, name, workload)) is None:
            return None
        return peer

    def _checked(self, peer: Apart, name: str, workload: Workload) -> Apart:
        if wrong := peer.ask("open", workload):
            print(f"({name}, {workload.label}: {wrong})", file=sys.stderr)
        return peer

    def _tried(self, name: str, act: Callable[[], Apart]) -> Apart | None:
        try:
            return act()
        except FailedError as why:
            if name == MINE:
                raise
            print(f"({name} is left out: {why})", file=sys.stderr)
            return None


def table(family: Family, crew: Crew, effort: Effort) -> Table:
    """Measure a family."""
    made = Table(family.title, (family.operation, "time", *family.columns))
    for workload, goals in family.workloads.items():
        names = [MINE, *(name for column in family.columns for name in COLUMNS[column])]
        peers = {name: peer for name in names if (peer := crew.open(name, workload))}
        turns = _in_turns(peers, family.operation, effort)
        mine = turns[MINE]
        cells = [workload.label, f"{figure(_median(mine) / 1000)} us"]
        for column in family.columns:
            theirs = [turns[name] for name in COLUMNS[column] if name in turns]
            if theirs:
                fastest = min((_median(of), of) for of in theirs)[1]
                pairs = [(statistics.median(a), statistics.median(b))
                         for a, b in zip(mine, fastest, strict=False)]  # fmt: skip
                what = f"{workload.label} over {column}"
                cells.append(made.judged(what, paired(pairs), goals.get(column)))
            else:
                cells.append("")
        made.rows.append(cells)
    return made


def _in_turns(
    peers: Mapping[str, Apart], operation: str, effort: Effort
) -> dict[str, list[list[float]]]:
    """Return the samples of each peer's turns; each round begins with another peer."""
    for peer in peers.values():
        peer.ask("begin", operation)
    turns: dict[str, list[list[float]]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(effort.rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            done = turns[name]
            if len(done) < effort.fewest or sum(map(sum, done)) < effort.enough:
                done.append(peers[name].ask("block", effort.turn, effort.most))
    return turns


def _median(turns: list[list[float]]) -> float:
    return statistics.median(sample for turn in turns for sample in turn)
