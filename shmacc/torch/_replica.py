"""A replica's side of training."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from shmacc import _core
from shmacc._accumulators.accumulator import NEVER_STALE
from shmacc._gradients import arguments
from shmacc._gradients.spec import IndexedSlicesSpec
from shmacc._opening.options import Owners
from shmacc.errors import DeadlineExceededError, FinishedError, InvalidArgumentError
from shmacc.torch import _clipping as clipping
from shmacc.torch import _model as on_model
from shmacc.torch import _run as run
from shmacc.torch._tables import rows_of

_AT_EXIT = 1.0
"""The most seconds that an exit in order waits: there may be no chief any more, or it may wait for
this process to end."""


class Replica:
    """A process that computes gradients, for `SyncReplicas` or `AsyncReplicas`.

    The model's parameters are in shared memory from now on. Only the chief can write to them: a
    write here (an optimizer's step) is undone, and raises FailedPreconditionError. Buffers are this
    process's own; each step copies the shared buffers into them.

    A replica that is killed and started again computes the batch of `global_step` again; the round
    counts its gradient once. When a ``with`` block ends without an exception, its replica leaves:
    the chief no longer waits for it. After an exception it does not leave, because a replacement
    may be started; a chief with ``on_death="raise"`` hears of it. After ``sys.exit()`` the replica
    leaves if its gradient is in an update within a second; otherwise it has failed.
    """

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        rank: int,
        *,
        timeout: float | None = None,
        owners: Owners = "mine",
    ) -> None:
        """Attach as soon as the chief has created the parameters and the group.

        Args:
            model: A model of the chief's architecture; its parameters' contents do not matter.
            shared_name: The chief's.
            rank: From 0, less than ``total_num_replicas``.
            timeout: Seconds to wait, here for the chief and in `step` for the update; None: for
                ever (unlike `AccumulatorGroup.attach`, which does not wait then).
            owners: Whose segments may be attached.

        Raises:
            DeadlineExceededError: No chief came within the timeout.
            InvalidArgumentError: A bad rank, or the model is not the chief's.
            Everything else as for `AccumulatorGroup.attach`.
        """
        self._rank = arguments.int64(rank, "rank")
        self._timeout = timeout
        with ExitStack() as on_failure:
            self._group, self._shared = run.attach(model, shared_name, timeout, owners)
            on_failure.callback(self._group.close)
            on_failure.callback(self._shared.close)
            on_failure.callback(self._shared._release, at_once=False)  # noqa: SLF001
            self._run, self._left = self._shared[run.RUN], self._shared[run.LEFT]
            self._closed = False
            self._total = len(self._left)
            self._asynchronous = bool(self._run[run.ASYNCHRONOUS])
            self._check_rank()
            self._place(model)
            # The first number of an asynchronous replica's gradients: random, so that not even a
            # killed replica of this rank has used it.
            self._serial = secrets.randbits(run.SERIAL_BITS)
            self._made = 0  # how many calls of `step` have returned
            self._handed: bool | None = None  # whether this step's gradient counts; None: not sent
            self._follow(self._step_without(run.LEAVING + self._rank, timeout))
            self._rows = {name: rows_of(found) for name, found in self._tables.items()}
            for name, rows in self._rows.items():
                rows.share(self._shared[name], trains=True)
            if self._rows:
                clipping.watch(model)
            self._group._handle.be_contributor(self._rank)  # noqa: SLF001  from now on it counts
            on_failure.pop_all()

    def _place(self, model: nn.Module) -> None:
        self._model, members = model, self._group.members
        self._parameters: dict[str, Any] = {**on_model.parameters(model)}
        self._tables = on_model.tables(model)
        self._trained = {name: value for name, value in self._parameters.items() if name in members}
        self._sparse = frozenset(
            name for name, spec in members.items() if isinstance(spec, IndexedSlicesSpec)
        )
        self._places = on_model.place(self._parameters, self._shared)
        # Each buffer with its module, which may assign another tensor to this name later.
        self._shared_buffers = [
            (name, model.get_submodule(path.rpartition(".")[0]), on_model.in_memory(shared))
            for path, _ in model.named_buffers()
            if (shared := self._shared.get(name := on_model.plain(path))) is not None
        ]

    def _check_rank(self) -> None:
        if not 0 <= self._rank < self._total:
            raise InvalidArgumentError(f"rank must be 0 to {self._total - 1}, but was {self._rank}")

    def _step_without(self, contributor: int, timeout: float | None) -> int:
        """Return the step of the first round that this contributor is not in.

        A synchronous round ends when it has as many contributors as there are replicas. A replica
        that leaves counts as another contributor than its gradients; a round must not have both.
        """
        step = self._group.global_step
        if not self._asynchronous and contributor in self._group.contributors(timeout=timeout):
            with suppress(FinishedError):  # the chief has ended the training meanwhile
                step = self._group.wait_step(step, timeout=timeout)
        return step

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each buffer's name, the model's tensor and the shared one."""
        for name, module, shared in self._shared_buffers:
            yield name, getattr(module, name.rpartition(".")[2]).detach(), shared

    def _follow(self, step: int) -> None:
        """Go on with this step of the group; it is read before parameters, so never too new."""
        self._step = step
        self._global_step = int(self._run[run.STEP])
        for _, own, shared in self._buffers():
            own.copy_(shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with ExitStack() as last:
            last.callback(self.close)
            if error is not None:
                last.enter_context(suppress(DeadlineExceededError))  # `error` is raised instead
            last.push(self._group)  # records the error if `leave` fails
            if error is None:
                self.leave()
            elif _core.is_in_order(error):
                self._leave(_AT_EXIT if self._timeout is None else min(self._timeout, _AT_EXIT))
            else:
                self._group.__exit__(kind, error, traceback)  # records that this replica failed

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is this process's, and is neither copied nor pickled: "
            "make one in the process that computes, from its model, the name and the rank"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._rank} of {self._total}, {self._group.shared_name!r}, "
            f"at step {self._global_step}>"
        )

    @property
    def rank(self) -> int:
        """This replica's number."""
        return self._rank

    @property
    def total_num_replicas(self) -> int:
        """How many replicas there are."""
        return self._total

    @property
    def global_step(self) -> int:
        """How many updates the parameters had when this replica's step began."""
        return self._global_step

    @property
    def running(self) -> bool:
        """True until the chief ends the training or this object is closed."""
        return not self._closed and self._group.running

    def step(self, *, weight: int = 1) -> bool:
        """Hand over the gradients that ``loss.backward()`` has left, and clear them.

        A synchronous replica then waits for the chief's update. An asynchronous replica waits
        before, while as many gradients are pending as the chief admits.

        Args:
            weight: How many samples the loss is averaged over, if batches differ in size.

        Returns:
            Whether the gradient is in an update; False if it came too late, or the training has
            ended.

        Raises:
            DeadlineExceededError: The timeout passed. A synchronous replica's gradient may be in
                the round: the next `step` only waits on. An asynchronous replica's gradient is not:
                the next `step` tries again.
            InvalidArgumentError: A gradient is malformed; the message names the parameter.
            FailedPreconditionError: The model is not in shared memory any more, or has got another
                parameter; or a parameter requires grad that did not when the chief shared it.
            ResourceExhaustedError: Shared memory is full.
        """
        before = self._global_step
        if self._handed is None:
            self._handed = self._hand_over(weight)
        for parameter in self._trained.values():
            parameter.grad = None
        for rows in self._rows.values():
            rows.clear()
        if self._asynchronous and not self._closed:
            self._follow(self._group.global_step)
        elif self.running:
            with suppress(FinishedError):
                self._follow(self._group.wait_step(self._step, timeout=self._timeout))
        counts, self._handed = self._handed, None
        self._made += 1
        # Loading a checkpoint or ending the training drops accepted gradients: no update has them.
        return counts and (self._asynchronous or int(self._run[run.STEP]) > before)

    def _hand_over(self, weight: int) -> bool:
        self._shared._handle.check_writes()  # noqa: SLF001
        on_model.check_in_place(self._parameters, self._places)
        on_model.check_same(self._model, self._parameters | self._tables, with_grad=True)
        on_model.check_trained(self._parameters, self._trained)
        gradient: dict[str, Any] = dict(on_model.gradients(self._trained, self._sparse))
        gradient |= {
            name: pending
            for name, rows in self._rows.items()
            if (pending := rows.gradient()) is not None
        }
        gradient |= {
            name: own
            for name, own, shared in self._buffers()
            if name in self._group.members and not torch.equal(own, shared)
        }
        contributor, step = self._rank, self._step
        if self._asynchronous:
            contributor, step = self._rank + self._total * self._serial, NEVER_STALE
        counts = self.running and self._group.apply(
            gradient, step, contributor=contributor, weight=weight, timeout=self._timeout
        )
        self._serial += 1
        return counts

    def leave(self) -> None:
        """Tell the chief not to wait for this replica: it has no more data. Idempotent.

        A synchronous replica first waits until its gradient is in an update. A later gradient from
        a replica of this rank makes the chief wait for it again.

        Raises:
            DeadlineExceededError: The timeout passed.
        """
        self._leave(self._timeout)

    def _leave(self, timeout: float | None) -> None:
        if self.running and not self._left[self._rank]:
            self._step_without(self._rank, timeout)
            self._group.apply(
                {}, NEVER_STALE, contributor=run.LEAVING + self._rank, timeout=timeout
            )

    def close(self) -> None:
        """Detach, without leaving. Idempotent.

        The model's parameters stay the shared ones, which others go on changing; when this process
        first writes to one, all become its own. The rows of a `TableEmbedding` belong to the
        training and cannot be read any more.
        """
        self._closed = True
        for rows in self._rows.values():
            rows.leave(keep=False)
        self._group.close()
        try:
            self._shared._release(at_once=False)  # noqa: SLF001
        finally:
            self._shared.close()
