"""The cases: which operations on which workloads by whom, and the targets among them."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import TYPE_CHECKING

from shmacc_bench.operations import Operation
from shmacc_bench.peers import LIMITS, RELEASED
from shmacc_bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Limit = tuple[float, tuple[str, ...]]
    """At most so many times as long as the fastest of these."""

TORCH = ("torch", "torch-1")
TENSORFLOW = ("tf-local", "tf-server")
BY_HAND = ("numpy-fancy", "numpy-add-at", "manager", "mpi")
ACCUMULATORS = ("shmacc", *TENSORFLOW, *TORCH, *BY_HAND)
EVERYBODY = (*ACCUMULATORS, *LIMITS)

APPLY_LIMITS: Mapping[tuple[int, int], tuple[Limit, ...]] = {
    (10, 64): ((0.25, TORCH),),
    (1_000, 64): ((1.0, TORCH),),
    (10_000, 64): ((2.2, ("np.add",)),),
    (50_000, 64): ((1.5, ("np.add",)), (1 / 3.2, ("tf-local",))),
    (50_000, 8): ((0.4, TORCH),),
    (100_000, 1): ((1.3, TORCH),),
}
ROUND_LIMITS: tuple[Limit, ...] = ((1 / 3, ("tf-local",)), (1 / 10, ("tf-server",)), (1.0, TORCH))
RANDOM: Sequence[tuple[Workload, float]] = (
    (Workload("sparse", 100_000, 1, order="shuffled"), 1.5),
    (Workload("sparse", 100_000, 1), 1.5),
    (Workload("sparse", 100_000, 1, order="zipf"), 1.5),
    (Workload("sparse", 50_000, 64, order="shuffled"), 0.9),
    (Workload("sparse", 10_000, 64, table_rows=100_000, order="shuffled"), 0.9),
)
"""Rows that are others in each apply, of a full table."""

MEGABYTE = 1_000_000
DENSE: Mapping[int, float] = {1: 1.4, 16: 1.3, 100: 1.3}
GROWTH_ROWS = (1_000, 10_000, 100_000, 1_000_000)
IDS = Workload("sparse", 50_000, 64, order="zipf")
"""A batch of ids as real ones are: they repeat, and are not sorted."""

SORTED_IDS = dataclasses.replace(IDS, order="zipf-sorted")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One operation on one workload."""

    family: str
    operation: Operation
    workload: Workload
    peers: tuple[str, ...]
    limits: tuple[Limit, ...] = ()

    @property
    def name(self) -> str:
        """The case's name, for `--cases` and for the JSON."""
        return f"{self.family}/{self.operation.value}/{self.workload.label}"


def all_cases() -> list[Case]:
    """Return every case; neighbours share their workload, so that it is opened once for both."""
    cases = []
    for (rows, width), limits in APPLY_LIMITS.items():
        workload = Workload("sparse", rows, width)
        cases += [
            Case("rows", Operation.APPLY, workload, EVERYBODY, limits),
            Case("rows", Operation.ROUND, workload, ACCUMULATORS, ROUND_LIMITS),
        ]
    workload = Workload("sparse", 10_000, 64)
    cases += [
        Case("first", Operation.APPLY_FRESH, workload, ("shmacc", RELEASED), ((1.0, (RELEASED,)),)),
        # A smaller table: torch clears all of it each time, untimed, and one waits for that.
        Case(
            "first",
            Operation.APPLY_NEW,
            dataclasses.replace(workload, table_rows=100_000),
            ("shmacc", RELEASED, *TORCH),
        ),
    ]
    cases += [
        Case("ids", Operation.APPLY, workload, ("shmacc", *TORCH)) for workload in (IDS, SORTED_IDS)
    ]
    cases += [
        Case(
            "random", Operation.APPLY_OTHERS, workload, ("shmacc", *TORCH), ((limit, ("torch-1",)),)
        )
        for workload, limit in RANDOM
    ]
    for megabytes, limit in DENSE.items():
        workload = Workload("dense", megabytes * MEGABYTE // 4)
        peers = ("shmacc", "tf-local", *TORCH, "np.add")
        cases.append(Case("dense", Operation.APPLY, workload, peers, ((limit, ("np.add",)),)))
        if megabytes == 1:
            cases.append(Case("dense", Operation.ROUND, workload, peers, ((0.8, TORCH),)))
    cases += [
        Case(
            "growth",
            Operation.APPLY_FULL,
            Workload("sparse", 1_000, 8, table_rows=rows),
            ("shmacc", *TENSORFLOW, *TORCH, "numpy-fancy", *LIMITS),
        )
        for rows in GROWTH_ROWS
    ]
    return cases


def quick_cases() -> list[Case]:
    """Return the targets' cases, with nobody but those that the targets are set against."""
    slow_to_start = {"tf-server"}
    found = []
    for case in all_cases():
        limits = tuple(of for of in case.limits if not slow_to_start.intersection(of[1]))
        against = {name for _, names in limits for name in names}
        if limits or case.family == "ids":
            peers = tuple(name for name in case.peers if name == "shmacc" or name in against)
            found.append(dataclasses.replace(case, peers=peers, limits=limits))
    return found


def is_like(name: str, pattern: str) -> bool:
    """Whether `pattern` is a part of the name, or matches it as a shell would."""
    return pattern in name or fnmatch.fnmatch(name, pattern)
