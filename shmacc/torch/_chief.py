"""The chief's side of training: rounds that update shared parameters, checkpoints, the end."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.shared_arrays import SharedArrays
from shmacc._gradients import arguments
from shmacc._gradients.arguments import OnDeath
from shmacc._layout import names
from shmacc._opening.options import IfExists, Owners
from shmacc._records.taken import GroupTaken
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.torch import _model as on_model
from shmacc.torch import _run as run


@dataclass(frozen=True, slots=True)
class Update:
    """What a round's gradients are of.

    Attributes:
        step: The number of the update, from 0.
        replicas: The ranks whose gradients were averaged, ascending; of an asynchronous round, a
            rank for each gradient. Empty if those that were waited for have left instead: then no
            parameter has a gradient, and the update does not count.
        weight: The weights of the gradients, added up: samples, if replicas say how many they had.
    """

    step: int
    replicas: tuple[int, ...]
    weight: int


class Chief:
    """What synchronous and asynchronous training have in common."""

    _asynchronous: bool

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        total_num_replicas: int,
        capacity: int | None,
        *,
        mode: int | None,
        owners: Owners,
        if_exists: IfExists,
    ) -> None:
        total = arguments.int64(total_num_replicas, "total_num_replicas")
        if not 1 <= total <= run.MOST_REPLICAS:
            raise InvalidArgumentError(
                f"total_num_replicas must be 1 to {run.MOST_REPLICAS}, but was {total}"
            )
        names.segment_name(shared_name)  # there are no private ones
        own = on_model.tensors(model)
        members = on_model.member_specs(model)
        self._model = model
        self._parameters = on_model.parameters(model)
        self._total = total
        self._maker = os.getpid()
        numbers = np.zeros(5, np.int64)
        numbers[run.ASYNCHRONOUS] = self._asynchronous
        # Replicas attach to the group first, which is the last to be made.
        self._shared = SharedArrays(
            {name: value.detach() for name, value in own.items()}
            | {run.RUN: numbers, run.LEFT: np.zeros(total, np.bool_)},
            run.of_params(shared_name),
            mode=mode,
            owners=owners,
            if_exists=if_exists,
            unlink_on_close=True,
        )
        try:
            self._run, self._left = self._shared[run.RUN], self._shared[run.LEFT]
            self._check_kind(shared_name)
            self._run[run.STOPPED] = 0
            self._group = AccumulatorGroup(
                members,
                shared_name,
                reduction_type="CMEAN",
                mode=mode,
                owners=owners,
                if_exists=if_exists,
                unlink_on_close=True,
                capacity=capacity,
            )
        except BaseException:
            self._shared.close()
            raise
        # If a chief died between its update and the commit, what it took is in the parameters. And
        # one that died in `close` has left parameters without their group: this one is new.
        if self._run[run.DONE] > self._group.global_step:
            self._group.advance_step(int(self._run[run.DONE]))
        self._own = own
        self._places = on_model.place(own, self._shared)
        self._buffers = {name: value for name, value in own.items() if name not in self._parameters}

    def _check_kind(self, shared_name: str) -> None:
        if self._run[run.ASYNCHRONOUS] != self._asynchronous:
            raise InvalidArgumentError(
                f"The replicas of {shared_name!r} exist, and are "
                f"{'asynchronous' if self._run[run.ASYNCHRONOUS] else 'synchronous'}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._group.shared_name!r} of {self._total}, "
            f"at step {self.global_step}>"
        )

    @property
    def shared_name(self) -> str:
        """The name under which replicas find this."""
        return self._group.shared_name

    @property
    def global_step(self) -> int:
        """How many updates the parameters have had."""
        return int(self._run[run.STEP])

    @property
    def active(self) -> int:
        """How many replicas have not left: all, at first, whether they have come or not."""
        return self._total - int(np.count_nonzero(self._left))

    def round(
        self, *, timeout: float | None = None, on_death: OnDeath = "wait"
    ) -> AbstractContextManager[Update]:
        """Wait for gradients, and let the block update the parameters with their mean.

        At the beginning of the block ``.grad`` of each parameter is the mean, over all samples of
        the round if replicas say how many they had; None, if no replica had one. The block clips,
        and calls ``optimizer.step()``. At its end the replicas go on, with the new parameters.

        After an exception in the block, or the death of the process in it, parameters may be half
        updated: then rounds are a FailedPreconditionError until `load_state_dict` was called.

        Args:
            timeout: Seconds to wait for the gradients; None: for ever.
            on_death: "raise": WorkerDiedError if a replica's process died, or an exception left its
                ``with`` block; each ends one wait.

        Returns:
            A context manager whose value is the `Update`.

        Raises:
            DeadlineExceededError: The timeout passed; nothing was consumed.
            WorkerDiedError: A replica died or failed (``reasons``), and ``on_death`` is "raise";
                nothing was consumed.
            CancelledError: This object was closed by another thread, or another chief has ended the
                training.
            FailedPreconditionError: All replicas have left, or the training was ended; the
                parameters may be half updated; or the model is not in shared memory any more.
        """
        return self._round(timeout, on_death)

    @contextmanager
    def _round(self, timeout: float | None, on_death: OnDeath) -> Iterator[Update]:
        while True:
            if self._run[run.STOPPED]:
                raise FailedPreconditionError("The training has been ended")
            if not self.active:
                raise FailedPreconditionError("All replicas have left")
            with self._group.round(self._required(), timeout=timeout, on_death=on_death) as taken:
                # Another chief died, while this one waited, between its update and the commit:
                # these gradients are in it.
                done = taken.step < self._run[run.DONE]
                if not done:
                    self._check_whole()
                    on_model.check_in_place(self._own, self._places)
                    self._run[run.UPDATING] = 1
                    yield self._begin(taken)
                    self._end(taken)
            if not done:
                return

    def _required(self) -> int:
        raise NotImplementedError

    def _check_whole(self) -> None:
        """Refuse to go on from parameters that may be half updated.

        In the round, which another chief that lives would have.
        """
        if self._run[run.UPDATING]:
            raise FailedPreconditionError(
                "The parameters may be half updated: a chief has died in a round's block, or its "
                "block has raised. Go on from a checkpoint (load_state_dict)"
            )

    def _begin(self, taken: GroupTaken) -> Update:
        ranks = [int(who) % self._total for who in taken.contributors if who < run.LEAVING]
        leaving = len(taken.contributors) - len(ranks)
        weight = taken.weight - leaving
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in taken:
                gradient = taken[name].to_torch()
                if leaving:  # these counted in the divisor
                    gradient.mul_(taken.weight / weight)
                parameter.grad = gradient
        return Update(self.global_step, tuple(sorted(ranks)), weight)

    def _end(self, taken: GroupTaken) -> None:
        """Write what the block has not; the last store says that all is whole.

        A chief that dies before it leaves parameters that may be half updated, and says so; one
        that dies after it, before the group's commit, leaves the number of the round that the
        parameters have: the next chief gets the same gradients, and only commits them.
        """
        ranks = np.array([who for who in taken.contributors if who < run.LEAVING], np.int64)
        for parameter in self._parameters.values():
            parameter.grad = None
        for name, buffer in self._buffers.items():
            if name in taken:
                buffer.copy_(taken[name].to_torch())
        leaving = taken.contributors[taken.contributors >= run.LEAVING] - run.LEAVING
        self._left[ranks % self._total] = False  # has come back
        self._left[leaving] = True  # in an asynchronous round also after its last gradient
        self._run[run.STEP] += bool(len(ranks))
        self._run[run.DONE] = taken.step + 1
        self._run[run.UPDATING] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state, the step and who has left; not the optimizer's state.

        As that of a module, it has the parameters themselves: save it before the next round.
        """
        return {
            "step": self.global_step,
            "left": torch.from_numpy(self._left.copy()),
            "model": self._model.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; load the optimizer's state as well.

        Gradients that wait are dropped. Replicas that are running go on with these parameters and
        this step, without being started again.

        Raises:
            RuntimeError: The state of another model, in torch's words.
            InvalidArgumentError: That of another number of replicas.
        """
        if len(state["left"]) != self._total:
            raise InvalidArgumentError(
                f"The state is of {len(state['left'])} replicas, but there are {self._total}"
            )
        # Gradients from a mixture of old and new parameters carry the group's step of now, which
        # never goes back: they are dropped by the new one, or stale.
        self._run[run.UPDATING] = 1
        self._model.load_state_dict(state["model"])
        self._left[:] = np.asarray(state["left"])
        self._run[run.STEP] = state["step"]
        following = self._group.global_step + 1
        self._run[run.DONE] = following
        self._run[run.UPDATING] = 0
        self._group.advance_step(following)

    def close(self) -> None:
        """End the training: replicas that wait return, and the names are removed. Idempotent.

        The model keeps its parameters. A chief that is killed leaves the names, so that the one
        that is started in its place finds replicas and parameters. In a forked child of the chief
        this ends nothing.
        """
        try:
            if self._maker == os.getpid() and not self._run[run.STOPPED]:
                self._run[run.STOPPED] = 1
                self._group.advance_step(self._group.global_step + 1)  # wakes those that wait
                self._group.cancel()  # and another chief, which has no replicas now
                self._group.unlink()
                self._shared.unlink()
        finally:
            self._group.close()
            self._shared.close()
