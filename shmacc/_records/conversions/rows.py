"""How many rows the tensor has of which some were taken."""

from typing import TYPE_CHECKING

from shmacc.errors import FailedPreconditionError

if TYPE_CHECKING:
    from shmacc._records.taken import SparseTaken


def number_of_rows(taken: "SparseTaken") -> int:
    """Return it.

    Raises:
        FailedPreconditionError: It is not known.
    """
    rows = int(taken.shape[0])
    if rows < 0:
        raise FailedPreconditionError(
            "How many rows the whole tensor has is not known: declare it in the shape of the "
            "accumulator or member, (rows, ...) in place of (None, ...)"
        )
    return rows
