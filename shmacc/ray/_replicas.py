"""torch's chief over hosts: that of one host, with the group and the parameters of all nodes."""

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
    """Each update is one of all copies. A node's actor undoes half an update of its copy."""

    def begin_with(self, tables: Mapping[str, TableEmbedding]) -> None:
        """Give tables their first rows, if this node's copy is new. The group takes it as it is."""
        if not copies.look(self.arrays).lineage.term:
            super().begin_with(tables)

    def has_half(self, _: Any) -> bool:
        return False


class _Group(AccumulatorGroup):
    """A group that another chief may remove."""

    @property
    def is_gone(self) -> bool:
        """Whether another chief has removed the group: its name may be that of a later training."""
        return self._link.is_gone

    def finish(self) -> None:
        try:
            super().finish()
        except FailedPreconditionError:
            if not self.is_gone:
                raise
            self._link.closed = self._link.removed = True


class _Parameters(Parameters):
    """Parameters that leave no name behind if they are made, and their group is not.

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
        """Detach; remove this node's copy if it is new and no group has got it."""
        try:
            unused = self._is_new and self.group is None and not self._handle.closed
            if unused and not groups_of(self.shared_name, time.monotonic() + ANSWER):
                LocalParameters.unlink(self)
        finally:
            super().close()


class _Hosts(OneHost):
    """All hosts of a Ray cluster."""

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
        return []  # the nodes' actors take segments


class SyncReplicas(shmacc.torch.SyncReplicas):
    """Synchronous training over many hosts: the chief's side.

    As ``shmacc.torch.SyncReplicas``, with all its arguments; nothing else changes. On each node
    `shmacc.torch.Replica` attaches to the node's own copy, and does not import Ray. Ranks are
    unique in the cluster.

    The ``optimizer`` must be given, of `shmacc.optim` or by `shmacc.torch.optimizer_of`, since each
    node makes the update by itself: an optimizer of torch would change this process's copy alone.
    `load_state_dict` is called outside of a block. A round that ended without an update, a void
    step, counts in ``round_step``, and not in ``global_step``.

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
