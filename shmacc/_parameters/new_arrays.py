"""Specs of shared arrays: those that a constructor is given, and those that a segment has."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmacc._base import dtype_names, layout
from shmacc._base.array_types import ValueArray
from shmacc._base.reports import MemberConfig
from shmacc._base.shown import shown
from shmacc._values import arguments, arrays, dtypes
from shmacc._values.arguments import describe_shape
from shmacc._values.dtypes import DType
from shmacc._values.spec import MemberSpec, TensorSpec
from shmacc.errors import DataLossError, InvalidArgumentError

REDUCTION = "SUM"  # a placeholder: every segment has a reduction, but arrays are not reduced
_BOOL = DType(
    "bool", dtype_names.BOOL, np.dtype(np.bool_), np.dtype(np.bool_), np.dtype(np.uint64), 1
)


@dataclass(frozen=True, slots=True)
class Asked:
    """An array or table that a constructor is given.

    Attributes:
        spec: The name, dtype and shape.
        given: The array's contents; None: zeros, or a table.
    """

    spec: MemberSpec
    given: ValueArray | None

    def contents(self) -> tuple[int, ValueArray | None]:
        """Return the array's size in bytes and its bytes; None: zeros."""
        dtype = self.spec.dtype.numpy
        if self.given is None:
            shape = (dim or 0 for dim in self.spec.shape or ())
            return math.prod(shape) * dtype.itemsize, None
        as_bytes = arrays.as_bytes(self.given, dtype, f"array {self.spec.name!r}")
        return as_bytes.size, as_bytes


def asked(contents: object, table: Callable[[str, object], MemberSpec | None]) -> tuple[Asked, ...]:
    """Return the arrays and tables that a constructor is given, checked.

    Args:
        contents: The constructor's argument, a mapping.
        table: Returns a member's spec from its name and value if the value is a table, else None.

    Raises:
        InvalidArgumentError: A bad name, shape or dtype.
    """
    if not isinstance(contents, Mapping):
        raise InvalidArgumentError(
            "Shared arrays are a mapping from name to array or TensorSpec, but were a "
            f"{type(contents).__name__}"
        )
    found: dict[str, Asked] = {}
    for name, value in contents.items():
        arguments.check_member_name(name, "An array")
        if name in found:
            raise InvalidArgumentError(f"Array {name!r} occurs more than once")
        member = table(name, value)
        found[name] = _one_asked(name, value) if member is None else Asked(member, None)
    if not 1 <= len(found) <= layout.MAX_MEMBERS:
        raise InvalidArgumentError(
            f"There are 1 to {layout.MAX_MEMBERS} shared arrays, but {len(found)} were given"
        )
    return tuple(found.values())


def _one_asked(name: str, value: object) -> Asked:
    given = None
    if isinstance(value, TensorSpec):
        if value.shape is None or None in value.shape:
            raise InvalidArgumentError(
                f"The shape of array {name!r} must be known, but is {describe_shape(value.shape)}"
            )
        dtype, shape = value.dtype, value.shape
    elif isinstance(value, tuple):  # most callers mean a shape, but NumPy makes an array of it
        text = shown(value)
        raise InvalidArgumentError(
            f"Array {name!r} must be an array or a TensorSpec, but was a tuple: "
            f"TensorSpec({text}) is of that shape, np.array({text}) has that contents"
        )
    else:
        given = arrays.as_array(value, f"array {name!r}")
        dtype, shape = given.dtype, given.shape
    known = _known(dtype)
    if known is None:
        allowed = ", ".join(sorted([_BOOL.name, *dtype_names.NUMBERS]))
        raise InvalidArgumentError(
            f"Array {name!r} has dtype {dtype}, which is not in list of allowed values: {allowed}"
        )
    if len(shape) > layout.MAX_RANK:
        raise InvalidArgumentError(f"A shape has at most {layout.MAX_RANK} dimensions")
    # Dimensions of 0 count as 1, as in NumPy: so the other dimensions are limited, too.
    if math.prod(dim or 1 for dim in shape) * dtype.itemsize > layout.REGION_SPAN:
        raise InvalidArgumentError(
            f"An array has at most 2**40 bytes, but array {name!r} of shape "
            f"{describe_shape(shape)} has more"
        )
    return Asked(MemberSpec(name, "dense", known, shape, REDUCTION), given)


def _known(dtype: np.dtype[Any]) -> DType | None:
    if dtype == _BOOL.numpy:
        return _BOOL
    try:
        return dtypes.resolve(dtype)
    except InvalidArgumentError:
        return None


def of_config(config: MemberConfig) -> MemberSpec:
    """Return the spec of an array or table of a segment from its configuration.

    Raises:
        DataLossError: Its dtype, kind or shape is unknown.
    """
    number, declared = config["dtype"], config["declared"]
    dtype = _BOOL if number == _BOOL.number else dtypes.stored(number)
    kind = layout.KIND_NAMES.get(config["kind"])
    if declared is None or kind not in {"dense", "table"}:
        raise DataLossError(f"array {config['name']!r} has an unknown shape")
    number, numbers = config["optimizer"]
    optimizer, table = (number, tuple(numbers)), None
    if config["table"] is not None:
        initial, its_numbers, seed, max_rows = config["table"]
        table = (initial, tuple(its_numbers), seed, max_rows)
    return MemberSpec(
        config["name"], kind, dtype, tuple(declared), REDUCTION, optimizer, table=table
    )


def differences(
    name: str, has: MemberSpec | None, wants: MemberSpec | None
) -> Iterator[tuple[str, str, str]]:
    """Yield the differences of two arrays as (what, existing, asked)."""
    if has is None or wants is None:
        yield f"array {name!r}", _describe(has), _describe(wants)
        return
    if has.dtype.name != wants.dtype.name:
        yield f"dtype of array {name!r}", has.dtype.name, wants.dtype.name
    if has.shape != wants.shape:
        yield f"shape of array {name!r}", describe_shape(has.shape), describe_shape(wants.shape)


def _describe(array: MemberSpec | None) -> str:
    return "none" if array is None else f"{array.dtype.name} {describe_shape(array.shape)}"
