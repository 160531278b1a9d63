"""Specs of tables of parameters: those that a constructor is given, or that a segment has."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from shmacc import init
from shmacc._base import layout
from shmacc._base.signals import pass_on
from shmacc._parameters import new_arrays
from shmacc._values import arguments, dtypes
from shmacc._values.arguments import describe_shape
from shmacc._values.spec import MemberSpec
from shmacc.errors import DataLossError, InvalidArgumentError

_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of parameters: rows by ids, 0 to below 2**63, that need not be known in advance.

    Args:
        row_shape: The shape of a row; ``()`` for a number.
        dtype: float32 or float64.
        initial: The contents of a row before anything changes it; one of `shmacc.init`.
        max_rows: How many rows there may be, at least 1; None: as many as memory allows.

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


def to_member(name: str, spec: object) -> MemberSpec | None:
    """Return the spec of a table of this name, for a segment; None: it is no table's spec."""
    if not isinstance(spec, TableSpec):
        return None
    number, numbers, seed = spec.initial.config()
    table = (number, tuple(numbers), seed, spec.max_rows)
    dtype = dtypes.resolve(spec.dtype)
    return MemberSpec(name, "table", dtype, spec.row_shape, new_arrays.REDUCTION, table=table)


def of_member(spec: MemberSpec) -> TableSpec:
    """Return a segment's table as a user specifies it.

    Raises:
        DataLossError: Its numbers are out of range.
    """
    if spec.table is None:
        raise DataLossError(f"table {spec.name!r} has no initial contents")
    number, numbers, seed, max_rows = spec.table
    try:
        initial = init.of_config(number, list(numbers), seed)
        shape = tuple(dim or 0 for dim in spec.shape or ())
        return TableSpec(shape, spec.dtype.numpy, initial=initial, max_rows=max_rows)
    except InvalidArgumentError as error:
        pass_on(error)
        raise DataLossError(f"table {spec.name!r} has numbers out of range: {error}") from None


def differences(
    name: str, has: MemberSpec | None, wants: MemberSpec | None
) -> Iterator[tuple[str, str, str]]:
    """Yield the differences of two members, at least one a table, as (what, existing, asked)."""
    if has is None or wants is None or has.kind != wants.kind:
        one, other = (_described(spec) for spec in (has, wants))
        yield f"{name!r}", one, other
        return
    existing, asked = of_member(has), of_member(wants)
    for what in ("row_shape", "dtype", "initial", "max_rows"):
        one, other = str(getattr(existing, what)), str(getattr(asked, what))
        if one != other:
            yield f"{what} of table {name!r}", one, other


def _described(spec: MemberSpec | None) -> str:
    if spec is None:
        return "none"
    kind = "a table of" if spec.kind == "table" else "an array,"
    return f"{kind} {spec.dtype.name} {describe_shape(spec.shape)}"
