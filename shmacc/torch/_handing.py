"""Keeps what a call of `Replica.step` hands over, so that an interrupted call can be finished.

An exception may end `step` at any instruction: Ctrl-C, a signal's handler, a write to parameters.
The process lives on, and the program goes on to another batch, or calls `step` again. Even then,
each gradient must be handed over once, and `step` must return the truth. So there is one commit
point, and everything else follows from it.

    1  begin      the replica keeps a `Handing`: one store
    2  set aside  gradients leave ``.grad``; a later backward pass does not add to them
    3  apply      the segment has the gradient, and `answer` says so: one call into the extension,
                  which sets `answer` before it returns to Python (shmacc/native/python/handle.hpp)
    4  go on      buffers are copied, then the replica keeps another `Position`: one store
    5  forget     the replica keeps no `Handing`: one store

Only the answer decides whether a gradient was handed over. When an exception leaves `step`, `step`
first settles what it can. Without an answer, it puts the gradients back, as if it had not been
called. With an answer, it goes on, if that needs no wait. If another exception interrupts this, the
next call finds the `Handing`, and does the rest. By then, ``.grad`` may have later gradients, or
gradients that were not set aside yet, which are the same objects as in the `Handing`.

    interrupted        the next call of `step`, without new gradients     with new ones
    before 1           begins
    1 to 3, put back   begins again, with the same gradients              hands over their sum
    1 to 3, twice      applies                                            applies, then as below
    3 to 5             goes on, and returns whether they count            as below

What if a gradient is computed after another one was handed over? An asynchronous replica hands it
over as another contributor, with a number that it has never used (`Replica._serial`). A synchronous
replica can hand it over only if it had gone on to another step (4) before. Otherwise the round
already has this replica's gradient for the step, and in later rounds the gradient is stale: it is
dropped, and `step` returns False. But if both gradients have the same numbers, the program has
computed the same batch again. Then `step` returns whether the first one counts.

The open round's contributors cannot decide, since the round may have been taken meanwhile. The
process's counters cannot decide, since other threads and signal handlers apply, too.
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
        step: The group's step at which the replica computes. It was read before the parameters, so
            it is never too new.
        global_step: How many updates the parameters had then.
        made: How many times the replica has gone on to another step.
    """

    step: int
    global_step: int
    made: int


@dataclass(frozen=True, slots=True, eq=False)
class Handing:
    """A gradient that is being handed over.

    Attributes:
        at: The position at which the gradient was computed.
        contributor: The contributor under whose number it is handed over.
        weight: How many samples it counts for.
        gradients: The tensors that were in ``.grad``, by parameter's name.
        rows: The gradients of tables' rows.
        answer: Whether the gradient counts; without an answer, it was not handed over.
        late: Whether another gradient for the same step was computed since, and dropped.
    """

    at: Position
    contributor: int
    weight: int
    gradients: Mapping[str, torch.Tensor]
    rows: Mapping[str, Pending]
    answer: Answer = field(default_factory=Answer)
    late: bool = False


class Gradients:
    """The parameters and tables in which a replica's backward passes leave gradients.

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
        """Remove the gradients of `handing` from ``.grad`` if they are still there. Idempotent."""
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
        """Return whether backward passes have left gradients other than those of `handing`."""
        return any(
            parameter.grad is not None and parameter.grad is not handing.gradients.get(name)
            for name, parameter in self.trained.items()
        ) or any(
            rows.pending and rows.pending is not handing.rows[name]
            for name, rows in self.rows.items()
        )

    def are_again(self, handing: Handing) -> bool:
        """Return whether the gradients in ``.grad`` have the same numbers as those of `handing`."""
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
