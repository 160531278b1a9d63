"""The fixed calls whose instructions are counted."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from shmacc_bench.workload import Order, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

Call = Literal["apply", "round", "create"]


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionCase:
    """A workload, what is called with it, and how often (enough to drown what varies)."""

    workload: Workload
    call: Call
    calls: int


def _sparse(rows: int, width: int, order: Order = "sorted") -> Workload:
    return Workload("sparse", rows, width, table_rows=100_000, order=order)


CASES: Mapping[str, InstructionCase] = {
    "apply 10 x 64": InstructionCase(_sparse(10, 64), "apply", 300),
    "apply 1,000 x 64": InstructionCase(_sparse(1_000, 64), "apply", 40),
    "apply 1,000 x 64 shuffled": InstructionCase(_sparse(1_000, 64, "shuffled"), "apply", 40),
    "apply 10,000 x 8 zipf": InstructionCase(_sparse(10_000, 8, "zipf"), "apply", 10),
    "apply 10,000 x 1": InstructionCase(_sparse(10_000, 1), "apply", 20),
    "round 10 x 64": InstructionCase(_sparse(10, 64), "round", 100),
    "round 1,000 x 64": InstructionCase(_sparse(1_000, 64), "round", 20),
    "apply dense 1 MB": InstructionCase(Workload("dense", 250_000), "apply", 10),
    "round dense 1 MB": InstructionCase(Workload("dense", 250_000), "round", 10),
    "create and close 1,000 x 64": InstructionCase(_sparse(1_000, 64), "create", 10),
}
