"""Rows as scipy.sparse arrays."""

import numpy as np
from scipy import sparse as scipy_sparse

from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._values.conversions import number_of_rows
from shmacc.errors import FailedPreconditionError


def sparse(indices: IndexArray, values: ValueArray, whole: IndexArray) -> scipy_sparse.csr_array:
    """Return a CSR array on the memory of the values; half types, which SciPy lacks, are widened.

    Raises:
        FailedPreconditionError: The rows are no vectors, or their number is not known.
    """
    if values.ndim != 2:  # noqa: PLR2004
        raise FailedPreconditionError(
            f"scipy.sparse has matrices alone, but the rows have {values.ndim - 1} dimensions"
        )
    if values.dtype.names is not None:  # quantised
        values = values.view(values.dtype[0])
    if values.dtype.itemsize == 2 and values.dtype.kind not in "iu":  # noqa: PLR2004
        values = values.astype(np.float32)
    rows, width = number_of_rows(whole), values.shape[1]
    starts = np.zeros(rows + 1, np.int64)
    starts[indices + 1] = width
    np.cumsum(starts, out=starts)
    columns = np.tile(np.arange(width), len(values))
    return scipy_sparse.csr_array((values.reshape(-1), columns, starts), shape=(rows, width))
