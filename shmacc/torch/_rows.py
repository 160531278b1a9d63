"""The rows of an embedding of ids: this process's own, or those of a training's table."""

from typing import Any

import numpy as np
import torch

from shmacc import _core
from shmacc._accumulators.table_spec import TableSpec
from shmacc._accumulators.tables import Table
from shmacc._gradients import arrays
from shmacc._records.array_types import IndexArray, ValueArray
from shmacc._records.taken import IndexedSlices
from shmacc.errors import FailedPreconditionError


class Rows:
    """The rows of an embedding: this process's own, or those of a training's table.

    Attributes:
        spec: The spec of the table, or of one made from these rows.
        table: The training's table; a closed replica still has it. None: the rows are this
            process's own.
        shared: Whether the module is in a training now.
        trained: Whether a replica's forward passes collect gradients.
        pending: Ids, and gradients of their rows, from backward passes since the last step; None:
            this process hands no gradients over.
    """

    def __init__(self, spec: TableSpec) -> None:
        """Begin without rows."""
        self.trained = True
        self.keep(spec, *_none(spec))

    def keep(self, spec: TableSpec, ids: IndexArray, rows: ValueArray) -> None:
        """Use these rows instead of a table; ids ascend."""
        self.spec, self.shared = spec, False
        self.table: Table | None = None
        self.pending: list[tuple[IndexArray, torch.Tensor]] | None = None
        self._ids, self._rows = ids, rows

    def share(self, table: Any, *, trains: bool) -> None:
        """Use the rows of a training's `Table`, and collect gradients if this process `trains`."""
        self.keep(self.spec, *_none(self.spec))
        self.table, self.shared, self.pending = table, True, [] if trains else None

    def leave(self, *, keep: bool) -> None:
        """Leave the training.

        Args:
            keep: Whether this process keeps a copy of the rows. If not, they cannot be read.
        """
        if keep:
            self.keep(self.spec, *self.whole())
        self.shared, self.pending = False, None

    def whole(self) -> tuple[IndexArray, ValueArray]:
        """Return all ids, ascending, and their rows."""
        if self.table is None:
            return self._ids, self._rows
        ids = self.table.ids()
        return ids, self.table[ids]

    def of(self, ids: IndexArray) -> ValueArray:
        """Return copies of the rows of a vector of ids."""
        if self.table is not None:
            return self.table[ids]
        spec = self.spec
        kind, initial, seed = spec.initial.config()
        rows = arrays.empty((len(ids), *spec.row_shape), spec.dtype)
        _core.initial_rows(
            (kind, list(initial), seed),
            ids,
            spec.row_shape[0],
            spec.dtype == np.float64,
            rows.reshape(-1).view(np.uint8),
        )
        known = np.isin(ids, self._ids)
        rows[known] = self._rows[np.searchsorted(self._ids, ids[known])]
        return rows

    def collect(self, ids: IndexArray, leaf: torch.Tensor) -> None:
        """Collect the gradient that a backward pass has left in ``.grad`` of looked-up rows."""
        gradient, leaf.grad = leaf.grad, None
        if self.pending is not None and gradient is not None:
            self.pending.append((ids, gradient.detach()[: len(ids)]))

    def gradient(self) -> IndexedSlices | None:
        """Return the pending gradients, as a group takes them; None: there are none."""
        if not self.pending:
            return None
        ids, gradients = zip(*self.pending, strict=True)
        return IndexedSlices(torch.cat(gradients).numpy(), np.concatenate(ids))

    def merged(self) -> torch.Tensor | None:
        """Add up the pending gradients; return one row for each id, whose numbers may be changed.

        None: there are none.
        """
        if not self.pending:
            return None
        if len(self.pending) > 1:
            ids, gradients = zip(*self.pending, strict=True)
            distinct, places = np.unique(np.concatenate(ids), return_inverse=True)
            rows = torch.cat(gradients)
            total = torch.zeros((len(distinct), *rows.shape[1:]), dtype=rows.dtype, device="cpu")
            total.index_add_(0, torch.from_numpy(places.reshape(-1)), rows)
            self.pending = [(distinct, total)]
        return self.pending[0][1]

    def clear(self) -> None:
        """Drop the pending gradients."""
        if self.pending is not None:
            self.pending = []

    def check_own(self) -> None:
        """Refuse to change rows while the module is in a training."""
        if self.shared:
            raise FailedPreconditionError(
                "A training has this TableEmbedding's rows, which its rounds alone change: load or "
                "convert the model before (or give initial=); replicas.load_state_dict() loads a "
                "checkpoint"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy or a pickle rows of its own."""
        copied = Rows(self.spec)
        copied.keep(self.spec, *self.whole())
        copied.trained = self.trained
        return copied.__dict__


def _none(spec: TableSpec) -> tuple[IndexArray, ValueArray]:
    return np.empty(0, np.int64), np.empty((0, *spec.row_shape), spec.dtype)


def spec_of(table: Table) -> TableSpec:
    return TableSpec(table.row_shape, table.dtype, initial=table.initial, max_rows=table.max_rows)
