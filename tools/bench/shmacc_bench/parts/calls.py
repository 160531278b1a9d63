"""Single operations of shmacc and its peers, each in its own process, in turns."""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from shmacc_bench import timing
from shmacc_bench.processes import Apart, FailedError
from shmacc_bench.tables import Table, figure, paired
from shmacc_bench.workload import IDS, Workload

MINE: Final = "shmacc"
COLUMNS: Final[Mapping[str, Sequence[str]]] = {
    "torch and a lock": ("torch", "torch-1"),
    "TensorFlow, one process": ("tf-local",),
    "TensorFlow, across processes": ("tf-server",),
    "NumPy and a lock": ("numpy",),
    "np.add of the same bytes": ("np.add",),
}
"""For each column's title: its peers, of which the fastest counts."""

TORCH, LOCAL, SERVER, NUMPY, ADD = COLUMNS
Goals = dict[str, float]
"""By column: the goal, which is the highest allowed ratio of shmacc's time to the peers' time."""


@dataclass(frozen=True)
class Family:
    """One table: an operation, measured on several workloads, which are the rows."""

    title: str
    operation: str
    workloads: Mapping[Workload, Goals]
    columns: Sequence[str]


_WIDE: Final = Workload("sparse", 50_000, 64)
_NARROW: Final = Workload("sparse", 100_000, 1)
_APPLY: Final[Mapping[Workload, Goals]] = {
    Workload("sparse", 10, 64): {TORCH: 0.25}, Workload("sparse", 1_000, 64): {TORCH: 1.0},
    Workload("sparse", 10_000, 64): {ADD: 2.2}, _WIDE: {ADD: 1.5, LOCAL: 1 / 3.2},
    Workload("sparse", 50_000, 8): {TORCH: 0.4}, _NARROW: {TORCH: 1.3},
}  # fmt: skip
_ROUND: Final[Goals] = {LOCAL: 1 / 3, SERVER: 1 / 10, TORCH: 1.0}
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

_TURN: Final = 12_000_000  # nanoseconds of a peer's turn
_MOST: Final = 200  # samples in a turn, at most
_ENOUGH: Final = 5e8  # nanoseconds after which a slow peer has no turns beyond _FEWEST
_FEWEST: Final = 5


def measure(quick: bool) -> Iterator[Table]:
    """Yield a table for each family; if `quick`, only with workloads that have goals."""
    with ExitStack() as stack:
        processes = Peers(stack)
        for family in FAMILIES:
            chosen = _quick(family) if quick else family
            if chosen.workloads:
                yield table(chosen, processes, 5 if quick else 15)


def _quick(family: Family) -> Family:
    """Return the part of a family that has goals, without TensorFlow's server: it starts slowly."""
    workloads = {workload: goals for workload, goals in family.workloads.items() if goals}
    judged = {name for goals in workloads.values() for name in goals} - {SERVER}
    columns = [name for name in family.columns if name in judged]
    return replace(family, workloads=workloads, columns=columns)


class Peers:
    """The peers' processes, each started when it is first needed."""

    def __init__(self, stack: ExitStack) -> None:
        """Begin without peers; the stack ends those that are started."""
        self._stack = stack
        self._peers: dict[str, Apart | None] = {}

    def open(self, name: str, workload: Workload) -> Apart | None:
        """Return the peer with this workload open; if the peer fails, print why and return None."""
        try:
            if name not in self._peers:
                self._peers[name] = None  # stays None if the process cannot start
                self._peers[name] = started = Apart(timing.Timed, name)
                self._stack.callback(started.end)
            peer = self._peers[name]
            if peer and (wrong := peer.ask("open", workload)):
                print(f"({name}, {workload.label}: {wrong})", file=sys.stderr)
        except FailedError as why:
            if name == MINE:
                raise
            print(f"({name} is left out: {why})", file=sys.stderr)
            return None
        return peer


def table(family: Family, processes: Peers, rounds: int) -> Table:
    """Measure a family."""
    made = Table(family.title, (family.operation, "time", *family.columns))
    for workload, goals in family.workloads.items():
        names = [MINE, *(name for column in family.columns for name in COLUMNS[column])]
        peers = {name: peer for name in names if (peer := processes.open(name, workload))}
        turns = _in_turns(peers, family.operation, rounds)
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
    peers: Mapping[str, Apart], operation: str, rounds: int
) -> dict[str, list[list[float]]]:
    """Return the samples of each peer's turns; each round begins with another peer."""
    for peer in peers.values():
        peer.ask("begin", operation)
    turns: dict[str, list[list[float]]] = {name: [] for name in peers}
    names = list(peers)
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            done = turns[name]
            if len(done) < _FEWEST or sum(map(sum, done)) < _ENOUGH:
                done.append(peers[name].ask("block", _TURN, _MOST))
    return turns


def _median(turns: list[list[float]]) -> float:
    return statistics.median(sample for turn in turns for sample in turn)
