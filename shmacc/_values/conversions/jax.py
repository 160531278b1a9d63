"""NumPy's arrays as JAX's."""

import jax
import numpy as np
from jax.experimental import sparse as jax_sparse

from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._values.conversions import number_of_rows
from shmacc.errors import OutOfRangeError


def array(values: ValueArray) -> jax.Array:
    """Return a JAX array; as usual with JAX, 64 bits become 32 unless ``jax_enable_x64`` is set.

    Raises:
        OutOfRangeError: An integer does not fit 32 bits.
    """
    if values.dtype.names is not None:  # quantised
        values = values.view(values.dtype[0])
    kept = jax.dtypes.canonicalize_dtype(values.dtype)
    if kept.kind in "iu" and kept != values.dtype and values.size:
        info = np.iinfo(kept)
        if int(values.min()) < info.min or int(values.max()) > info.max:
            raise OutOfRangeError(
                f"An integer does not fit {kept.name}, which JAX makes of {values.dtype.name}: "
                "set jax_enable_x64"
            )
    with np.errstate(all="ignore"):  # floats may overflow in 32 bits
        values = values.astype(kept, copy=False)
    return jax.numpy.asarray(values)


def sparse(indices: IndexArray, values: ValueArray, whole: IndexArray) -> jax_sparse.BCOO:
    """Return a BCOO matrix whose elements are rows."""
    shape = (number_of_rows(whole), *values.shape[1:])
    return jax_sparse.BCOO(
        (array(values), array(indices[:, None])),
        shape=shape,
        indices_sorted=True,
        unique_indices=True,
    )
