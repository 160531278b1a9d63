"""The update of a round, in the form that the round's block gets, and may change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmacc._base.array_types import IndexArray
from shmacc._parameters.changes import steps_to_forget
from shmacc._parameters.members import checked_ids
from shmacc._parameters.patterns import LearningRate
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.torch._tables import TableEmbedding


@dataclass(slots=True)
class BlockChanges:
    """The tables of a round's block, and the changes that the block has asked for."""

    tables: Mapping[str, TableEmbedding]
    ids: Mapping[str, IndexArray]
    rate: LearningRate = None
    skipped: bool = False
    ended: bool = False
    removed: dict[str, IndexArray] = field(default_factory=dict)
    forgotten: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """The update that a round makes: its number, and the replicas whose gradients it has.

    Attributes:
        step: The number of the update, from 0.
        replicas: The ranks whose gradients were averaged, ascending; in an asynchronous round, one
            rank for each gradient. Empty if all replicas left while the round waited: then no
            parameter has a gradient, and `global_step` stays the same.
        weight: The total weight of the gradients: samples, if replicas pass sample counts.
        round_step: The group's step in this round, which tables record with each changed row.
            Unlike `step`, it also counts rounds that made no update.
    """

    step: int
    replicas: tuple[int, ...]
    weight: int
    round_step: int
    _block: BlockChanges = field(repr=False, compare=False)

    def skip(self) -> None:
        """Make the round end without an update: parameters, buffers and slots stay the same.

        What the block has written to buffers is undone.

        `global_step` moves on, and replicas go on to their next batch. Do not call an optimizer of
        torch in this block.

        Raises:
            FailedPreconditionError: The block has ended.
        """
        if self._block.ended:
            raise FailedPreconditionError("A round is skipped in its block, which has ended")
        if self._block.removed or self._block.forgotten:
            raise FailedPreconditionError(
                "This update removes rows of a table, so it cannot be skipped"
            )
        self._block.skipped = True

    def remove(self, embedding: TableEmbedding, ids: Any) -> None:
        """Remove the rows of these ids from a table, as the last part of the update.

        An id that comes back later begins with its initial row. Ids that have no row are ignored.

        Args:
            embedding: A `TableEmbedding` of the model.
            ids: Integers, from 0 to below 2**63.

        Raises:
            InvalidArgumentError: The embedding is not the model's, or an id is out of range.
            FailedPreconditionError: The block has ended; or the round is skipped.
        """
        name = self._name_to_remove_from(embedding)
        new = checked_ids(ids, f"the ids to remove of table {name!r}").reshape(-1)
        before = self._block.removed.get(name, new[:0])
        self._block.removed[name] = np.concatenate([before, new])

    def forget(self, embedding: TableEmbedding, rounds: int) -> None:
        """Remove, in the update, the rows of a table that the last `rounds` rounds did not change.

        Rows in this round's gradients stay. This reads all rows of the table.

        Args:
            embedding: A `TableEmbedding` of the model.
            rounds: A row is removed if its last update was more than this number of rounds ago,
                counted as in `round_step`; 0 or more.

        Raises:
            The errors of `remove`; also InvalidArgumentError if `rounds` is no integer or negative.
        """
        name = self._name_to_remove_from(embedding)
        self._block.forgotten[name] = steps_to_forget(rounds, name)

    def _name_to_remove_from(self, embedding: TableEmbedding) -> str:
        if self._block.ended or self._block.skipped:
            raise FailedPreconditionError(
                "Rows are removed in a round's block, which has ended"
                if self._block.ended
                else "The round is skipped, so it removes nothing"
            )
        return self._name_of(embedding)

    def ids(self, embedding: TableEmbedding) -> IndexArray:
        """Return the ids of the round's gradients, ascending: one id for each row of ``.grad``.

        Args:
            embedding: A `TableEmbedding` of the model.

        Raises:
            InvalidArgumentError: The embedding is not the model's.
        """
        return self._block.ids.get(self._name_of(embedding), np.empty(0, np.int64))

    def _name_of(self, embedding: TableEmbedding) -> str:
        for name, found in self._block.tables.items():
            if found is embedding:
                return name
        raise InvalidArgumentError(
            f"It must be a TableEmbedding of the model, but was {embedding!r}"
        )
