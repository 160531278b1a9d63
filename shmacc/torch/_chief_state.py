"""Checks, saves and loads the model that a chief trains in shared memory."""

from typing import Any

import torch
from torch import nn

from shmacc._accumulators import saved_state
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._base.array_types import ValueArray
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc.errors import InvalidArgumentError
from shmacc.torch import _model as on_model
from shmacc.torch import _run as run
from shmacc.torch._buffers import Buffers
from shmacc.torch._other_chiefs import OtherChiefs
from shmacc.torch._tables import TableEmbedding
from shmacc.torch._turn import Turn
from shmacc.torch._updates import Atomic, InPlace


class ModelInMemory:
    """The methods of a chief that check, save and load its model."""

    _asynchronous: bool
    _model: nn.Module
    _own: dict[str, torch.Tensor]
    _parameters: dict[str, nn.Parameter]
    _tables: dict[str, TableEmbedding]
    _buffers: Buffers
    _places: dict[str, Any]
    _shared: SharedArrays
    _updates: InPlace | Atomic
    _group: AccumulatorGroup
    _others: OtherChiefs
    _turn: Turn
    _run: ValueArray
    _left: ValueArray
    _total: int

    @property
    def global_step(self) -> int:
        """How many updates the parameters have had; skipped updates count, too."""
        return int(self._run[run.STEP])

    @property
    def _trained(self) -> dict[str, Any]:
        """The parameters, and the embeddings with tables: all that have a ``.grad`` in a block."""
        return {**self._parameters, **self._tables}

    def _give_up(self) -> None:
        """Give up the round if `active` has entered it."""
        self._turn.give_up()

    def _check_model(self) -> None:
        self._shared._handle.check_writes()  # noqa: SLF001
        self._check_shared()

    def _check_shared(self) -> None:
        on_model.check_in_place(self._own, self._places)
        on_model.check_same(self._model, self._trained, with_grad=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state and the step.

        It includes the state of optimizers of `shmacc.optim`, but not of torch's.

        Like a module's `state_dict`, it does not copy parameters: save it before the next round.
        It has no timeout: it waits as long as another process is stopped in an update.

        Raises:
            FailedPreconditionError: The model is not in shared memory any more; or a buffer was
                written outside of a block.
        """
        self._check_model()
        if self._turn.state != "blocked":  # a block's own writes are not shared yet
            self._buffers.check()
        return {
            "step": self.global_step,
            "model": on_model.state_of(self._model),
            **self._updates.saved(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a result of `state_dict`. Load the state of torch's optimizers yourself.

        Pending gradients are dropped. Running replicas go on with these parameters and this step,
        without a restart. Replicas that have left stay away. Like `state_dict`, it has no timeout.

        Raises:
            RuntimeError: The state is of another model. The message is torch's.
            InvalidArgumentError: The state lacks the state of these optimizers of `shmacc.optim`,
                or it is only a model's.
            FailedPreconditionError: The model is not in shared memory any more.
        """
        if not {"step", "model"} <= state.keys():
            raise InvalidArgumentError(
                "This is no state_dict() of replicas. A model's own is what a new training starts "
                "from: SyncReplicas(model, ..., initial=state)"
            )
        self._check_shared()  # in other memory, nobody would see what is loaded
        # An open round has gradients from the parameters that this load replaces.
        self._give_up()
        self._others.forget()
        # A replica may compute a gradient from a mixture of old and new parameters. The gradient
        # has the group's present step: `advance_step` below drops it, or makes it stale.
        # Gradients of asynchronous replicas are never stale: only a restore drops them.
        numbers = self._run.copy()
        numbers[run.STEP] = state["step"]
        left, pending = self._left.copy(), self._group.contributors()
        left[pending[pending >= run.LEAVING] - run.LEAVING] = True  # no round will record this
        values = {run.RUN: numbers, run.LEFT: left}
        self._updates.load(self._group, self._model, state, values)
        if self._asynchronous and self._group.running:
            self._group.restore(saved_state.emptied(self._group.state(), self._updates.done))
        self._group.advance_step(self._updates.done)
        self._buffers.changing = True
        self._buffers.follow()
