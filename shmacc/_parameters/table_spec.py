"""The spec of a table of parameters, as a user gives it."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from shmacc import init
from shmacc._base import layout
from shmacc._values import arguments, dtypes
from shmacc._values.arguments import describe_shape
from shmacc.errors import InvalidArgumentError

_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of parameters: rows by ids, 0 to below 2**63, that need not be known in advance.

    Args:
        row_shape: The shape of a row; ``()`` for a number.
        dtype: float32 or float64.
        initial: The contents of a row before anything changes it; one of `shmacc.init`.
        max_rows: How many rows there may be, at least 1; None: memory is the only limit.

    Raises:
        InvalidArgumentError: A bad argument.
    """

    row_shape: tuple[int, ...]
    dtype: Any = "float32"
    _: KW_ONLY
    initial: init.Initial = field(default_factory=init.Constant)
    max_rows: int | None = None

    def __post_init__(self) -> None:
        shape = arguments.declared_shape(self.row_shape, "dense")
        if shape is None or None in shape:
            raise InvalidArgumentError(
                f"The shape of a table's rows must be known, but is {describe_shape(shape)}"
            )
        dtype = dtypes.resolve(self.dtype)
        if dtype.name not in _DTYPES:
            raise InvalidArgumentError(
                f"A table has dtype float32 or float64, but {dtype.name} was asked for"
            )
        if not isinstance(self.initial, init.Initial) or type(self.initial) is init.Initial:
            raise InvalidArgumentError(
                "A table's initial must be one of shmacc.init's, but was a "
                f"{type(self.initial).__name__}"
            )
        largest = float(np.finfo(dtype.numpy).max)
        for number in self.initial.config()[1]:
            if abs(number) > largest:
                raise InvalidArgumentError(
                    f"A table's initial must be at most {largest:.3g} in its dtype, but is "
                    f"{self.initial!r}"
                )
        rows = arguments.limit(self.max_rows, "max_rows", layout.MAX_ROWS)
        object.__setattr__(self, "row_shape", shape)
        object.__setattr__(self, "dtype", dtype.numpy)
        object.__setattr__(self, "max_rows", rows)
