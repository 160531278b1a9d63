"""A child that is forked while another thread grows the segment has a mapping that leads somewhere.

The thread is held at the return of the system call that has moved a region, and at instructions
after it; at these instants the main thread forks.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart
from helpers.stepping_threads import TracedThread
from helpers.stepping_tracer import needs_ptrace, on_one_core
from helpers.support import EVERY_INSTANT

from shmacc import NEVER_STALE, SparseConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

pytestmark = [needs_ptrace, pytest.mark.threads]

WIDTH: Final = 64
ROWS: Final = 2000  # half a MiB: each gradient of new rows makes the table grow
INSTRUCTIONS: Final = 40  # beyond the end of what changes the mapping
MOVES: Final = 2


def _add(acc: Any, first: int) -> None:
    values = np.ones((ROWS, WIDTH))
    assert acc.apply_grad(range(first, first + ROWS), values, local_step=NEVER_STALE)


def _grow(acc: Any, stop: threading.Event, *, pipe: Pipe) -> None:
    pipe.say(threading.get_native_id())
    first = ROWS
    while not stop.is_set():
        _add(acc, first)
        first += ROWS


def _grow_and_fork(acc: SparseConditionalAccumulator, *, pipe: Pipe) -> int:
    _add(acc, 0)
    _add(acc, 0)  # known rows: from now on every region is mapped
    stop = threading.Event()
    growing = threading.Thread(target=_grow, args=(acc, stop), kwargs={"pipe": pipe})
    growing.start()
    with ExitStack() as stack:
        children: list[Apart] = []
        while pipe.hear() == "fork":
            children.append(stack.enter_context(Apart(_add, acc, 0)))
            pipe.say()
        stop.set()
        for child in children:
            child.result()
    growing.join()
    return len(children)


class Regions:
    """Where a process has a segment's file mapped."""

    def __init__(self, pid: int, name: str) -> None:
        """Look."""
        self._maps = Path(f"/proc/{pid}/maps")
        self._name = name
        self._starts = self._look()

    def moved(self) -> bool:
        """Whether some region begins elsewhere than at the last look."""
        before, self._starts = self._starts, self._look()
        return any(self._starts[at] != start for at, start in before.items())

    def _look(self) -> dict[str, str]:
        lines = [line.split() for line in self._maps.read_text("ascii").splitlines()]
        return {fields[2]: fields[0].split("-")[0] for fields in lines if self._name in fields[-1]}


@pytest.fixture
def acc() -> Iterator[SparseConditionalAccumulator]:
    """A named accumulator of sums."""
    with SparseConditionalAccumulator("f8", (None, WIDTH), "forked", reduction_type="SUM") as made:
        yield made
        made.unlink()


def test_at_every_instant(acc: SparseConditionalAccumulator, namespace: str) -> None:
    """Every child adds to rows in the region that was being moved, and adds them right."""
    with on_one_core(), Apart(_grow_and_fork, acc) as process:
        thread = process.hear()
        with TracedThread(thread) as growing:
            regions = Regions(process.pid, namespace)
            for move in range(MOVES):
                growing.run_until(regions.moved)
                for number in range(INSTRUCTIONS):
                    if EVERY_INSTANT or number % MOVES == move:
                        process.say("fork")
                        process.hear()
                    growing.step()
        process.say("enough")
        children = process.result()
    assert children == INSTRUCTIONS * (MOVES if EVERY_INSTANT else 1)
    taken = acc.take(1, timeout=0)
    assert (taken.values[:ROWS] == 2 + children).all()
    assert (taken.values[ROWS:] == 1).all()
    assert taken.indices.size == (taken.count - 1 - children) * ROWS
