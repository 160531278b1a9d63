"""Checks the new arrays and tables that a constructor gets, and makes their first contents."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmacc import _core, optim
from shmacc._base import dtype_names, layout
from shmacc._base.array_types import ValueArray
from shmacc._base.shown import shown
from shmacc._parameters.members import (
    BOOL,
    ParameterArray,
    ParameterMember,
    ParameterTable,
    parameter,
)
from shmacc._parameters.table_spec import TableSpec
from shmacc._segment.spec import MemberSpec
from shmacc._values import arguments, arrays, dtypes
from shmacc._values.arguments import describe_shape
from shmacc._values.dtypes import DType
from shmacc._values.specs import TensorSpec
from shmacc.errors import InvalidArgumentError

Optimizers = optim.Optimizer | Mapping[str, optim.Optimizer] | None

_OPTIMIZED = {"float32", "float64"}
_FILLED_AT_ONCE = 1 << 16  # bytes of initial values, repeated over a new slot


@dataclass(frozen=True, slots=True)
class NewMember:
    """An array or table that a constructor is given.

    Attributes:
        spec: The name, dtype and shape.
        given: The array's contents; None: zeros, or a table.
        table: The table's spec; None: an array.
    """

    spec: MemberSpec
    given: ValueArray | None = None
    table: TableSpec | None = None

    def contents(self) -> tuple[int, ValueArray | None]:
        """Return the array's size in bytes and its bytes; None: zeros."""
        dtype = self.spec.dtype.numpy
        if self.given is None:
            shape = (dim or 0 for dim in self.spec.shape or ())
            return math.prod(shape) * dtype.itemsize, None
        as_bytes = arrays.as_bytes(self.given, dtype, f"array {self.spec.name!r}")
        return as_bytes.size, as_bytes

    def parameter(self, number: int, optimizers: Optimizers) -> ParameterArray | ParameterTable:
        """Return the member of parameters that is made of this.

        Args:
            number: The member's number.
            optimizers: One optimizer for all, or optimizers by name; None: there are no optimizers.

        Raises:
            InvalidArgumentError: The optimizer is not of `optim`, or does not fit the dtype.
        """
        name, dtype = self.spec.name, self.spec.dtype
        optimizer = optimizers.get(name) if isinstance(optimizers, Mapping) else optimizers
        if optimizer is not None:
            if type(optimizer) not in optim.KINDS:  # no subclass: a segment cannot keep its code
                kinds = ", ".join(kind.__name__ for kind in optim.KINDS)
                raise InvalidArgumentError(
                    f"The optimizer of array {name!r} must be an object of shmacc.optim's {kinds}, "
                    f"but was {shown(optimizer)}"
                    + (
                        f": give the constraint to one, as in SGD(0.1, constraint={optimizer})"
                        if isinstance(optimizer, optim.Constraint)
                        else ""
                    )
                )
            if dtype.name not in _OPTIMIZED:
                raise InvalidArgumentError(
                    "An array with an optimizer has dtype float32 or float64, but array "
                    f"{name!r} has {dtype.name}"
                )
            info = np.finfo(dtype.numpy)
            optimizer.check_numbers(float(info.tiny), float(info.max))
            self._check_rows(optimizer.constraint)
        return parameter(number, self.spec, optimizer, self.table)

    def _check_rows(self, constraint: optim.Constraint | None) -> None:
        """Refuse a constraint on norms if each row is only one number."""
        shape: tuple[int | None, ...] = self.spec.shape or ()
        if self.table is not None:
            shape = (None, *shape)
        if constraint is not None and constraint.of_norms and not shape[1:]:
            raise InvalidArgumentError(
                f"{type(constraint).__name__} is of rows, so an array has two dimensions or more, "
                f"but {self.spec.name!r} has shape {describe_shape(shape)}: choose the others by "
                f'patterns, as in optimizer={{"emb*": SGD(0.1, constraint={constraint}), '
                '"*": SGD(0.1)}'
            )


def new_members(contents: object) -> tuple[NewMember, ...]:
    """Check the arrays and tables that a constructor is given, and return them.

    Args:
        contents: The constructor's argument, a mapping.

    Raises:
        InvalidArgumentError: A bad name, shape or dtype.
    """
    if not isinstance(contents, Mapping):
        raise InvalidArgumentError(
            "Shared arrays are a mapping from name to array or TensorSpec, but were a "
            f"{type(contents).__name__}"
        )
    found: dict[str, NewMember] = {}
    for name, value in contents.items():
        arguments.check_member_name(name, "An array")
        if name in found:
            raise InvalidArgumentError(f"Array {name!r} occurs more than once")
        found[name] = _new_member(name, value)
    if not 1 <= len(found) <= layout.MAX_MEMBERS:
        raise InvalidArgumentError(
            f"There are 1 to {layout.MAX_MEMBERS} shared arrays, but {len(found)} were given"
        )
    return tuple(found.values())


def _new_member(name: str, value: object) -> NewMember:
    if isinstance(value, TableSpec):
        of_rows = MemberSpec(name, "table", dtypes.resolve(value.dtype), value.row_shape)
        return NewMember(of_rows, table=value)
    given = None
    if isinstance(value, TensorSpec):
        if value.shape is None or None in value.shape:
            raise InvalidArgumentError(
                f"The shape of array {name!r} must be known, but is {describe_shape(value.shape)}"
            )
        dtype, shape = value.dtype, value.shape
    elif isinstance(value, tuple):  # most callers mean a shape, but NumPy would make an array
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
        allowed = ", ".join(sorted([BOOL.name, *dtype_names.NUMBERS]))
        raise InvalidArgumentError(
            f"Array {name!r} has dtype {dtype}, which is not in list of allowed values: {allowed}"
        )
    if len(shape) > layout.MAX_RANK:
        raise InvalidArgumentError(f"A shape has at most {layout.MAX_RANK} dimensions")
    # As in NumPy, a dimension of 0 counts as 1, so that the other dimensions are limited, too.
    if math.prod(dim or 1 for dim in shape) * dtype.itemsize > layout.REGION_SPAN:
        raise InvalidArgumentError(
            f"An array has at most 2**40 bytes, but array {name!r} of shape "
            f"{describe_shape(shape)} has more"
        )
    return NewMember(MemberSpec(name, "dense", known, shape), given)


def _known(dtype: np.dtype[Any]) -> DType | None:
    if dtype == BOOL.numpy:
        return BOOL
    try:
        return dtypes.resolve(dtype)
    except InvalidArgumentError:
        return None


def with_slots(new: NewMember, member: ParameterMember) -> list[tuple[int, ValueArray | None]]:
    """Return array and slots in the extension's form; a new table has neither."""
    if not isinstance(member, ParameterArray):
        return []
    made = [_constrained(member, *new.contents())]
    for region, slot in enumerate(member.slots, 1):
        bytes_, dtype = member.bytes(region), member.dtype.numpy
        initial = None
        if slot.initial and bytes_:
            initial = _repeated(slot.initial, bytes_, dtype)
        made.append((bytes_, initial))
    return made


def _constrained(
    member: ParameterArray, size: int, contents: ValueArray | None
) -> tuple[int, ValueArray | None]:
    """Return an array's first contents, limited by its constraint."""
    optimizer, dtype, row = member.optimizer, member.dtype.numpy, math.prod(member.shape[1:])
    if optimizer is None or optimizer.constraint is None or size == 0:
        return size, contents
    if contents is None:
        made, row = _repeated(0.0, size, dtype), 1  # a limit of norms leaves zeros as they are
    else:
        made = arrays.empty(contents.shape, contents.dtype)
        made[...] = contents
    _core.constrain(optimizer.config(), made, row, dtype == np.float64)
    return size, made


def _repeated(number: float, size: int, dtype: np.dtype[Any]) -> ValueArray:
    """Return the beginning of a region that has the same number everywhere."""
    count = min(size, _FILLED_AT_ONCE) // dtype.itemsize
    with np.errstate(all="ignore"):  # a tiny number is just rounded
        return arrays.bytes_of(np.full(count, number, dtype))
