"""The members of shared arrays and parameters, in an existing or a new segment."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from shmacc import init, optim
from shmacc._accumulators import saved_state
from shmacc._base import dtype_names, layout
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._base.reports import MemberConfig
from shmacc._base.signals import pass_on
from shmacc._parameters.table_spec import TableSpec
from shmacc._segment.spec import MemberSpec
from shmacc._values import arrays, dtypes
from shmacc._values.arguments import describe_shape
from shmacc._values.dtypes import DType
from shmacc._values.specs import IndexedSlicesSpec, TensorSpec
from shmacc.errors import DataLossError, InvalidArgumentError

# Accumulators have no bools, so nothing reads the type of sums (uint64) given here.
BOOL = DType(
    "bool", dtype_names.BOOL, np.dtype(np.bool_), np.dtype(np.bool_), np.dtype(np.uint64), 1
)
_LEFT_OUT = {*layout.OPTIMIZER_OPTIONS, "constraint"}


@dataclass(frozen=True, slots=True)
class ParameterMember(MemberSpec):
    """An array or a table of parameters.

    Region 0 is the array or the rows; the other regions are the optimizer's slots.

    Attributes:
        contents: The name of region 0 in a saved state.
        shape: The shape of the array, or of a row of the table.
        number: The member's number in the segment.
        optimizer: The optimizer; None: only new contents change the member.
    """

    contents: ClassVar[str]

    shape: tuple[int, ...]
    number: int
    optimizer: optim.Optimizer | None

    @property
    def slots(self) -> tuple[optim.Slot, ...]:
        return () if self.optimizer is None else self.optimizer.slots()

    def described_optimizer(self) -> str:
        """Return the optimizer's description in a saved state.

        Options that are off are left out. So states of versions without an option still fit.
        """
        if self.optimizer is None:
            return "None"
        shown = [
            f"{each.name}={getattr(self.optimizer, each.name)!r}"
            for each in fields(self.optimizer)
            if each.name not in _LEFT_OUT or getattr(self.optimizer, each.name)
        ]
        return f"{type(self.optimizer).__name__}({', '.join(shown)})"

    def shape_of(self, region: int) -> tuple[int, ...]:
        """Return the shape of a region of the array, or of a region of a table's row."""
        return self.shape[:-1] if region and self.slots[region - 1].rowwise else self.shape

    def keys(self, number: int) -> list[str]:
        """Return the names of the regions in a saved state, in which the member has this number."""
        return [f"{number}.{self.contents}", *(f"{number}.{slot.name}" for slot in self.slots)]

    def saved(self, state: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> ValueArray:
        """Return a region of a saved state; InvalidArgumentError unless it fits."""
        values: ValueArray = saved_state.get(state, key)
        own = self.dtype.numpy
        if values.dtype.kind == "V" and values.dtype.itemsize == own.itemsize:
            values = values.view(own)  # np.load returns void for bfloat16
        if values.dtype != own or values.shape != shape:
            raise InvalidArgumentError(
                f"The state's {key!r} is {values.dtype} {describe_shape(values.shape)}, but "
                f"{self.noun} {self.name!r} has {own} {describe_shape(shape)} there"
            )
        return values


@dataclass(frozen=True, slots=True)
class ParameterArray(ParameterMember):
    """An array of parameters."""

    contents: ClassVar[str] = "array"

    def bytes(self, region: int) -> int:
        return math.prod(self.shape_of(region)) * self.dtype.numpy.itemsize

    def empty(self, region: int) -> ValueArray:
        """Return an array for a copy of a region.

        Raises:
            ResourceExhaustedError: There is no memory for the array.
        """
        return arrays.empty(self.shape_of(region), self.dtype.numpy)

    def described(self) -> str:
        """Return the description, as in `MemberSpec`."""
        return f"{self.dtype.name} {describe_shape(self.shape)} {self.described_optimizer()}"

    def properties(self) -> dict[str, str | None]:
        """Return the properties that must agree, as in `MemberSpec`."""
        return MemberSpec.properties(self) | {"optimizer": repr(self.optimizer)}

    def config(self) -> tuple[Any, ...]:
        """Return the member in the extension's form, as in `MemberSpec`."""
        return self._config(optimizer=_config_of(self.optimizer))


@dataclass(frozen=True, slots=True)
class ParameterTable(ParameterMember):
    """A table of parameters.

    Attributes:
        table: The table as a user specifies it.
    """

    noun: ClassVar[str] = "table"
    contents: ClassVar[str] = "rows"

    table: TableSpec

    def shape_of(self, region: int) -> tuple[int, ...]:
        """Return the shape of a region of a row. If rows are empty, so are their rowwise slots."""
        return ParameterMember.shape_of(self, region) if math.prod(self.shape) else self.shape

    def member_spec(self) -> IndexedSlicesSpec:
        return IndexedSlicesSpec((None, *self.shape), self.dtype.numpy)

    def described(self) -> str:
        """Return the description, as in `MemberSpec`."""
        shape, optimizer = describe_shape(self.shape), self.described_optimizer()
        return f"table of {self.dtype.name} {shape} from {self.table.initial!r}, {optimizer}"

    def properties(self) -> dict[str, str | None]:
        """Return the properties that must agree, as in `MemberSpec`."""
        names = ("row_shape", "dtype", "initial", "max_rows")
        of_table: dict[str, str | None] = {name: str(getattr(self.table, name)) for name in names}
        return of_table | {"optimizer": repr(self.optimizer)}

    def config(self) -> tuple[Any, ...]:
        """Return the member in the extension's form, as in `MemberSpec`."""
        number, numbers, seed = self.table.initial.config()
        table = (number, tuple(numbers), seed, self.table.max_rows)
        return self._config(optimizer=_config_of(self.optimizer), table=table)


def _config_of(optimizer: optim.Optimizer | None) -> tuple[int, tuple[float, ...]]:
    return (0, ()) if optimizer is None else optimizer.config()


def parameter(
    number: int, spec: MemberSpec, optimizer: optim.Optimizer | None, table: TableSpec | None
) -> ParameterArray | ParameterTable:
    """Return the member of parameters for an array's spec, or for the spec of a table's rows."""
    shape = tuple(dim or 0 for dim in spec.shape or ())
    if table is None:
        return ParameterArray(spec.name, spec.kind, spec.dtype, shape, number, optimizer)
    return ParameterTable(spec.name, spec.kind, spec.dtype, shape, number, optimizer, table)


def of_config(config: MemberConfig) -> MemberSpec:
    """Return the spec of an array or table of a segment from its configuration.

    Raises:
        DataLossError: The dtype, kind or shape is unknown.
    """
    number, declared = config["dtype"], config["declared"]
    dtype = BOOL if number == BOOL.number else dtypes.stored(number)
    kind = layout.KIND_NAMES.get(config["kind"])
    if declared is None or kind not in {"dense", "table"}:
        raise DataLossError(f"array {config['name']!r} has an unknown shape")
    return MemberSpec(config["name"], kind, dtype, tuple(declared))


def parameter_of_config(number: int, config: MemberConfig) -> ParameterArray | ParameterTable:
    """Return the member of parameters of this number from its configuration.

    Raises:
        DataLossError: `of_config` raises it, or the optimizer or initial contents are out of range.
    """
    spec, table = of_config(config), None
    noun = "table" if spec.kind == "table" else "array"
    try:
        optimizer = optim.of_config(config["optimizer"])
        if spec.kind == "table":
            table = _table_of_config(spec, config)
    except InvalidArgumentError as error:
        pass_on(error)
        raise DataLossError(f"{noun} {spec.name!r} has numbers out of range: {error}") from None
    return parameter(number, spec, optimizer, table)


def _table_of_config(spec: MemberSpec, config: MemberConfig) -> TableSpec:
    if config["table"] is None:
        raise DataLossError(f"table {spec.name!r} has no initial contents")
    number, numbers, seed, max_rows = config["table"]
    shape = tuple(dim or 0 for dim in spec.shape or ())
    initial = init.of_config(number, list(numbers), seed)
    return TableSpec(shape, spec.dtype.numpy, initial=initial, max_rows=max_rows)


def gradient_specs(
    members: Iterable[ParameterArray | ParameterTable], sparse: Iterable[str]
) -> dict[str, TensorSpec]:
    """Return the specs of the members' gradients: rows for tables, and for names in `sparse`.

    Raises:
        InvalidArgumentError: There is no array of such a name, or it has no rows.
    """
    names = {sparse} if isinstance(sparse, str) else set(sparse)
    specs: dict[str, TensorSpec] = {}
    for member in members:
        of_rows = member.name in names
        names.discard(member.name)
        if isinstance(member, ParameterTable):
            specs[member.name] = member.member_spec()
        elif of_rows and not member.shape:
            raise InvalidArgumentError(f"Array {member.name!r} is a number, and has no rows")
        elif member.dtype is not BOOL:
            make = IndexedSlicesSpec if of_rows else TensorSpec
            specs[member.name] = make(member.shape, member.dtype.numpy)
    for name in names:
        raise InvalidArgumentError(f"There is no array {name!r}")
    return specs


def checked_ids(value: object, what: str) -> IndexArray:
    """Return ids of any shape as C-contiguous int64, which may be the caller's array itself.

    Raises:
        InvalidArgumentError: The ids are not integers from 0 to below 2**63.
        ResourceExhaustedError: There is no memory for the conversion.
    """
    ids = arrays.index_array(value, what)
    if ids.size and int(ids.min()) < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but one is {int(ids.min())}")
    return ids
