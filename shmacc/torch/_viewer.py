"""An evaluator's side of training: it copies the model of one step, while others train it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn, Self

import torch
from torch import nn

from shmacc._parameters.parameters import Parameters
from shmacc._segment.options import Owners
from shmacc.errors import FailedPreconditionError, FinishedError
from shmacc.torch import _model as on_model
from shmacc.torch import _run as run
from shmacc.torch._tables import rows_of


class Viewer:
    """A process that copies the model of one step, to compute metrics while others train it.

    A viewer has no rank, and nobody waits for it. Its model keeps its own memory, into which
    `snapshot` copies parameters and buffers::

        with Viewer(model, "name", timeout=60) as viewer:
            for step in viewer.steps():
                print(step, evaluate(model.eval()))
    """

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        *,
        timeout: float | None = None,
        owners: Owners = "mine",
    ) -> None:
        """Attach as soon as the chief has created the parameters and the group.

        Args:
            model: A model of the chief's architecture.
            shared_name: The name that the chief was given.
            timeout: Seconds for each wait, first for the chief; None: for ever.
            owners: Whose segments may be attached.

        Raises:
            The errors of `Replica`.
        """
        self._model = model
        self._timeout = timeout
        self._closed = False
        self._group, self._shared = run.attach(model, shared_name, timeout, owners)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Viewer is this process's, and is neither copied nor pickled")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._group.shared_name!r}>"

    @property
    def running(self) -> bool:
        """True until the chief ends the training or this object is closed."""
        return not self._closed and self._group.running

    def snapshot(self) -> int:
        """Copy the parameters and buffers of one step into the model.

        After the end of the training, this still copies the last step.

        Returns:
            How many updates the parameters have had.

        Raises:
            DeadlineExceededError: The timeout passed.
            FailedPreconditionError: A chief with an optimizer of torch has died in its block: the
                parameters may be half updated; or this object is closed.
        """
        if isinstance(self._shared, Parameters):
            _, copies = self._shared.snapshot(timeout=self._timeout)
        else:
            copies = self._between_rounds()
        with torch.no_grad():
            for name, value in on_model.tensors(self._model).items():
                value.copy_(on_model.in_memory(copies[name]))
        for name, embedding in on_model.tables(self._model).items():
            rows = rows_of(embedding)
            rows.keep(rows.spec, copies[name].indices, copies[name].values)
        return int(copies[run.RUN][run.STEP])

    def _between_rounds(self) -> dict[str, Any]:
        """Return copies that were made while no block was writing.

        A step is sealed before its round's block begins, and moves on after the block ends.
        """
        while True:
            # Read the step before the seal: a block that begins later fails the checks below.
            running, step = self._group.running, self._group.global_step
            if not self._group.stats().sealed:
                copies = {name: array.copy() for name, array in self._shared.items()}
                whole = not run.half_updated(copies[run.RUN])
                if not self._group.stats().sealed and self._group.global_step == step:
                    if whole:
                        return copies
                    raise FailedPreconditionError(
                        "The parameters may be half updated: a chief has died in a round's block"
                    )
            if not running:
                raise FailedPreconditionError("The training has ended in a round's block")
            with suppress(FinishedError):
                self._group.wait_step(step, timeout=self._timeout)

    def steps(self) -> Iterator[int]:
        """Yield the newest step whenever the step has changed; the model is then at this step.

        The loop ends after the last step of the training. A slow loop misses steps in between.

        Raises:
            The errors of `snapshot`. The timeout is for each wait for a new step.
        """
        last = -1
        while True:
            # Read the step before the parameters: a later step ends the wait below at once.
            running, step = self.running, self._group.global_step
            if int(self._shared[run.RUN][run.STEP]) != last and (found := self.snapshot()) != last:
                last = found
                yield last
            elif running:
                with suppress(FinishedError):
                    self._group.wait_step(step, timeout=self._timeout)
            else:
                return

    def close(self) -> None:
        """Detach. Idempotent. The model keeps its contents."""
        self._closed = True
        self._group.close()
        self._shared.close()
