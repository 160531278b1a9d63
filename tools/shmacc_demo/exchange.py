"""The exchange of gradients: two sparse accumulators and a dense one, found by their names.

How parameters and gradients stay in step, even if processes are killed, stopped or late
----------------------------------------------------------------------------------------
The parameters are in memory that all processes map, and the chief overwrites them in place, without
a lock. One round of training is:

1. A worker reads the step, reads parameters, and gives its three parts: inputs, outputs, rest.
2. The chief waits for enough rests. All the parts of those workers are there by then, since the
   rest is given last. It takes what is there from all three accumulators, and *seals* them: from
   here on gradients for this step are refused.
3. Only now it overwrites the parameters.
4. It moves the three accumulators to the next step, the rest last; that one is the clock that the
   workers follow with ``wait_step``, so they start when everything is ready.

So every gradient that counts was given before the seal, hence was computed from parameters read
before the chief touched them. A worker that is late may read a mixture of old and new ones: the
gradients that it computes from them are refused, as sealed or as stale. The accumulators' own check
of the step is the only validation, and it is enough. (Two alternating copies of the parameters
would not help a worker that is late by two steps, and would cost the copying.)

Exactly once
------------
A worker killed between or inside its three applies may have done any of them. So each part is
signed (module `signed`). When a worker has died the chief takes the gradients that have come so
far, reads the signatures, and puts everything back; the replacement computes the same batch again
and gives only the parts that are not signed. The chief checks the signatures of every round that it
closes, so a gradient lost or counted twice would be noticed. (Rejected: counting the gradients.
That does not show whose are there when two workers have died. Discarding the round: that wastes the
others' work.)
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import shmacc
from shmacc_demo.model import FIGURES, Gradient
from shmacc_demo.signed import Signed, SignedTable, SignedVector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmacc_demo.ledger import Account

PARTS = ("inputs", "outputs", "rest")
"""In the order in which a worker gives them."""


@dataclass(frozen=True)
class Exchange:
    """The three accumulators of one run."""

    inputs: SignedTable
    outputs: SignedTable
    rest: SignedVector

    @classmethod
    def create(cls, run: str, words: int, width: int, workers: int) -> Self:
        """Make the accumulators of a new run; `remove` them when it is over."""
        return cls(
            SignedTable.create(_name(run, "inputs"), words, width, workers),
            SignedTable.create(_name(run, "outputs"), words, width, workers),
            SignedVector.create(_name(run, "rest"), words + FIGURES, workers),
        )

    @classmethod
    def attach(cls, run: str, words: int) -> Self:
        """Find the accumulators of a run by name; NotFoundError if they, and the run, are gone."""
        return cls(
            SignedTable.attach(_name(run, "inputs"), words),
            SignedTable.attach(_name(run, "outputs"), words),
            SignedVector.attach(_name(run, "rest"), words + FIGURES),
        )

    def close(self) -> None:
        """Detach; the accumulators stay."""
        for _, signed in self._parts():
            signed.accumulator.close()

    @property
    def step(self) -> int:
        """The step that gradients are wanted for."""
        return self.rest.accumulator.global_step

    def wait(self, after: int, timeout: float) -> int:
        """Wait for a later step than this one; DeadlineExceededError if it does not come."""
        return self.rest.accumulator.wait_step(after, timeout=timeout)

    def give(self, part: str, gradient: Gradient, step: int, worker: int) -> bool:
        """Give one part of a gradient; False if the step is over."""
        match part:
            case "inputs":
                return self.inputs.give(gradient.inputs, step, worker)
            case "outputs":
                return self.outputs.give(gradient.outputs, step, worker)
            case _:
                return self.rest.give(gradient.rest, step, worker)

    def take(self, required: int, timeout: float) -> Gradient:
        """Seal a step and take its mean; DeadlineExceededError leaves all as it was."""
        rest = self.rest.take(required, timeout)
        return Gradient(self.inputs.take(required), self.outputs.take(required), rest)

    def advance(self, step: int) -> None:
        """Open the next step."""
        for _, signed in self._parts():
            signed.accumulator.advance_step(step)

    def missing(self, worker: int, step: int) -> tuple[str, ...]:
        """Say which parts of the open step are not there from this worker, which is dead."""
        return tuple(part for part, signed in self._parts() if worker not in signed.signers(step))

    def accounts(self, given: Mapping[str, int]) -> tuple[Account, ...]:
        """Draw up the books of all three, with what the workers say they gave."""
        return tuple(signed.account(part, given[part]) for part, signed in self._parts())

    def _parts(self) -> list[tuple[str, Signed[Any, Any]]]:
        return list(zip(PARTS, (self.inputs, self.outputs, self.rest), strict=True))


def remove(run: str) -> None:
    """Remove a run's names, those that there are."""
    for part in PARTS:
        with (
            contextlib.suppress(shmacc.errors.NotFoundError),
            shmacc.attach(_name(run, part)) as accumulator,
        ):
            accumulator.unlink()


def _name(run: str, part: str) -> str:
    return f"{run}.{part}"
