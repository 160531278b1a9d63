"""One worker process: ``python -m shmacc_demo.worker RUN BOARD WORKER STEP PARTS``.

RUN and BOARD are the names of the accumulators and the board; it finds everything that it shares
with others by these. WORKER is its number. STEP and PARTS (separated by commas, or empty) are the
parts of that step that this worker must still give; some parts of a dead worker that it replaces
may be there already.
"""

from __future__ import annotations

import contextlib
import os
import sys

import shmacc
from shmacc_demo.batches import Sampler
from shmacc_demo.board import GIVEN, Board
from shmacc_demo.exchange import PARTS, Exchange, remove
from shmacc_demo.model import gradient

_PATIENCE = 0.25
"""Seconds between two looks whether the chief is still alive."""


class OrphanedError(Exception):
    """The chief is dead."""


class Worker:
    """One of the workers of a run."""

    def __init__(self, board: Board, exchange: Exchange, number: int) -> None:
        self._board = board
        self._exchange = exchange
        self._number = number
        self._plan = board.charter.plan
        self._sampler = Sampler(board.stream, board.counts, self._plan.recipe)

    def work(self, first: int, wanted: tuple[str, ...]) -> None:
        """Give gradients, step after step, to the last; of the first step only what is wanted."""
        step = self._exchange.step
        while step < self._plan.steps:
            self._give(step, wanted if step == first else PARTS)
            step = self._next(step)

    def _give(self, step: int, parts: tuple[str, ...]) -> None:
        # The chief reads these to kill a worker in the middle of an apply.
        notes = self._board.notes[self._number : self._number + 1]
        notes["giving"] = 0
        notes["step"] = step
        if parts:
            batch = self._sampler.draw(self._plan.seed, step, self._number)
            found = gradient(self._board.parameters, batch)
        for part in parts:
            at = PARTS.index(part)
            notes["giving"] = at + 1
            accepted = self._exchange.give(part, found, step, self._number)
            notes["accepted" if accepted else "refused"][0, at] += 1
        notes["giving"] = GIVEN

    def _next(self, step: int) -> int:
        while True:
            with contextlib.suppress(shmacc.errors.DeadlineExceededError):
                return self._exchange.wait(step, _PATIENCE)
            if os.getppid() != self._board.charter.chief:
                raise OrphanedError


def main(run: str, path: str, number: str, step: str, parts: str) -> None:
    """Work until the run is over, or the chief is dead: then take its names away, and go."""
    try:
        board = Board.open(path)
        exchange = Exchange.attach(run, board.charter.words)
        wanted = tuple(part for part in parts.split(",") if part)
        Worker(board, exchange, int(number)).work(int(step), wanted)
    except (OrphanedError, FileNotFoundError):  # the board or an accumulator, too, may be gone
        remove(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
