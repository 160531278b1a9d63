"""NumPy's arrays as torch tensors on the same memory."""

from typing import Any

import torch

from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._values.conversions import number_of_rows


def tensor(array: ValueArray) -> torch.Tensor:
    """Return a tensor that *is* the array's memory, writable or not."""
    if array.dtype.name == "bfloat16":  # torch converts no array of this dtype
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    if array.dtype.names is not None:  # quantised
        array = array.view(array.dtype[0])
    return torch.from_numpy(array)


def sparse(indices: IndexArray, values: ValueArray, whole: IndexArray) -> torch.Tensor:
    """Return a coalesced COO tensor, as optimizers take it in ``.grad``."""
    shape: list[Any] = [number_of_rows(whole), *values.shape[1:]]
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices)[None],
        tensor(values),
        shape,
        device="cpu",
        is_coalesced=True,  # ascending, each row once
        check_invariants=False,
    )
