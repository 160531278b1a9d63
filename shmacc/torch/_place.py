"""Makes the parameters and group of a training on its host, and finds other chiefs."""

from typing import Any

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._parameters.parameters import Parameters
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment.options import BY_MAKER
from shmacc.torch import _other_chiefs as other_chiefs
from shmacc.torch._updates import Atomic, InPlace


class OneHost:
    """A training on the chief's host; `shmacc.ray.SyncReplicas` trains on a cluster's hosts."""

    def updates(self, optimizer: Any, *made: Any, **options: Any) -> InPlace | Atomic:
        """Make the shared arrays, or attach to them; `made` and `options` are their arguments."""
        options["unlink_on_close"] = BY_MAKER
        if optimizer is None:
            return InPlace(SharedArrays(*made, **options))
        return Atomic(Parameters(*made, optimizer=optimizer, **options))

    def group(self, _: InPlace | Atomic, /, *made: Any, **options: Any) -> AccumulatorGroup:
        """Make the group, or attach to it; `made` and `options` are its arguments."""
        return AccumulatorGroup(*made, unlink_on_close=BY_MAKER, **options)

    def catch_up(self, updates: InPlace | Atomic, group: AccumulatorGroup) -> None:
        """If a chief died before it advanced the group's step to the parameters' step, do so now.

        The group may also be new: a chief that died in `close` may have removed only the old group.
        If a living chief has a round, or the group knows of an unfinished update, this does
        nothing: the end of that round advances the step.
        """
        if updates.done > group.global_step:
            stats = group.stats()
            if stats.update is None and stats.round_pid is None:
                group.advance_step(updates.done)

    def living_chiefs(self, shared_name: str) -> list[str]:
        """Return the living processes that have taken rounds."""
        return other_chiefs.living(shared_name)
