"""Makes a round's update in shared memory: in the round's block, or by `Parameters`."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.taken import GroupTaken
from shmacc._base.array_types import ValueArray
from shmacc._parameters import patterns
from shmacc._parameters.parameters import Parameters
from shmacc._parameters.patterns import LearningRate
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._parameters.tables import Table
from shmacc._values import arrays as as_arrays
from shmacc._values.conversions.torch import tensor
from shmacc._values.specs import TensorSpec
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.torch import _model as on_model
from shmacc.torch import _run as run
from shmacc.torch._block import BlockChanges
from shmacc.torch._tables import TableEmbedding, rows_of


class InPlace:
    """Updates that torch's optimizer makes in the block. The next chief notices a death there."""

    places_buffers = True

    def __init__(self, arrays: SharedArrays) -> None:
        self.arrays = arrays
        self._run = arrays[run.RUN]

    @property
    def done(self) -> int:
        """All rounds before this step of the group are in the parameters."""
        return int(self._run[run.DONE])

    def begin_with(self, tables: Mapping[str, TableEmbedding]) -> None:
        """Do nothing: there are no tables."""

    def check(self, group: AccumulatorGroup) -> None:  # noqa: ARG002
        """Refuse to go on from parameters that may be half updated.

        This is called while the round is open, so no other living chief has a round.
        """
        if run.half_updated(self._run):
            raise FailedPreconditionError(
                "The parameters may be half updated: a chief has died in a round's block, or its "
                "block has raised. Go on from a checkpoint (load_state_dict)"
            )

    def begins(self, group: AccumulatorGroup, step: int) -> bool:
        """Return whether a block begins an update; False if another chief has ended this round."""
        return step == group.global_step

    def begin(self, step: int) -> None:
        """Mark the parameters as half updated until `end` or `give_up`."""
        # Never 0 or 1: 0 means complete, and `load` writes 1.
        self._run[run.UPDATING] = step + 2

    def give_up(self) -> None:
        """Undo `begin`: the block has not begun, and nothing has changed."""
        self._run[run.UPDATING] = 0

    def end(
        self,
        taken: GroupTaken,
        trained: Mapping[str, Any],  # noqa: ARG002
        values: Mapping[str, ValueArray],
        block: BlockChanges,  # noqa: ARG002 - it has changed the arrays; there are no tables
    ) -> None:
        """Write `values`, which the block has not written. Then the store of DONE ends the update.

        If a chief dies or raises before this store, the arrays say that parameters may be half
        updated. If it does so after the store but before the group's commit, the arrays say that
        the round is in the parameters: the next round, with the same gradients, only commits.

        If the block or another chief has loaded a checkpoint meanwhile, nothing is written.
        """
        self.skip(taken, values)

    def skip(self, taken: GroupTaken, values: Mapping[str, ValueArray]) -> None:
        """End a round without applying its gradients. `values` are the same as for `end`."""
        if taken.step >= self.done:
            self._write(values, taken.step + 1)

    def _write(self, values: Mapping[str, ValueArray], done: int) -> None:
        for name, value in values.items():
            if name != run.RUN:
                self.arrays[name] = value
        # Write the arrays first: DONE says that all of them are written.
        self._run[run.STEP] = values[run.RUN][run.STEP]
        self._run[run.DONE] = done
        self._run[run.UPDATING] = 0

    def pass_over(self, taken: GroupTaken) -> None:
        """Do nothing: the round's update is in the parameters already."""

    def check_rate(self, rate: LearningRate) -> None:
        if rate is not None:
            raise InvalidArgumentError(
                "A learning_rate is for an optimizer of shmacc.optim; one of torch has its own"
            )

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint contains besides the model and the step."""
        return {}

    def load(
        self,
        group: AccumulatorGroup,
        model: nn.Module,
        state: Mapping[str, Any],
        values: Mapping[str, ValueArray],
    ) -> None:
        """Load a checkpoint as the state at the group's next step. `values` are as for `end`."""
        self._run[run.UPDATING] = 1
        on_model.load(model, state["model"])
        self._write(values, group.global_step + 1)


class Atomic:
    """Each update, with the run's numbers and the buffers, is an atomic update of `Parameters`."""

    places_buffers = False  # a forward pass writes buffers, but these arrays are read-only

    def __init__(self, arrays: Parameters) -> None:
        self.arrays = arrays
        arrays.snapshot()  # undoes a dead chief's half update before a read

    @property
    def done(self) -> int:
        """All rounds before this step of the group are in the parameters."""
        return self.arrays.step

    def begin_with(self, tables: Mapping[str, TableEmbedding]) -> None:
        """If these parameters have had no update, give tables their first rows.

        This is an update by a round of step 0, so a chief's death leaves it undone or complete.
        Only one chief's call has an effect, and only before any other round.
        """
        if self.done > 0:
            return
        whole = {name: rows_of(table).whole() for name, table in tables.items()}
        values = {name: rows for name, rows in whole.items() if len(rows[0])}
        if not values:
            return
        with (
            AccumulatorGroup({"nothing": TensorSpec((), np.float32)}) as alone,
            # Not `self.arrays`: if it spans hosts, only the group's own rounds can change it.
            Parameters.attach(self.arrays.shared_name, owners=self.arrays._owners) as own,  # noqa: SLF001
        ):
            alone.unlink()  # first, so that a death leaves no name
            alone.apply({}, 0)
            try:
                with alone.round(1) as taken:
                    own.skip(taken, values)
            except FailedPreconditionError:
                if self.done == 0:
                    raise

    def has_half(self, group: AccumulatorGroup) -> bool:
        """Return whether a dead chief has left half an update."""
        return group.stats().update is not None

    def check(self, group: AccumulatorGroup) -> None:
        """Undo a dead chief's half update, so that the block sees whole parameters."""
        if self.has_half(group):
            self.arrays.snapshot()

    def begins(self, group: AccumulatorGroup, step: int) -> bool:  # noqa: ARG002
        """Return False: blocks begin no updates, since `end` makes each update at once."""
        return False

    def begin(self, step: int) -> None:
        """Do nothing."""

    def give_up(self) -> None:
        """Do nothing: no update has begun."""

    def end(
        self,
        taken: GroupTaken,
        trained: Mapping[str, Any],
        values: Mapping[str, ValueArray],
        block: BlockChanges,
    ) -> None:
        """Make the update. `values` are the new contents of arrays without an optimizer."""
        changed: dict[str, Any] = {}
        for name, one in trained.items():
            given = on_model.given(one, taken[name]) if name in taken else None
            gradient = one.grad
            added = given is None and isinstance(one, nn.Parameter)
            if not added and not _alike(gradient, given):
                raise InvalidArgumentError(
                    f".grad of {name!r} is not as the round gave it: the block may change or "
                    "replace it, with the same shape and, if it is sparse, the same rows; it may "
                    "not remove it (zero_grad); and a table that the round does not have gets "
                    "none. `with ... as update: update.skip()` lets a round pass that is to "
                    "change nothing"
                )
            if gradient is not None and (given is None or not _is_same(gradient, given)):
                ids = block.ids.get(name)
                changed[name] = gradient.detach() if ids is None else (ids, gradient.detach())
        self.arrays.update(
            taken,
            values,
            gradients=changed,
            remove=block.removed,
            forget=block.forgotten,
            learning_rate=block.rate,
        )

    def skip(self, taken: GroupTaken, values: Mapping[str, ValueArray]) -> None:
        """End a round without applying its gradients. `values` are the same as for `end`."""
        self.arrays.skip(taken, values)

    def pass_over(self, taken: GroupTaken) -> None:
        """End a round whose update is in the parameters already."""
        self.arrays.skip(taken)  # finds the update done, and only ends the round

    def check_rate(self, rate: LearningRate) -> None:
        patterns.learning_rates(rate, self.arrays.optimizers)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint contains besides the model and the step."""
        return {
            "optimizer": {key: tensor(value) for key, value in self._optimizers_state().items()}
        }

    def _optimizers_state(self) -> dict[str, ValueArray]:
        """Return slots and update counts; if there are tables, last steps and the step."""
        others = {"arrays", "specs", "step"}
        if any(isinstance(found, Table) for found in self.arrays.values()):
            others.remove("step")
        return {
            key: value
            for key, value in self.arrays.state().items()
            if key not in others and not key.endswith((".array", ".ids", ".rows"))
        }

    def load(
        self,
        group: AccumulatorGroup,
        model: nn.Module,
        state: Mapping[str, Any],
        values: Mapping[str, ValueArray],
    ) -> None:
        """Load a checkpoint as the state at the group's next step. `values` are as for `end`."""
        saved = state.get("optimizer", {})
        if saved.keys() != self._optimizers_state().keys():
            raise InvalidArgumentError(
                "The state's 'optimizer' is not that of these optimizers of shmacc.optim"
            )
        copy = deepcopy(model)  # parameters are read-only; `restore` replaces all at once
        on_model.load(copy, state["model"])
        contents: dict[str, Any] = {n: own.detach() for n, own in on_model.tensors(copy).items()}
        contents |= values
        if self.has_half(group):
            with group.round(1) as taken:
                self.arrays.skip(taken)
        tables, restored = on_model.tables(copy), self.arrays.state()
        for key, value in saved.items():
            restored[key] = as_arrays.as_array(value, key)
        step, later = group.global_step + 1, 0
        if tables:  # the step must not go back; shift the rows' last steps with it
            later = max(0, step - int(restored["step"]))
            step = int(restored["step"]) + later
        for number, name in enumerate(restored["arrays"].tolist()):
            if name in tables:
                ids, rows = rows_of(tables[name]).whole()
                last = restored[f"{number}.last_steps"] + later
                restored |= {
                    f"{number}.ids": ids,
                    f"{number}.rows": rows,
                    f"{number}.last_steps": last,
                }
            else:
                restored[f"{number}.array"] = as_arrays.as_array(contents[name], name)
        restored["step"] = np.array(step)
        self.arrays.restore(restored)


def _alike(gradient: "torch.Tensor | None", given: "torch.Tensor | None") -> bool:
    if gradient is None or given is None:
        return gradient is given
    if (gradient.layout, gradient.shape) != (given.layout, given.shape):
        return False
    # torch's in-place operations replace a sparse tensor's values, but not its indices.
    return not given.is_sparse or torch.equal(gradient.coalesce().indices(), given.indices())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors have the same memory, element for element."""
    if one.is_sparse:
        one, other = one.coalesce().values(), other.coalesce().values()
    return (
        one.data_ptr() == other.data_ptr()
        and (one.dtype, one.stride()) == (other.dtype, other.stride())
        # torch may negate by returning a marked tensor on the same memory.
        and one.is_neg() == other.is_neg()
    )
