"""The rows of an embedding of ids: either a process's own, or a training's table."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shmacc import _core
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._parameters.table_spec import TableSpec
from shmacc._parameters.tables import Table
from shmacc._values import arrays
from shmacc._values.slices import IndexedSlices
from shmacc.errors import FailedPreconditionError

Pending = list[tuple[IndexArray, torch.Tensor]]
"""Pairs of ids and the gradients of their rows, one for each lookup, since the last step."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place of rows. One store replaces a `Source` by another, so no exception mixes the two.

    Attributes:
        spec: The spec of the table, or of a table that could be made from the rows.
        ids: The ids of this process's own rows, ascending; empty if there is a table.
        rows: This process's own rows.
        table: The training's table; a closed replica still has it. None: the rows are this
            process's own.
        whole: Returns a copy of the table, which is read under the lock and without the index.
        shared: Whether the module is in a training now.
        trains: Whether this process sends gradients.
    """

    spec: TableSpec
    ids: IndexArray
    rows: ValueArray
    table: Table | None = None
    whole: Callable[[], Any] | None = None
    shared: bool = False
    trains: bool = False


class Rows:
    """The rows of an embedding, and the gradients that were collected for them.

    Attributes:
        source: The place of the rows.
        trained: Whether a replica's forward passes collect gradients.
    """

    def __init__(self, spec: TableSpec) -> None:
        """Begin without rows."""
        self.trained = True
        self._pending: Pending = []
        self.source = Source(spec, *_none(spec))

    @property
    def spec(self) -> TableSpec:
        return self.source.spec

    @property
    def table(self) -> Table | None:
        return self.source.table

    @property
    def shared(self) -> bool:
        return self.source.shared

    @property
    def pending(self) -> Pending | None:
        """The gradients that were collected; None: this process sends no gradients."""
        return self._pending if self.source.trains else None

    def keep(self, spec: TableSpec, ids: IndexArray, rows: ValueArray) -> None:
        """Use these rows instead of a table; ids ascend."""
        self.source = Source(spec, ids, rows)

    def put(self, source: Source) -> None:
        """Use the rows of an earlier `Source` again, after another call has replaced it."""
        self.source = source

    def share(self, shared: Any, name: str, *, trains: bool) -> None:
        """Use the rows of a table of `Parameters`; collect gradients if this process `trains`."""
        self._pending = []
        self.source = Source(
            self.spec,
            *_none(self.spec),
            shared[name],
            lambda: shared.snapshot()[1][name],
            shared=True,
            trains=trains,
        )

    def leave(self, *, keep: bool) -> None:
        """Leave the training.

        Args:
            keep: Whether this process keeps a copy of the rows. If not, the rows cannot be read.
        """
        own = Source(self.spec, *self.whole()) if keep else self.source
        self.source = replace(own, shared=False, trains=False)

    def whole(self) -> tuple[IndexArray, ValueArray]:
        """Return all ids, ascending, and their rows."""
        source = self.source
        if source.table is None or source.whole is None:
            return source.ids, source.rows
        ids = source.table.ids()
        if source.table.contains(ids).all():
            return ids, source.table[ids]
        found = source.whole()  # the index is damaged, or rows were just removed
        return found.indices, found.values

    def of(self, ids: IndexArray) -> ValueArray:
        """Return copies of the rows of a vector of ids."""
        source = self.source
        if source.table is not None:
            return source.table[ids]
        spec = source.spec
        kind, initial, seed = spec.initial.config()
        rows = arrays.empty((len(ids), *spec.row_shape), spec.dtype)
        _core.initial_rows(
            (kind, list(initial), seed),
            ids,
            spec.row_shape[0],
            spec.dtype == np.float64,
            rows.reshape(-1).view(np.uint8),
        )
        known = np.isin(ids, source.ids)
        rows[known] = source.rows[np.searchsorted(source.ids, ids[known])]
        return rows

    def collect(self, ids: IndexArray, leaf: torch.Tensor) -> None:
        """Collect the gradient of these rows that a backward pass has left in ``leaf.grad``."""
        gradient, leaf.grad = leaf.grad, None
        if (pending := self.pending) is not None and gradient is not None:
            # Leave out the row of zeros that stands for `padding_idx`.
            pending.append((ids, gradient.detach()[: len(ids)]))

    def gradient(self, pending: Pending | None = None) -> IndexedSlices | None:
        """Return pending gradients in a group's form; None if there are none.

        Args:
            pending: Gradients that were set aside; None: the gradients that are pending now.
        """
        if not (found := self._pending if pending is None else pending):
            return None
        ids, gradients = zip(*found, strict=True)
        return IndexedSlices(torch.cat(gradients).numpy(), np.concatenate(ids))

    def merged(self) -> "torch.Tensor | None":
        """Return each id's sum of pending gradients, to change in place; None: nothing pending."""
        if not (pending := self.pending):
            return None
        if len(pending) > 1:
            ids, gradients = zip(*pending, strict=True)
            distinct, places = np.unique(np.concatenate(ids), return_inverse=True)
            rows = torch.cat(gradients)
            total = torch.zeros((len(distinct), *rows.shape[1:]), dtype=rows.dtype, device="cpu")
            total.index_add_(0, torch.from_numpy(places.reshape(-1)), rows)
            pending[:] = [(distinct, total)]  # the same list, which a `Handing` may have
        return pending[0][1]

    def set_aside(self, pending: Pending) -> None:
        """If `pending` are still the pending gradients, collect later gradients separately."""
        if self._pending is pending:
            self._pending = []

    def put_back(self, pending: Pending) -> None:
        """Undo `set_aside`. No gradients may have been collected since."""
        self._pending = pending

    def clear(self) -> None:
        """Drop the pending gradients."""
        self._pending = []

    def check_own(self) -> None:
        """Refuse to change rows while the module is in a training."""
        if self.shared:
            raise FailedPreconditionError(
                "A training has this TableEmbedding's rows, which its rounds alone change: load or "
                "convert the model before (or give initial=); replicas.load_state_dict() loads a "
                "checkpoint"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return a state in which a copy or pickle has rows of its own."""
        copied = Rows(self.spec)
        copied.keep(self.spec, *self.whole())
        copied.trained = self.trained
        return copied.__dict__


def _none(spec: TableSpec) -> tuple[IndexArray, ValueArray]:
    return np.empty(0, np.int64), np.empty((0, *spec.row_shape), spec.dtype)


def spec_of(table: Table) -> TableSpec:
    return TableSpec(table.row_shape, table.dtype, initial=table.initial, max_rows=table.max_rows)
