"""A chief's round, from its wait to the end of its block.

`SyncReplicas.active` may enter a round, which the next call of `round` passes to a block. An
exception may end either call at any instruction. So one generator runs the whole round, and the
interpreter knows how far it has come: an exception in the generator undoes what it had begun, and
ends it. The chief keeps a `Turn`, in one store, before the generator starts.

    new      it has not started
    open     it has entered the round, and waits for the block
    blocked  the block is running
    running  it waits for gradients, or ends the round; only another thread or a signal handler can
             see this state
    over     it has ended, in order or not; its `Turn` says how `active` waits for the next round

A block begins and ends in C++ (GeneratorBlock). So no exception can come between generator and
block, where neither would end the round.
"""

import inspect
from collections.abc import Generator
from dataclasses import dataclass

from shmacc._parameters.patterns import LearningRate
from shmacc._values.arguments import OnDeath
from shmacc.errors import ShmaccError
from shmacc.torch._block import Update


@dataclass(slots=True, eq=False)
class Turn:
    """A chief's round.

    Attributes:
        waits: How long `round` or `active` waits, and whether a death ends the wait.
        thread: The thread that runs the turn.
        ahead: Whether `active` enters the round.
        run: The generator; None: this turn is over.
        error: The error of `active`'s wait, for the next `round`.
        blocked: Whether the round's block has begun.
        rate: The learning rate that `round` got.
    """

    waits: tuple[float | None, OnDeath]
    thread: int
    ahead: bool = False
    run: Generator[Update, None, None] | None = None
    error: ShmaccError | None = None
    blocked: bool = False
    rate: LearningRate = None

    @property
    def state(self) -> str:
        """The turn's state: new, open, blocked, running or over. See the module's docstring."""
        states = {
            inspect.GEN_CREATED: "new",
            inspect.GEN_RUNNING: "running",
            inspect.GEN_SUSPENDED: "blocked" if self.blocked else "open",
            inspect.GEN_CLOSED: "over",
        }
        return "over" if self.run is None else states[inspect.getgeneratorstate(self.run)]

    def give_up(self) -> None:
        """Give up a round that has no block yet, and forget an error."""
        self.error = None
        if self.run is not None and self.state in {"new", "open"}:
            self.run.close()
