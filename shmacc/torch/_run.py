"""The data that chief and replicas share besides the model: the run's numbers, who has left.

These data are in shared arrays, under names that no parameter can have. Only the chief writes them,
in rounds. The training has ended when the group is finished.
"""

from contextlib import ExitStack

from torch import nn

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._attach import attach as attach_any
from shmacc._base.array_types import ValueArray
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment.options import Owners
from shmacc.errors import InvalidArgumentError
from shmacc.torch import _model as on_model

RUN, LEFT = ".run", ".left"
STEP, UPDATING, DONE, ASYNCHRONOUS = range(4)
"""The elements of RUN. STEP: how many updates there were. UPDATING: the running update. DONE: all
rounds before this step of the group are in the parameters. ASYNCHRONOUS: whether the training is
asynchronous. With `Parameters`, UPDATING and DONE are not used.

UPDATING is 0 (nothing runs), 1 (a checkpoint is being loaded), or the round's step + 2 (from the
beginning of its block). The one store of DONE ends the update."""


def half_updated(numbers: ValueArray) -> bool:
    """Return whether RUN's elements show a block or a load that has begun and not ended."""
    updating = int(numbers[UPDATING])
    return updating == 1 or updating > numbers[DONE] + 1


LEAVING = 2**62
"""A contributor of at least this number says that replica `contributor - LEAVING` leaves."""

MOST_REPLICAS = 2**20
SERIAL_BITS = 40
"""Bits of an asynchronous gradient's number. 2**SERIAL_BITS * MOST_REPLICAS is below LEAVING."""


def of_params(shared_name: str) -> str:
    """Return the name of the shared arrays."""
    return f"{shared_name}.params"


def attach(
    model: nn.Module, shared_name: str, timeout: float | None, owners: Owners
) -> tuple[AccumulatorGroup, SharedArrays]:
    """Attach to a chief's group and shared arrays, as soon as they exist.

    Args:
        model: A model of the chief's architecture.
        shared_name: The name that the chief was given.
        timeout: Seconds to wait; None: for ever.
        owners: Whose segments may be attached.

    Raises:
        The errors of `Replica`.
    """
    own = on_model.tensors(model)
    patience = float("inf") if timeout is None else timeout
    with ExitStack() as on_failure:
        group = AccumulatorGroup.attach(shared_name, timeout=patience, owners=owners)
        on_failure.callback(group.close)
        shared = attach_any(of_params(shared_name), owners=owners)
        on_failure.callback(shared.close)
        if not (isinstance(shared, SharedArrays) and {RUN, LEFT} <= shared.keys()):
            raise InvalidArgumentError(
                f"{shared_name!r} is not the name of SyncReplicas or AsyncReplicas: the shared "
                f"arrays {of_params(shared_name)!r} are no model's"
            )
        on_model.check_differences(own, on_model.tables(model), shared)
        on_model.unexpand(own)
        on_failure.pop_all()
    return group, shared
