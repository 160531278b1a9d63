"""Processes leave and come while somebody sweeps: no lock keeps them off, and nobody is swept out.

Who sweeps stands still at two system calls in a row, wherever in the sweep: at the first one a
process leaves, and at the second another one, or the same again, takes the entry that is free now.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import pytest
from helpers.apart import Apart
from helpers.killing_scenes import NAME
from helpers.stepping_tracer import Traced, needs_ptrace

import shmacc
from shmacc import ConditionalAccumulator, inspection

if TYPE_CHECKING:
    from helpers.apart import Pipe

pytestmark = needs_ptrace

FEWEST: Final = 3  # stops in a sweep: it asks the kernel about an entry, and gives the lock back


def _come_and_go(*, pipe: Pipe) -> None:
    while True:
        pipe.hear()
        acc = shmacc.attach(NAME)
        pipe.say()
        pipe.hear()
        acc.close()
        pipe.say()


def _living() -> set[int]:
    return {process.pid for process in inspection.describe(NAME).processes if process.alive}


def _sweep_meanwhile(system_calls: int, *, again: bool) -> bool:
    """Whether the sweep was as long as that: whoever attaches sweeps, with the lock."""
    with (
        Apart(_come_and_go) as leaving,
        Apart(_come_and_go) as coming,
        Traced(lambda _: shmacc.attach(NAME).close()) as sweeping,
    ):
        _turn(leaving)
        sweeping.run_until(lambda: inspection.describe(NAME).lock.held)
        _go_on(sweeping, system_calls)
        if not inspection.describe(NAME).lock.held:
            return False
        _turn(leaving)
        _go_on(sweeping, 1)
        comes = leaving if again else coming
        _turn(comes)
        sweeping.finish()
        assert _living() == {comes.pid}
    return True


def _turn(process: Apart) -> None:
    process.say()
    process.hear()


def _go_on(traced: Traced, stops: int) -> None:
    done = itertools.count()
    traced.run_until(lambda: next(done) == stops)


@pytest.mark.parametrize("again", [False, True], ids=["another", "the same again"])
def test_an_entry_changes_hands_during_a_sweep(*, again: bool) -> None:
    # Not attached here: a forked child would not leave before it has closed its parent's handle.
    ConditionalAccumulator("f8", (), NAME).close()
    try:
        for stops in itertools.count():
            if not _sweep_meanwhile(stops, again=again):
                break
        assert stops >= FEWEST
    finally:
        with shmacc.attach(NAME) as acc:
            acc.unlink()
