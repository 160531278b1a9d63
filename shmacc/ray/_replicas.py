"""`SyncReplicas` over hosts: the chief of `shmacc.torch`, with a group and parameters on Ray."""

import time
from collections.abc import Generator, Mapping
from typing import Any

import shmacc.torch
from shmacc._base.names import segment_name
from shmacc._parameters import copies
from shmacc._parameters.parameters import Parameters as LocalParameters
from shmacc._segment import removal
from shmacc.errors import FailedPreconditionError, FinishedError, InvalidArgumentError
from shmacc.ray._finding import groups_of
from shmacc.ray._group import AccumulatorGroup
from shmacc.ray._parameters import Parameters
from shmacc.ray._waits import ANSWER
from shmacc.torch._block import Update
from shmacc.torch._place import OneHost
from shmacc.torch._tables import TableEmbedding
from shmacc.torch._turn import Turn
from shmacc.torch._updates import Atomic


class _OfAllCopies(Atomic):
    """Updates that change the copies of all nodes. A node's actor undoes a half-done update."""

    def begin_with(self, tables: Mapping[str, TableEmbedding]) -> None:
        """Give tables their first rows, if this node's copy is new: the group begins with them."""
        if not copies.look(self.arrays).lineage.term:
            super().begin_with(tables)

    def has_half(self, _: Any) -> bool:
        return False


class _Group(AccumulatorGroup):
    """A group that can tell whether another chief has removed it."""

    @property
    def is_gone(self) -> bool:
        """Whether another chief has removed the group: a later training may have its name now."""
        return self._link.is_gone

    def finish(self) -> None:
        try:
            super().finish()
        except FailedPreconditionError:
            if not self.is_gone:
                raise
            self._link.closed = self._link.removed = True


class _Parameters(Parameters):
    """Parameters whose name is removed if their group cannot be made.

    Attributes:
        group: Their group, once it is made.
    """

    group: _Group | None = None

    def __init__(self, contents: Any, shared_name: str, **options: Any) -> None:
        name = segment_name(shared_name)
        self._is_new = options["if_exists"] == "replace" or not removal.is_taken(name)
        super().__init__(contents, shared_name, **options)

    def unlink(self) -> None:
        if self.group is None or not self.group.is_gone:
            super().unlink()

    def close(self) -> None:
        """Detach; remove this node's copy if it is new and no group uses it."""
        try:
            unused = self._is_new and self.group is None and not self._handle.closed
            if unused and not groups_of(self.shared_name, time.monotonic() + ANSWER):
                LocalParameters.unlink(self)
        finally:
            super().close()


class _Hosts(OneHost):
    """Where training takes place: on all hosts of a Ray cluster."""

    def updates(self, optimizer: Any, *made: Any, **options: Any) -> Atomic:
        if optimizer is None:
            raise InvalidArgumentError(
                "Over hosts an optimizer must be given: each node makes the updates of its copy, "
                "and one of torch that the block calls would change this process's alone. "
                "optimizer=shmacc.torch.optimizer_of(torch.optim.Adam(model.parameters())), or "
                "one of shmacc.optim"
            )
        return _OfAllCopies(_Parameters(*made, optimizer=optimizer, **options))

    def group(self, updates: Any, /, *made: Any, **options: Any) -> Any:
        params, members = updates.arrays, made[0]
        specs = params.member_specs()
        for name, spec in members.items():
            spec.parameters = specs[name].parameters
        params.group = _Group(*made, **options)
        return params.group

    def catch_up(self, updates: Any, group: Any) -> None:
        """Do nothing: the group's owner learns the step from the copies."""

    def living_chiefs(self, _: str) -> list[str]:
        return []  # no chief takes from a segment: the nodes' actors do


class SyncReplicas(shmacc.torch.SyncReplicas):
    """Synchronous training over many hosts: the chief's side.

    It has the arguments and methods of ``shmacc.torch.SyncReplicas``. On each node,
    `shmacc.torch.Replica` attaches to the node's own copy, and does not import Ray. Ranks must be
    unique in the cluster.

    The ``optimizer`` must be given, from `shmacc.optim` or `shmacc.torch.optimizer_of`, since each
    node makes the update by itself: torch's own optimizer would change only this process's copy.
    Call `load_state_dict` outside of a block. A void step (it ended without an update) counts in
    ``round_step``, but not in ``global_step``.

    Raises:
        InvalidArgumentError: There is no ``optimizer``.
        FailedPreconditionError: Ray is not initialised.
        Everything else as for ``shmacc.torch.SyncReplicas``, and for `AccumulatorGroup` and
        `Parameters` of this package.
    """

    _place = _Hosts()

    def _round(self, turn: Turn) -> Generator[Update, None, None]:
        try:
            yield from super()._round(turn)
        except FailedPreconditionError as error:
            group: Any = self._group
            if group.is_gone:
                raise FinishedError("Another chief has ended the training") from error
            raise
