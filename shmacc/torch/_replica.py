"""A replica's side of training."""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from shmacc import _core
from shmacc._accumulators.accumulator import NEVER_STALE
from shmacc._segment.options import Owners
from shmacc._values import arguments
from shmacc._values.specs import IndexedSlicesSpec
from shmacc.errors import DeadlineExceededError, FinishedError, InvalidArgumentError
from shmacc.torch import _clipping as clipping
from shmacc.torch import _model as on_model
from shmacc.torch import _run as run
from shmacc.torch._buffers import alike
from shmacc.torch._handing import Gradients, Handing, Position
from shmacc.torch._memory import check_attributes
from shmacc.torch._tables import rows_of

_AT_EXIT = 1.0
"""The most seconds that an exit in order waits. There may be no chief any more, or the chief may be
waiting for this process to end."""


def _rank_of_worker() -> int:
    found = os.environ.get("SHMACC_RANK")
    if found is not None and found.isdecimal():
        return int(found)
    where = {
        None: "is not set: this process is no worker of shmacc.run or shmacc-run",
        "-1": "is -1: this process is the chief of shmacc.run or shmacc-run",
    }.get(found, f"is {found!r}, which is no rank")
    raise InvalidArgumentError(f"rank must be given, since SHMACC_RANK {where}")


class Replica:
    """A process that computes gradients, for `SyncReplicas` or `AsyncReplicas`.

    The model's parameters are in shared memory from now on. Only the chief can write to them: a
    write here (an optimizer's step) is undone, and raises FailedPreconditionError. Buffers are this
    process's own; each step copies the shared buffers into them.

    A replica that is killed and started again computes the batch of `global_step` again; the round
    counts its gradient once. When a ``with`` block ends without an exception, its replica leaves:
    the chief no longer waits for it. After an exception it does not leave, because a replacement
    may be started; a chief with ``on_death="raise"`` gets WorkerDiedError. After ``sys.exit()``,
    the replica leaves if its gradient is in an update within a second; otherwise it has failed.
    """

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        rank: int | None = None,
        *,
        timeout: float | None = None,
        owners: Owners = "mine",
    ) -> None:
        """Attach as soon as the chief has created the parameters and the group.

        Args:
            model: A model of the chief's architecture; its parameters' contents do not matter.
            shared_name: The name that the chief was given.
            rank: From 0, less than ``total_num_replicas``. None: the rank that `shmacc.run` or the
                command ``shmacc-run`` has set for this worker (``SHMACC_RANK``).
            timeout: Seconds to wait, here for the chief and in `step` for the update; None: for
                ever (but `AccumulatorGroup.attach` does not wait with None).
            owners: Whose segments may be attached.

        Raises:
            DeadlineExceededError: No chief came within the timeout.
            InvalidArgumentError: The rank is bad, or is None outside of a run's worker; or the
                model differs from the chief's.
            All other errors are those of `AccumulatorGroup.attach`.
        """
        self._rank = _rank_of_worker() if rank is None else arguments.int64(rank, "rank")
        self._timeout = timeout
        on_failure = ExitStack()
        try:
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
            # The first number of an asynchronous replica's gradients. It is random, so that no
            # earlier replica of this rank, even a killed one, has used it.
            self._serial = secrets.randbits(run.SERIAL_BITS)
            rows = {name: rows_of(found) for name, found in self._tables.items()}
            self._gradients = Gradients(self._trained, rows)
            self._handed: Handing | None = None  # None: nothing is on its way
            step = self._step_without(run.LEAVING + self._rank, timeout)
            self._at = Position(step, 0, -1)
            self._follow(step)
            for name, own in rows.items():
                on_failure.callback(own.put, own.source)
                own.share(self._shared, name, trains=True)
            if rows:
                clipping.watch(model)
            self._group._handle.on_repeat(None)  # noqa: SLF001  `step` and `leave` repeat some
            self._group._handle.be_contributor(self._rank)  # noqa: SLF001  now a death is reported
        except BaseException:
            on_failure.close()
            raise

    def _place(self, model: nn.Module) -> None:
        self._model, members = model, self._group.members
        self._parameters: dict[str, Any] = {**on_model.parameters(model)}
        self._tables = on_model.tables(model)
        self._trained = {name: value for name, value in self._parameters.items() if name in members}
        self._sparse = frozenset(
            name for name, spec in members.items() if isinstance(spec, IndexedSlicesSpec)
        )
        check_attributes(model, self._parameters)
        self._places = on_model.place(self._parameters, self._shared)
        self._buffers_before: dict[str, torch.Tensor] = {}  # the contents at the last update
        # Keep the modules, not their buffers: a module may assign another tensor to the name.
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

        A synchronous round ends when it has one contributor for each replica. A replica that leaves
        uses another contributor than for its gradients. So a round must not have both.
        """
        step = self._group.global_step
        if not self._asynchronous and contributor in self._group.contributors(timeout=timeout):
            with suppress(FinishedError):  # the chief has just ended the training
                step = self._group.wait_step(step, timeout=timeout)
        return step

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each buffer's name, the model's tensor and the shared tensor."""
        for name, module, shared in self._shared_buffers:
            yield name, getattr(module, name.rpartition(".")[2]).detach(), shared

    def _follow(self, step: int) -> None:
        """Go on with this step of the group: copy the shared buffers, then keep the position."""
        position = Position(step, int(self._run[run.STEP]), self._at.made + 1)
        for name, own, shared in self._buffers():
            own.copy_(shared)
            self._buffers_before[name] = own.clone()
        self._at = position

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
            f"at step {self.global_step}>"
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
        return self._at.global_step

    @property
    def running(self) -> bool:
        """True until the chief ends the training or this object is closed."""
        return not self._closed and self._group.running

    def step(self, *, weight: int = 1) -> bool:
        """Send the gradients that ``loss.backward()`` has left to the chief, and clear them.

        A synchronous replica then waits for the chief's update. An asynchronous replica waits
        before it sends, while the chief's ``capacity`` is used up.

        After an exception, such as Ctrl-C, the next call finishes what this call had begun: each
        gradient counts once. If there are new gradients by then, an asynchronous replica sends
        them, too. A synchronous replica's come too late, unless this call got its update.

        Args:
            weight: The number of samples in the loss's mean, if batches differ in size.

        Returns:
            Whether the gradient is in an update; False if it came too late, or the training has
            ended.

        Raises:
            DeadlineExceededError: The timeout passed. A synchronous replica's gradient may be in
                the round: the next `step` only waits. An asynchronous replica's gradient is not in
                the round: the next `step` tries again.
            InvalidArgumentError: A gradient is malformed; the message names the parameter.
            FailedPreconditionError: The model is not in shared memory any more, or has got another
                parameter; or a parameter has begun to require grad since it was shared.
            ResourceExhaustedError: Shared memory is full.
        """
        try:
            return self._hand_on(weight)
        except BaseException:
            self._settle()
            raise

    def _hand_on(self, weight: int) -> bool:
        handing = self._handed
        if handing is not None:  # an exception ended the call that began this handing
            self._apply(handing)
            if self._gradients.has_later(handing):
                if self._asynchronous or self._at is not handing.at:
                    handing = None
                else:
                    if not self._gradients.are_again(handing):
                        self._handed = handing = replace(handing, late=True)
                    self._gradients.drop()
        if handing is None:
            handing = self._hand_over(weight)
        if self._at is handing.at and not self._closed:
            self._go_on(handing)
        counts = bool(handing.answer.counts) and not handing.late
        # Loading a checkpoint or ending the training drops accepted gradients: no update has them.
        if not self._asynchronous and int(self._run[run.STEP]) <= handing.at.global_step:
            counts = False
        self._handed = None
        return counts

    def _hand_over(self, weight: int) -> Handing:
        self._shared._handle.check_writes()  # noqa: SLF001
        on_model.check_in_place(self._parameters, self._places)
        on_model.check_same(self._model, self._parameters | self._tables, with_grad=True)
        on_model.check_trained(self._parameters, self._trained)
        contributor = self._rank
        if self._asynchronous:
            self._serial += 1  # first, so that an exception cannot make a number be used twice
            contributor += self._total * self._serial
        self._handed = handing = self._gradients.begin(self._at, contributor, weight)
        self._apply(handing)
        return handing

    def _apply(self, handing: Handing) -> None:
        if handing.answer.counts is not None:
            return
        self._gradients.set_aside(handing)
        if not self.running:
            handing.answer.counts = False
            return
        gradient: dict[str, Any] = dict(on_model.gradients(handing.gradients, self._sparse))
        for name, pending in handing.rows.items():
            if pending:
                gradient[name] = self._gradients.rows[name].gradient(pending)
        gradient |= {
            name: own
            for name, own, _ in self._buffers()
            # Compare with the last update's buffer: the shared buffer may be newer.
            if name in self._group.members and not alike(own, self._buffers_before[name])
        }
        self._group._awaited = handing.contributor, handing.answer  # noqa: SLF001
        self._group.apply(
            gradient,
            NEVER_STALE if self._asynchronous else handing.at.step,
            contributor=handing.contributor,
            weight=handing.weight,
            timeout=self._timeout,
        )

    def _go_on(self, handing: Handing) -> None:
        """Go on to the next step; in a synchronous training, wait for the update first."""
        if self._asynchronous:
            self._follow(self._group.global_step)
        elif self.running:
            with suppress(FinishedError):
                self._follow(self._group.wait_step(handing.at.step, timeout=self._timeout))

    def _settle(self) -> None:
        """After an exception, finish or undo `step`, unless that needs a wait."""
        handing = self._handed
        if handing is None or self._closed or self._gradients.has_later(handing):
            return
        if handing.answer.counts is None:
            self._gradients.put_back(handing)
            self._handed = None
        elif self._at is handing.at and (
            self._asynchronous or self._group.global_step > handing.at.step
        ):
            self._go_on(handing)

    def leave(self) -> None:
        """Tell the chief not to wait for this replica: it has no more data. Idempotent.

        A synchronous replica first waits until its gradient is in an update. If a replica of this
        rank sends a gradient later, the chief waits for this rank again.

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

        The model's parameters stay in shared memory, where other processes change them. The first
        write by this process to any parameter makes private copies of all. The rows of a
        `TableEmbedding` belong to the training and cannot be read any more.
        """
        self._closed = True
        for rows in self._gradients.rows.values():
            rows.leave(keep=False)
        self._group.close()
        try:
            self._shared._release(at_once=False)  # noqa: SLF001
        finally:
            self._shared.close()
