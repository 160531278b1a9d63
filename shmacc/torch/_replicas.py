"""The chiefs of synchronous and of asynchronous training."""

from typing import Any

from torch import nn

from shmacc._segment.options import IfExists, Owners
from shmacc._values import arguments
from shmacc.errors import InvalidArgumentError
from shmacc.torch._chief import Chief
from shmacc.torch._optimizers import OfModel, Schedule


class SyncReplicas(Chief):
    """The chief of a synchronous training with backup replicas, modelled on TensorFlow's.

    Each round averages ``replicas_to_aggregate`` gradients that were computed from the current
    parameters, and drops later gradients. So it does not wait for the slowest
    ``total_num_replicas - replicas_to_aggregate`` replicas, called backups. If replicas have equal
    batches, the mean is the same as in ``DistributedDataParallel``. If they pass the sizes of their
    batches, it is weighted by samples.

    From now on, the model's parameters and buffers are in shared memory. They stay the same
    objects, and an optimizer may have them already. After a round, buffers (running statistics of
    batch normalisation) are the mean of the replicas' buffers; but a buffer that the chief writes
    in the round's block keeps what was written. Evaluate in ``model.eval()``.

    Parameters that do not require grad are shared but not trained. A parameter without a gradient
    in any replica has ``.grad`` None; tied parameters count as one. Weights of `nn.Embedding` and
    `nn.EmbeddingBag` with ``sparse=True`` have sparse gradients. Any ``torch.optim`` optimizer that
    needs no closure will do; if the chief dies, its updates may be lost or half done. Updates of
    `shmacc.optim` (``optimizer=``) survive that. The chief schedules learning rates and clips
    gradients.

    Use it as a context manager: `close` ends the training.
    """

    _asynchronous = False

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        *,
        total_num_replicas: int,
        replicas_to_aggregate: int | None = None,
        optimizer: OfModel = None,
        schedule: Schedule | None = None,
        initial: Any = None,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
    ) -> None:
        """Create the shared parameters and the group, or take a dead chief's place.

        If the parameters exist, the model gets their contents.

        Args:
            model: A model on the CPU.
            shared_name: The name for replicas; the parameters are ``shared_name + ".params"``.
            total_num_replicas: The number of replicas; ranks are 0 to below this.
            replicas_to_aggregate: How many gradients an update needs; None: one of each replica.
                The chief does not wait for replicas that have left.
            optimizer: For all parameters that require grad (float32 or float64): one of
                `shmacc.optim`; a mapping from patterns of names to optimizers, where the first
                match counts, as in ``{"emb*": Adagrad(0.05), "*": Adam(1e-3)}``; or, for all or in
                a mapping, the result of `optimizer_of` for an optimizer of torch. Parameters and
                slots are then in `Parameters`: each round changes them once, wholly or not at all,
                even if a chief dies. None: the block calls an optimizer of torch.
            schedule: A function from the number of an update to its learning rate, as for `round`.
                It must depend on nothing else, since a dead chief's replacement calls it, too. The
                constructor calls it as a check. None: the optimizers' own rates.
            initial: What a new training starts from: a state dict, or a trained model. None:
                `model`. An existing training goes on from its own parameters.
            mode: Permission bits, as for an accumulator.
            owners: Whose segments may be attached.
            if_exists: As for an accumulator. "replace": do not go on from what a killed run left.

        Raises:
            InvalidArgumentError: A bad argument; the model is not on the CPU, or has nothing to
                train; two of its tensors share memory; the existing training has another model or
                optimizer; a parameter has no optimizer, or a dtype that no optimizer accepts; there
                is a schedule without an optimizer, or it does not return a learning rate.
            RuntimeError: `initial` is of another model. The message is torch's.
            All other errors are those of `AccumulatorGroup` and `SharedArrays`.
        """
        total = arguments.int64(total_num_replicas, "total_num_replicas")
        required = total
        if replicas_to_aggregate is not None:
            required = arguments.int64(replicas_to_aggregate, "replicas_to_aggregate")
        if not 1 <= required <= total:
            raise InvalidArgumentError(
                f"replicas_to_aggregate must be 1 to total_num_replicas ({total}), but was "
                f"{required}"
            )
        self._aggregated = required
        super().__init__(
            model,
            shared_name,
            total,
            None,
            optimizer=optimizer,
            schedule=schedule,
            initial=initial,
            mode=mode,
            owners=owners,
            if_exists=if_exists,
        )

    def _required(self) -> int:
        return min(self._aggregated, self._present)


class AsyncReplicas(Chief):
    """The chief of an asynchronous training: a round averages all gradients that have come.

    A round has at least one gradient. Replicas do not wait for updates, and read parameters while
    they are updated. A gradient may come from parameters that are some updates old. A replica waits
    while ``capacity`` gradients are pending.

    Everything else is the same as for `SyncReplicas`.
    """

    _asynchronous = True

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        *,
        total_num_replicas: int,
        capacity: int | None = None,
        optimizer: OfModel = None,
        schedule: Schedule | None = None,
        initial: Any = None,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
    ) -> None:
        """Create the parameters and the group, or take a dead chief's place, like `SyncReplicas`.

        Args:
            model: A model on the CPU.
            shared_name: The name that replicas attach to.
            total_num_replicas: How many replicas there are.
            capacity: How many gradients may wait for the chief; None: the number of replicas.
            optimizer: The same as for `SyncReplicas`.
            schedule: A function from the number of an update to its learning rate.
            initial: What a new training starts from.
            mode: Permission bits.
            owners: Whose segments may be attached.
            if_exists: What to do with an existing training.

        Raises:
            The errors of `SyncReplicas`.
        """
        room = total_num_replicas if capacity is None else capacity
        super().__init__(
            model,
            shared_name,
            total_num_replicas,
            room,
            optimizer=optimizer,
            schedule=schedule,
            initial=initial,
            mode=mode,
            owners=owners,
            if_exists=if_exists,
        )

    def _required(self) -> int:
        return 1
