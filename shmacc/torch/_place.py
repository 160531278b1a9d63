"""The place of a training: makes parameters and group there, and finds other chiefs."""

from typing import Any

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._parameters.parameters import Parameters
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment.options import BY_MAKER
from shmacc.torch import _other_chiefs as other_chiefs
from shmacc.torch._updates import Atomic, InPlace


class OneHost:
    """The chief's own host; `shmacc.ray.SyncReplicas` has all hosts of a cluster."""

    def updates(self, optimizer: Any, *made: Any, **options: Any) -> InPlace | Atomic:
        """Make the shared arrays, or attach to them; `made` and `options` are their arguments."""
        options["unlink_on_close"] = BY_MAKER
        if optimizer is None:
            return InPlace(SharedArrays(*made, **options))
        return Atomic(Parameters(*made, optimizer=optimizer, **options))

    def group(self, _: InPlace | Atomic, /, *made: Any, **options: Any) -> AccumulatorGroup:
        """Make the group of these updates, or attach to it; its arguments follow."""
        return AccumulatorGroup(*made, unlink_on_close=BY_MAKER, **options)

    def catch_up(self, updates: InPlace | Atomic, group: AccumulatorGroup) -> None:
        """Advance the group's step to that of the parameters, if a chief died before it did so.

        A chief that died in `close` may have removed the group but not the parameters: then this
        group is new. If a living chief has a round, or the group knows of an unfinished update,
        this does nothing: the end of that round advances the step.
        """
        if updates.done > group.global_step:
            stats = group.stats()
            if stats.update is None and stats.round_pid is None:
                group.advance_step(updates.done)

    def living_chiefs(self, shared_name: str) -> list[str]:
        """Return which processes have taken rounds and live."""
        return other_chiefs.living(shared_name)
