"""What one call of `Replica.step` hands over, so that a call that is interrupted can be finished.

An exception may end `step` at any instruction: Ctrl-C, a signal's handler, a write to parameters.
The process lives on, and the program goes on to another batch, or calls `step` again. Then each
gradient is handed over once, and what `step` returns is true. So there is one commit point, and
everything else follows from it.

    1  begin      the replica keeps a `Handing`: one store
    2  set aside  gradients leave ``.grad``; a later backward pass does not add to them
    3  apply      the segment has the gradient, and `answer` says so: one call into the extension,
                  which sets `answer` before it returns to Python (shmacc/native/python/handle.hpp)
    4  go on      buffers are copied, then the replica keeps another `Position`: one store
    5  forget     the replica keeps no `Handing`: one store

Only the answer decides whether a gradient was handed over. `step` itself settles what it can when
an exception leaves it: without an answer it puts the gradients back, as if it had not been called;
with an answer it goes on, if that needs no wait. If another exception comes meanwhile, the next
call finds the `Handing`, and does the rest. Gradients that are in ``.grad`` then were computed
later, or are those that were not set aside yet: these are the same objects.

    interrupted        the next call of `step`, without new gradients     with new ones
    before 1           begins
    1 to 3, put back   begins again, with the same gradients              hands over their sum
    1 to 3, twice      applies                                            applies, then as below
    3 to 5             goes on, and returns whether they count            as below

A gradient that is computed after another one was handed over: an asynchronous replica hands it over
as another contributor, under a number that it has never used (`Replica._serial`). A synchronous one
can hand it over only if the replica has gone on to another step (4) before the gradient was
computed. Otherwise this step's round has this replica's gradient already, and in later rounds it
is stale: it is dropped, and `step` returns False. But if it has the same numbers, then the program
has computed the batch of its step again, and it is in the round: `step` says what became of that.

Not a fact to decide by: the contributors of the open round, since it may have been taken since; the
counters of the process, since other threads and signal handlers apply, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from shmacc._core import Answer
from shmacc.torch._rows import Pending, Rows


@dataclass(frozen=True, slots=True)
class Position:
    """Where a replica is in the training.

    Attributes:
        step: The group's step when it went on; it was read before the parameters, so it is never
            too new.
        global_step: How many updates the parameters had.
        made: How many times the replica has gone on.
    """

    step: int
    global_step: int
    made: int


@dataclass(frozen=True, slots=True, eq=False)
class Handing:
    """A gradient on its way.

    Attributes:
        at: Where it was computed.
        contributor: Who hands it over.
        weight: How many samples it counts for.
        gradients: The tensors that were in ``.grad``, by parameter's name.
        rows: The gradients of tables' rows.
        answer: Whether the gradient counts; no answer: it is not handed over.
        late: Whether another gradient has come for it meanwhile, and was dropped.
    """

    at: Position
    contributor: int
    weight: int
    gradients: Mapping[str, torch.Tensor]
    rows: Mapping[str, Pending]
    answer: Answer = field(default_factory=Answer)
    late: bool = False


class Gradients:
    """Where a replica's backward passes leave gradients.

    Attributes:
        trained: The parameters, by name.
        rows: The rows of tables, by name.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], rows: Mapping[str, Rows]) -> None:
        self.trained = trained
        self.rows = rows

    def begin(self, at: Position, contributor: int, weight: int) -> Handing:
        """Return a `Handing` of all gradients that backward passes have left; they stay there."""
        found = {name: parameter.grad for name, parameter in self.trained.items()}
        return Handing(
            at,
            contributor,
            weight,
            {name: gradient for name, gradient in found.items() if gradient is not None},
            {name: rows.pending or [] for name, rows in self.rows.items()},
        )

    def set_aside(self, handing: Handing) -> None:
        """Remove these gradients from ``.grad``, if they are still there. Idempotent."""
        for name, gradient in handing.gradients.items():
            if (parameter := self.trained[name]).grad is gradient:
                parameter.grad = None
        for name, pending in handing.rows.items():
            self.rows[name].set_aside(pending)

    def put_back(self, handing: Handing) -> None:
        """Undo `set_aside`. Idempotent."""
        for name, gradient in handing.gradients.items():
            self.trained[name].grad = gradient
        for name, pending in handing.rows.items():
            self.rows[name].put_back(pending)

    def has_later(self, handing: Handing) -> bool:
        """Return whether backward passes have left gradients other than these."""
        return any(
            parameter.grad is not None and parameter.grad is not handing.gradients.get(name)
            for name, parameter in self.trained.items()
        ) or any(
            rows.pending and rows.pending is not handing.rows[name]
            for name, rows in self.rows.items()
        )

    def are_again(self, handing: Handing) -> bool:
        """Return whether the gradients now in ``.grad`` have the same numbers as these."""
        now = self.begin(handing.at, 0, 1)
        return (
            now.gradients.keys() == handing.gradients.keys()
            and all(
                _equal(now.gradients[name], gradient)
                for name, gradient in handing.gradients.items()
            )
            and all(_equal_rows(now.rows[name], rows) for name, rows in handing.rows.items())
        )

    def drop(self) -> None:
        """Remove all gradients."""
        for parameter in self.trained.values():
            parameter.grad = None
        for rows in self.rows.values():
            rows.clear()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_sparse and other.is_sparse:
        one, other = one.coalesce(), other.coalesce()
        return torch.equal(one.indices(), other.indices()) and _equal(one.values(), other.values())
    both = one.layout == other.layout == torch.strided
    return both and bool(torch.equal(one, other))


def _equal_rows(one: Pending, other: Pending) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(ids, others) and torch.equal(gradient, another)
        for (ids, gradient), (others, another) in zip(one, other, strict=True)
    )
