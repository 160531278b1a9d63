"""A torch module that embeds ids which need not be known beforehand, by a table's rows."""

from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from shmacc import init
from shmacc._base.array_types import IndexArray
from shmacc._base.shown import shown
from shmacc._parameters.members import checked_ids
from shmacc._parameters.table_spec import TableSpec
from shmacc._parameters.tables import Table
from shmacc._values import arguments, arrays
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.torch._rows import Rows

_IDS = "the ids of an embedding"
_OFFSETS = "the offsets of bags"
_MODES = (None, "sum", "mean")


class TableEmbedding(nn.Module):
    """An embedding of ids that need not be known beforehand: any integers below 2**63.

    Like `nn.Embedding` or `nn.EmbeddingBag`, but its rows are a `shmacc.Table` of the training's
    parameters, not a torch parameter::

        model.user = TableEmbedding(16, initial=shmacc.init.Normal(0.0, 0.1, seed=1))
        vectors = model.user(torch.tensor([[2**40, 7]]))  # (1, 2, 16)

    An id gets a row when an update changes it. Until then, and after its removal, it has the
    initial row, which is a function of `initial` and the id. A `Replica` sends ids and the
    gradients of their rows. `SyncReplicas` and `AsyncReplicas` have the table, under the module's
    name with ``.rows`` appended, and need an optimizer of `shmacc.optim` for it.

    Outside of a training, the module has its own rows: from a loaded state, from the last snapshot
    of a `Viewer`, or, in a chief, from the end of its training. Backward passes do not train these
    rows. The state has ``ids``, ascending, and ``rows``. Numbers are of torch's default dtype at
    construction, which must be float32 or float64.

    Attributes:
        embedding_dim: How many numbers a row has.
        mode: How a bag's rows become one row: "sum" or "mean"; None: there are no bags.
        padding_idx: The integer that stands for "no id"; None: there is no such integer.
        grad: In the block of a chief's round, the gradients of the rows, one row for each id of the
            round; the block may clip or scale them. Outside of a block: None.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        initial: init.Initial = init.Normal(0.0, 1.0),  # noqa: B008 - it is frozen
        mode: str | None = None,
        max_rows: int | None = None,
        padding_idx: int | None = None,
    ) -> None:
        """Make an embedding without rows.

        Args:
            embedding_dim: How many numbers a row has.
            initial: A row's contents before anything changes it. Give each table its own seed.
            mode: None: return a row for each id. "sum", "mean": return a row for each bag of ids,
                like `nn.EmbeddingBag`.
            max_rows: How many rows the table may have: an update that would leave more raises
                ResourceExhaustedError in the chief's round. None: any number.
            padding_idx: An integer, possibly negative, that stands for "no id": its row is zeros,
                no bag counts it, and it is not trained.

        Raises:
            InvalidArgumentError: A bad argument.
        """
        super().__init__()
        if mode not in _MODES:
            raise InvalidArgumentError(f'mode must be None, "sum" or "mean", but was {shown(mode)}')
        self.embedding_dim: int = arguments.int64(embedding_dim, "embedding_dim")
        self.mode = mode
        self.padding_idx: int | None = (
            None if padding_idx is None else arguments.int64(padding_idx, "padding_idx")
        )
        self.grad: torch.Tensor | None = None
        dtype = _name_of(torch.get_default_dtype())
        self._own = Rows(
            TableSpec((self.embedding_dim,), dtype, initial=initial, max_rows=max_rows)
        )

    @property
    def table(self) -> Table:
        """The table, while this process is a training's chief or replica.

        Raises:
            FailedPreconditionError: This process is neither chief nor replica.
        """
        found = self._own.table
        if found is None:
            raise FailedPreconditionError(
                "This TableEmbedding has no table: SyncReplicas, AsyncReplicas and Replica give it "
                "one, until they are closed"
            )
        return found

    def forward(self, ids: torch.Tensor, offsets: "torch.Tensor | None" = None) -> Any:
        """Return rows, of shape ``ids.shape + (embedding_dim,)``; or a row for each bag.

        Args:
            ids: Integers of any dtype, from 0 to below 2**63, on the CPU. With a mode, bags:
                each row of a matrix, or the parts of a vector that begin at `offsets`.
            offsets: For a vector: where each bag begins, as integers of any dtype that ascend from
                0. Equal offsets make empty bags. The last bag ends with the vector.

        Raises:
            InvalidArgumentError: An id is out of range; the ids are neither matrix nor vector, and
                there is a mode; or offsets are not as above, or are not for a vector with a mode.
            FailedPreconditionError: The replica is closed.
        """
        if torch.compiler.is_compiling():
            # Import late, because this imports torch's compiler.
            from shmacc.torch import _uncompiled

            return _uncompiled.call(self._look_up, ids, offsets)
        return self._look_up(ids, offsets)

    def _look_up(self, ids: torch.Tensor, offsets: "torch.Tensor | None") -> Any:
        if self.mode is None and offsets is not None:
            raise InvalidArgumentError(
                'offsets are for bags: TableEmbedding(..., mode="sum") or "mean"'
            )
        given, padding = arrays.as_array(ids, _IDS), None
        begins = None if self.mode is None else _begins(given.shape, offsets)
        # As an index, an Ellipsis selects all elements.
        counted: Any = ... if self.padding_idx is None else given != self.padding_idx
        numbers = checked_ids(given[counted], _IDS)
        looked_up, places = np.unique(numbers, return_inverse=True)
        leaf = torch.from_numpy(self._own.of(looked_up))
        where = np.full(given.shape, len(looked_up))
        where[counted] = places.reshape(numbers.shape)
        if self.padding_idx is not None:
            padding = len(looked_up)
            leaf = nn.functional.pad(leaf, (0, 0, 0, 1))  # a row of zeros
        if self._own.trained and self._own.pending is not None and torch.is_grad_enabled():
            leaf.requires_grad_().register_post_accumulate_grad_hook(
                partial(self._own.collect, looked_up)
            )
        if self.mode is None or begins is None:
            return nn.functional.embedding(torch.from_numpy(where), leaf, padding)
        return nn.functional.embedding_bag(
            torch.from_numpy(where.reshape(-1)),
            leaf,
            torch.from_numpy(begins),
            mode=self.mode,
            padding_idx=padding,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward passes. The model's `zero_grad` does not call this.

        Args:
            set_to_none: Has no effect: it is for parameters, and this module has none.
        """
        super().zero_grad(set_to_none)
        self._own.clear()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the rows, or train them again. The model's method does not call this.

        Args:
            requires_grad: Whether forward passes of this process's replica train the rows.
        """
        super().requires_grad_(requires_grad)
        self._own.trained = requires_grad
        return self

    def extra_repr(self) -> str:
        """Return the properties that its repr shows."""
        spec = self._own.spec
        parts = [f"{self.embedding_dim}, initial={spec.initial!r}"]
        for name in ("mode", "max_rows", "padding_idx"):
            value = getattr(spec if name == "max_rows" else self, name)
            parts += [] if value is None else [f"{name}={value!r}"]
        return ", ".join(parts)

    def _apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the rows, as `double` and `to` do with parameters."""
        super()._apply(function, *args, **kwargs)
        spec = self._own.spec
        # In a training, call `function` with no rows: the result still has its dtype and device.
        ids, rows = (Rows(spec) if self._own.shared else self._own).whole()
        found = function(torch.from_numpy(rows))
        if found.device.type != "cpu":
            raise InvalidArgumentError(
                f"A TableEmbedding is on the CPU, as shared memory is, not on '{found.device}'"
            )
        if (dtype := _name_of(found.dtype)) != spec.dtype.name:
            self._own.check_own()
            self._own.keep(replace(spec, dtype=dtype), ids, found.numpy())
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        ids, rows = self._own.whole()
        destination[f"{prefix}ids"] = torch.from_numpy(ids)
        destination[f"{prefix}rows"] = torch.from_numpy(rows)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,  # noqa: ARG002 - torch's signature
        strict: bool,  # noqa: ARG002
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = [f"{prefix}ids", f"{prefix}rows"]
        missing = [key for key in keys if key not in state_dict]
        missing_keys += missing
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
        if missing:
            return
        self._own.check_own()
        spec = self._own.spec
        ids = checked_ids(state_dict[keys[0]].cpu(), _IDS).copy()
        rows = state_dict[keys[1]].detach().to("cpu", getattr(torch, spec.dtype.name), copy=True)
        if rows.shape != (ids.size, *spec.row_shape) or ids.ndim != 1:
            error_msgs.append(
                f"size mismatch for {keys[1]}: {tuple(rows.shape)} in the state, beside ids of "
                f"shape {ids.shape}; rows have shape {spec.row_shape} in this model."
            )
        elif len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
            error_msgs.append(f"{keys[0]} must ascend, and be distinct.")
        else:
            self._own.keep(spec, ids, rows.numpy())


def rows_of(embedding: TableEmbedding) -> Rows:
    return embedding._own  # noqa: SLF001


def _begins(shape: tuple[int, ...], offsets: object) -> IndexArray:
    """Return where each bag begins among the ids, as a copy that nobody else can change.

    torch checks only the first and last offset. If another is bad, torch reads foreign memory.

    Args:
        shape: The shape of the ids.
        offsets: The offsets that the caller gave.

    Raises:
        InvalidArgumentError: `TableEmbedding.forward` says when.
    """
    if len(shape) == 2:  # noqa: PLR2004
        if offsets is not None:
            raise InvalidArgumentError(
                f"{_OFFSETS} are for a vector of ids, but ids have shape {shape}: each row is a bag"
            )
        return np.arange(shape[0]) * shape[1]
    if len(shape) != 1:
        raise InvalidArgumentError(
            f"the ids of bags must be a matrix, or a vector with offsets, but have shape {shape}"
        )
    if offsets is None:
        raise InvalidArgumentError(
            f"{_OFFSETS} must be given with a vector of ids: where each bag begins"
        )
    begins = arrays.index_array(offsets, _OFFSETS).copy()
    if begins.ndim != 1:
        raise InvalidArgumentError(f"{_OFFSETS} must be a vector, but have shape {begins.shape}")
    if not begins.size and not shape[0]:
        return begins
    ends = np.append(begins, shape[0])
    wrong = np.flatnonzero(ends[1:] < ends[:-1])
    if not begins.size or begins[0] or wrong.size:
        found = begins[wrong[0] : wrong[0] + 2] if wrong.size else begins[:1]
        raise InvalidArgumentError(
            f"{_OFFSETS} must ascend from 0 to at most {shape[0]}, the number of ids, but "
            + (f"there is {found.tolist()}" if begins.size else "there are none")
        )
    return begins


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
