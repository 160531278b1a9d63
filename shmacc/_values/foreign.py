"""Converts other packages' arrays and sparse matrices that NumPy cannot view, or views wrongly.

The modules of an object's classes tell its package, so this imports no package that the program has
not imported. Objects that NumPy views rightly (JAX's arrays, TensorFlow's tensors) need no code
here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmacc._base.array_types import ValueArray
from shmacc._base.signals import pass_on
from shmacc._values.slices import IndexedSlices
from shmacc.errors import InvalidArgumentError, ResourceExhaustedError

LEAVE_OUT = "leave these out, and what belongs to them"
"""Advice on missing row numbers: 0 cannot replace them, since 0 is the number of a real row."""


def instead(numbers: str, *, to_fill: bool) -> str:
    """Return the advice on missing numbers, for a message.

    numbers: an expression that puts 0 in their place.
    to_fill: whether 0 may replace a missing number: true for values, false for row numbers.
    """
    return f"pass {numbers}" if to_fill else LEAVE_OUT


def array(value: Any, what: str, *, to_fill: bool) -> ValueArray | None:
    """Return another package's array, if possible without a copy; None: NumPy can view it itself.

    to_fill: as for `instead`.

    Raises:
        InvalidArgumentError: It has no numbers that can be read here, or some are missing; the
            message says what to pass instead.
    """
    view = _owned(value, _VIEWS)
    return None if view is None else view(value, what, to_fill)


def slices(value: Any) -> Any:
    """Return the rows of another package's sparse matrix as IndexedSlices; anything else as it is.

    These are the rows that have stored entries, even if the entries are zeros. A gradient of
    ``nn.Embedding(sparse=True)`` is not copied, whether it is coalesced or not.

    Raises:
        InvalidArgumentError: The value has no rows of numbers that can be read here.
        ResourceExhaustedError: There is no memory for these rows, which are returned in full.
    """
    split = _owned(value, _SPLITS)
    if split is None:
        return value
    try:
        return split(value)
    except InvalidArgumentError:
        raise
    except MemoryError as error:
        pass_on(error)
        raise ResourceExhaustedError(
            f"This process has no memory for the rows of a {type(value).__name__} of shape "
            f"{tuple(value.shape)}: {error}"
        ) from error
    except Exception as error:
        pass_on(error)
        raise InvalidArgumentError(
            f"A sparse gradient of type {type(value).__name__} has no rows that can be read "
            f"({type(error).__name__}: {error})"
        ) from error


def is_rows(value: Any) -> bool:
    """Return whether a gradient is rows, as a sparse member takes them, and no array.

    Rows are a pair ``(indices, values)``, a sparse matrix, or an object with both attributes.
    """
    if hasattr(value, "requires_grad") and hasattr(value, "layout"):  # a tensor of torch
        return str(value.layout) != "torch.strided"
    return (
        isinstance(value, tuple)
        or hasattr(value, "tocsr")
        or (hasattr(value, "indices") and hasattr(value, "values"))
    )


def _owned(value: object, table: dict[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    for base in type(value).__mro__:
        found = table.get(base.__module__.partition(".")[0])
        if found is not None:
            return found
    return None


def _refused(what: str, problem: str, way_out: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what} {problem}: pass {way_out}")


def _check_readable(tensor: Any, what: str) -> None:
    if tensor.requires_grad:
        raise _refused(
            what,
            "must not be a torch tensor that requires grad, as parameters do",
            "the parameter's `.grad`, or `tensor.detach()`",
        )
    if tensor.device.type == "meta":
        raise InvalidArgumentError(f"{what} must not be a torch tensor on 'meta', without numbers")
    if tensor.device.type != "cpu":
        raise _refused(
            what, f"must not be a torch tensor on device '{tensor.device}'", "`tensor.cpu()`"
        )


def _torch_array(tensor: Any, what: str, to_fill: bool) -> ValueArray | None:
    if not hasattr(tensor, "requires_grad"):  # a dtype, a module
        return None
    import torch  # the program has imported it already

    _check_readable(tensor, what)
    if type(tensor).__name__ == "MaskedTensor":
        way_out = instead("the numbers to add, `masked.to_tensor(0)` for instance", to_fill=to_fill)
        raise InvalidArgumentError(
            f"{what} must not be a masked tensor, whose mask would be ignored: {way_out}"
        )
    if tensor.layout != torch.strided:
        raise _refused(what, f"must be dense, but is a {tensor.layout} tensor", "`.to_dense()`")
    if tensor.is_quantized:
        raise _refused(what, "must not be a quantised torch tensor", "`.dequantize()`")
    plain: ValueArray
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16
        import ml_dtypes

        plain = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return plain
    # torch conjugates and negates by a mark, which NumPy does not know.
    plain = tensor.resolve_conj().resolve_neg().numpy()
    return plain


def _torch_slices(tensor: Any) -> Any:
    if not hasattr(tensor, "requires_grad"):
        return tensor
    import torch  # the program has imported it already

    _check_readable(tensor, "A sparse gradient")
    if tensor.layout == torch.strided:
        raise _refused(
            "A sparse gradient",
            "must not be a dense tensor (which layers with `sparse=True` do not leave)",
            "`(indices, values)`, or make the member dense",
        )
    if not tensor.dim():
        raise InvalidArgumentError("A sparse gradient must have rows, but is a scalar")
    if tensor.layout != torch.sparse_coo:
        tensor = tensor.to_sparse_coo()
    elif not tensor.sparse_dim():
        raise _refused("A sparse gradient", "must be sparse in its rows", "`.to_dense()`")
    # These work for tensors that are not coalesced, too: the apply adds up repeated rows.
    indices, values = tensor._indices(), tensor._values()  # noqa: SLF001
    if tensor.sparse_dim() > 1:
        rows, place = torch.unique(indices[0], return_inverse=True)
        # On the CPU, whatever default device the program has set.
        dense = torch.zeros(len(rows), *tensor.shape[1:], dtype=values.dtype, device="cpu")
        values = dense.index_put_((place, *indices[1:]), values, accumulate=True)
        indices = rows[None]
    return IndexedSlices(values, indices[0], tuple(tensor.shape))


def _scipy_array(value: Any, what: str, to_fill: bool) -> None:  # noqa: ARG001
    if hasattr(value, "tocsr"):
        raise _refused(what, "must be dense, but is a scipy.sparse matrix", "`.toarray()`")


def _scipy_slices(matrix: Any) -> Any:
    if not hasattr(matrix, "tocsr"):
        return matrix
    if len(matrix.shape) != 2:  # noqa: PLR2004
        raise InvalidArgumentError(
            "A sparse gradient must be a scipy.sparse matrix of 2 dimensions, but has "
            f"{len(matrix.shape)}"
        )
    by_row = matrix.tocsr()
    rows = np.flatnonzero(np.diff(by_row.indptr))
    return IndexedSlices(by_row[rows].toarray(), rows, matrix.shape)


def _polars_array(value: Any, what: str, to_fill: bool) -> ValueArray | None:
    if not hasattr(value, "to_numpy"):  # an expression, a lazy frame
        return None
    columns = value.get_columns() if hasattr(value, "get_columns") else [value]
    way_out = instead("`.fill_null(0)`", to_fill=to_fill)
    _check_complete(sum(map(_polars_nulls, columns)), what, way_out)
    return np.asarray(value.to_numpy())


def _polars_nulls(column: Any) -> int:
    """Return how many nulls a column has, also within rows of fixed width and structs."""
    nulls, kind = column.null_count(), type(column.dtype).__name__
    if not nulls and kind == "Array":
        nulls = _polars_nulls(column.explode())
    if not nulls and kind == "Struct":
        nulls = sum(map(_polars_nulls, column.struct.unnest().get_columns()))
    return int(nulls)


def _pandas_array(value: Any, what: str, to_fill: bool) -> ValueArray | None:
    """Convert pandas' own dtypes, if there are any. In columns of NumPy dtypes NaN is no null."""
    if not hasattr(value, "isna"):
        return None
    dtypes = list(value.dtypes) if value.ndim > 1 else [value.dtype]
    own = [not isinstance(dtype, np.dtype) for dtype in dtypes]
    if not any(own):
        return None
    nulls = (value.loc[:, own] if value.ndim > 1 else value).isna()
    way_out = instead("`.fillna(0)`", to_fill=to_fill)
    _check_complete(int(np.asarray(nulls).sum()), what, way_out)
    plain = [getattr(dtype, "numpy_dtype", dtype) for dtype in dtypes]
    if not all(isinstance(dtype, np.dtype) for dtype in plain):
        return None  # strings, categories
    return np.asarray(value.to_numpy(dtype=np.result_type(*plain)))


def _pyarrow_array(value: Any, what: str, to_fill: bool) -> None:
    for column in getattr(value, "columns", [value]):
        if hasattr(column, "null_count"):  # null_count itself misses nulls of encoded columns
            import pyarrow.compute

            nulls = pyarrow.compute.count(column, mode="only_null").as_py()
            way_out = instead("`pyarrow.compute.fill_null(array, 0)`", to_fill=to_fill)
            _check_complete(nulls, what, way_out)


def _check_complete(nulls: int, what: str, way_out: str) -> None:
    if nulls:
        raise InvalidArgumentError(f"{what} must have no nulls, but {nulls} are missing: {way_out}")


_VIEWS: dict[str, Callable[[Any, str, bool], ValueArray | None]] = {
    "torch": _torch_array, "scipy": _scipy_array, "polars": _polars_array, "pandas": _pandas_array,
    "pyarrow": _pyarrow_array,
}  # fmt: skip
_SPLITS: dict[str, Callable[[Any], Any]] = {"torch": _torch_slices, "scipy": _scipy_slices}
