"""Results of takes as other packages' arrays: one module per package, loaded when first used."""

from shmacc._base.array_types import IndexArray
from shmacc.errors import FailedPreconditionError


def number_of_rows(whole: IndexArray) -> int:
    """Return the first dimension of the whole tensor's shape.

    Raises:
        FailedPreconditionError: The first dimension is not known.
    """
    rows = int(whole[0])
    if rows < 0:
        raise FailedPreconditionError(
            "How many rows the whole tensor has is not known: declare it in the shape of the "
            "accumulator or member, (rows, ...) in place of (None, ...)"
        )
    return rows
