"""The cases: which operations on which workloads, in families that the report shows together."""

from __future__ import annotations

import dataclasses
import fnmatch

from shmacc_bench.operations import Operation
from shmacc_bench.workload import DTYPE_NAMES, Workload

MAIN_ROWS = ((10, 64), (1_000, 64), (10_000, 64), (50_000, 64), (50_000, 8), (100_000, 1))
GROWTH_ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
MILLION = 1_000_000

IDS = Workload("sparse", 50_000, 64, order="zipf")
"""A batch of ids as real ones are: they repeat, and are not sorted."""

SORTED_IDS = dataclasses.replace(IDS, order="zipf-sorted")

ORDERS = (
    Workload("sparse", 10_000, 64, order="shuffled"),
    Workload("sparse", 10_000, 64, order="zipf"),
    IDS,
    SORTED_IDS,
)

SHARED_MEMORY = ("shmacc", "torch", "torch-1", "numpy-fancy", "numpy-add-at", "mpi")
"""The peers whose memory can be new; a server's is only ever reused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One operation on one workload; `peers` empty means all of them."""

    family: str
    operation: Operation
    workload: Workload
    peers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The case's name, for `--cases` and for the JSON."""
        return f"{self.family}/{self.operation.value}/{self.workload.label}"


def all_cases() -> list[Case]:
    """Return every case; neighbours share their workload, so that it is opened once for both."""
    cases = []
    for rows, width in MAIN_ROWS:
        workload = Workload("sparse", rows, width)
        cases += [
            Case("rows", Operation.APPLY, workload),
            Case("rows", Operation.APPLY_FRESH, workload),
            Case("rows", Operation.ROUND, workload),
            Case("rows", Operation.TAKE, workload),
            Case("rows", Operation.APPLY_NEW, workload, SHARED_MEMORY),
            Case("rows", Operation.APPLY_FULL, workload),
        ]
    for dtype in DTYPE_NAMES:
        workload = Workload("sparse", 10_000, 64, dtype)
        if dtype != "float32":  # that one is among the rows above
            cases += [
                Case("dtypes", operation, workload)
                for operation in (Operation.APPLY, Operation.ROUND)
            ]
    for workload in ORDERS:
        cases += [
            Case("orders", operation, workload) for operation in (Operation.APPLY, Operation.ROUND)
        ]
    for size in (MILLION, 100 * MILLION):
        workload = Workload("dense", size // 4)
        cases += [
            Case("dense", operation, workload) for operation in (Operation.APPLY, Operation.ROUND)
        ]
    cases += [
        Case("growth", Operation.APPLY_FULL, Workload("sparse", 1_000, 8, table_rows=rows))
        for rows in GROWTH_ROWS
    ]
    return cases


def quick_cases() -> list[Case]:
    """Return a subset that takes well under a minute: the targets' rows, and little else."""
    wanted = (Operation.APPLY, Operation.ROUND)
    return [
        case
        for case in all_cases()
        if (case.family == "rows" and case.operation in wanted)
        or (case.workload in {IDS, SORTED_IDS} and case.operation is Operation.APPLY)
        or (case.family == "growth" and case.workload.table_rows <= MILLION // 10)
    ]


def is_like(name: str, pattern: str) -> bool:
    """Whether `pattern` is a part of the name, or matches it as a shell would."""
    return pattern in name or fnmatch.fnmatch(name, pattern)
