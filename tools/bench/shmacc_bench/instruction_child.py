"""Makes the calls of one instruction case: the program that runs under valgrind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import shmacc
from shmacc_bench.instruction_cases import CASES, InstructionCase
from shmacc_bench.workload import DTYPE, make_gradient

if TYPE_CHECKING:
    from collections.abc import Callable


def calls_of(case: InstructionCase) -> Callable[[], object]:
    """Return what is called over and over, in the state that it is called in."""
    workload = case.workload
    gradient = make_gradient(workload)
    kind = (
        shmacc.ConditionalAccumulator
        if workload.kind == "dense"
        else shmacc.SparseConditionalAccumulator
    )
    if case.call == "create":
        return lambda: kind(DTYPE, workload.shape).close()
    accumulator = kind(DTYPE, workload.shape)

    def apply() -> None:
        if isinstance(accumulator, shmacc.ConditionalAccumulator):
            accumulator.apply_grad(gradient.values, shmacc.NEVER_STALE)
        else:
            accumulator.apply_grad(gradient.indices, gradient.values, local_step=shmacc.NEVER_STALE)

    def a_round() -> None:
        apply()
        apply()
        accumulator.take_grad(2)

    call = apply if case.call == "apply" else a_round
    call()
    call()
    return call


def main(name: str, calls: str) -> None:
    """Call a case so many times."""
    call = calls_of(CASES[name])
    for _ in range(int(calls)):
        call()


if __name__ == "__main__":
    main(*sys.argv[1:])
