"""The chiefs of synchronous and of asynchronous training."""

from typing import Any

from torch import nn

from shmacc._segment.options import IfExists, Owners
from shmacc._values import arguments
from shmacc.errors import InvalidArgumentError
from shmacc.torch._chief import Chief
from shmacc.torch._optimizers import OfModel, Schedule


class SyncReplicas(Chief):
    """Synchronous training with backup replicas: the chief's side, after TensorFlow's optimizer.

    Each round averages ``replicas_to_aggregate`` gradients that were computed from the current
    parameters, and drops those that come later. So it does not wait for the slowest
    ``total_num_replicas - replicas_to_aggregate`` replicas, called backups. The mean is that of
    ``DistributedDataParallel`` if replicas have equal batches; it is weighted by samples if they
    say how many they had.

    The model's parameters and buffers are in shared memory from now on; they are the same objects,
    and an optimizer may have them already. After a round, buffers (running statistics of
    batch normalisation) are the mean of the replicas' buffers; but those that the chief writes in
    the round's block are as it wrote them. Evaluate in ``model.eval()``.

    Parameters that do not require grad are shared but not trained. A parameter without a gradient
    in any replica has ``.grad`` None; tied parameters count as one. Weights of `nn.Embedding` and
    `nn.EmbeddingBag` with ``sparse=True`` have sparse gradients. Any ``torch.optim`` optimizer that
    needs no closure will do; its updates are lost or half done if the chief dies. Updates of
    `shmacc.optim` (``optimizer=``) survive that. The chief schedules learning rates and clips.

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
            model: On the CPU.
            shared_name: What replicas attach to; ``shared_name + ".params"`` are the parameters.
            total_num_replicas: How many replicas there are; all ranks are below this.
            replicas_to_aggregate: How many gradients an update needs; None: all replicas'. Replicas
                that have left are not waited for.
            optimizer: For all parameters that require grad (float32 or float64): one of
                `shmacc.optim`; a mapping from patterns of names to optimizers, where the first
                match counts, as in ``{"emb*": Adagrad(0.05), "*": Adam(1e-3)}``; or, for all or in
                a mapping, the result of `optimizer_of` for one of torch. Parameters and slots are
                then `Parameters`: each round changes them once, wholly or not at all, even if a
                chief dies. None: the block calls an optimizer of torch.
            schedule: A function from the number of an update to its learning rate, as for `round`.
                It is called here, too, to check what it returns.
                It must depend on nothing else: a dead chief's replacement calls it, too. None: the
                optimizers' own rates.
            initial: What a new training starts from: a state dict, or a model that has been
                trained. None: from `model`. A training that exists goes on from what it has.
            mode: Permission bits; this and the next two are as for an accumulator.
            owners: Whose segments may be attached.
            if_exists: "replace" if this run is not to go on from what a killed run left.

        Raises:
            InvalidArgumentError: A bad argument; the model is not on the CPU, or has nothing to
                train; two of its tensors share memory; what exists is another model's, or has
                another optimizer; a parameter has no optimizer, or its dtype allows none; a
                schedule without an optimizer, or one that does not return a learning rate.
            RuntimeError: `initial` is of another model; torch's message.
            Everything else as for `AccumulatorGroup` and `SharedArrays`.
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
    """Asynchronous training: each round averages the gradients that have come, at least one.

    Replicas do not wait for updates, and read parameters while they are updated. A gradient may
    come from parameters that are some updates old. A replica waits while ``capacity`` gradients
    are pending.

    Everything else as for `SyncReplicas`.
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
        """Create or take over, as `SyncReplicas`.

        Args:
            model: On the CPU.
            shared_name: What replicas attach to.
            total_num_replicas: How many replicas there are.
            capacity: How many gradients may wait for the chief; None: as many as there are
                replicas.
            optimizer: As for `SyncReplicas`, as are the next two.
            schedule: From the number of an update to its learning rate.
            initial: What a new training starts from.
            mode: Permission bits.
            owners: Whose segments may be attached.
            if_exists: What to do with existing ones.

        Raises:
            As for `SyncReplicas`.
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
