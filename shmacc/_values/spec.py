"""The properties of accumulators: those that a constructor asks for, or that a segment has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shmacc._base import layout
from shmacc._base.array_types import Shape
from shmacc._base.reports import Config, MemberConfig
from shmacc._values import arguments, dtypes
from shmacc._values.arguments import describe_shape
from shmacc.errors import DataLossError

if TYPE_CHECKING:
    import numpy as np


class TensorSpec:
    """A dense member of a group: an array of this shape and dtype.

    Args:
        shape: As for an accumulator: None for an unknown rank, None as a dimension for an unknown
            dimension.
        dtype: One of TensorFlow's 19 accumulator dtypes, in any spelling.
        reduction_type: As for an accumulator; None: the group's.

    Raises:
        InvalidArgumentError: A bad argument.
    """

    __slots__ = ("dtype", "parameters", "reduction_type", "shape")
    _KIND = "dense"

    def __init__(
        self, shape: Any = None, dtype: Any = "float32", *, reduction_type: str | None = None
    ) -> None:
        self.shape: Shape = arguments.declared_shape(shape, self._KIND)
        self.dtype: np.dtype[Any] = dtypes.resolve(dtype).numpy
        self.reduction_type: str | None = (
            None if reduction_type is None else arguments.reduction(reduction_type)
        )
        self.parameters: tuple[int, str] | None = None
        """The token and name of the parameters that the gradients are for; None: not known."""

    def __repr__(self) -> str:
        reduction = f", reduction_type={self.reduction_type!r}" if self.reduction_type else ""
        return (
            f"{type(self).__name__}({self.shape}, {dtypes.resolve(self.dtype).name!r}{reduction})"
        )

    def member(self, name: str, reduction_type: str) -> "MemberSpec":
        """Return the spec of a member `name`, in a group with this `reduction_type`."""
        dtype = dtypes.resolve(self.dtype)
        return MemberSpec(
            name,
            self._KIND,
            dtype,
            self.shape,
            self.reduction_type or reduction_type,
            parameters=self.parameters,
        )


class IndexedSlicesSpec(TensorSpec):
    """A sparse member of a group: rows of a tensor of this shape and dtype.

    Args and errors as for `TensorSpec`, as in ``tf.IndexedSlicesSpec``.
    """

    __slots__ = ()
    _KIND = "sparse"


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """The properties of one member; a single accumulator has one member, without a name.

    Attributes:
        name: The member's name.
        kind: "sparse" or "dense".
        dtype: The dtype of its gradients.
        shape: The declared shape, None for unknown dimensions; None for an unknown rank.
        reduction: The reduction, as a user names it.
        optimizer: For an array of parameters: its optimizer's kind and numbers, as
            ``Optimizer.config`` returns them.
        parameters: As for `TensorSpec`; None if the spec is that of an existing segment.
        table: For a table of parameters (its shape is that of a row): the initial contents of rows
            (``Initial.config``) and the largest number of rows (None: no limit).
    """

    name: str
    kind: str
    dtype: dtypes.DType
    shape: Shape
    reduction: str
    optimizer: tuple[int, tuple[float, ...]] = (0, ())
    parameters: tuple[int, str] | None = None
    table: tuple[int, tuple[float, ...], int, int | None] | None = None

    @classmethod
    def of_config(cls, config: MemberConfig) -> Self:
        """Return the spec of a member with this configuration; the extension has checked the name.

        Raises:
            DataLossError: Its dtype is unknown, or its type of sums does not fit the dtype.
        """
        kind = layout.KIND_NAMES[config["kind"]]
        dtype = dtypes.stored(config["dtype"])
        reduction = layout.REDUCTION_NAMES[config["reduction"]]
        if (dtype.sum_code, dtype.components) != (config["sum"], config["components"]):
            raise DataLossError(f"A member of {dtype.name} has the sums of another dtype")
        declared = config["declared"]
        shape = None if declared is None else tuple(None if dim < 0 else dim for dim in declared)
        return cls(config["name"], kind, dtype, shape, reduction)

    def config(self) -> tuple[Any, ...]:
        """Return the member's spec as the extension takes it."""
        declared = None
        if self.shape is not None:
            declared = [-1 if dim is None else dim for dim in self.shape]
        lowest, highest = self.dtype.bounds
        return (
            self.name,
            layout.KINDS[self.kind],
            self.dtype.number,
            self.dtype.sum_code,
            self.dtype.components,
            layout.REDUCTIONS[self.reduction],
            declared,
            lowest,
            highest,
            self.optimizer,
            self.table,
        )

    def tensor_spec(self) -> TensorSpec:
        """Return the member's spec as a user gives it."""
        make = IndexedSlicesSpec if self.kind == "sparse" else TensorSpec
        return make(self.shape, self.dtype.numpy, reduction_type=self.reduction)

    def disagreements(self, asked: "MemberSpec") -> Iterator[tuple[str, str, str]]:
        """Yield where an existing member differs from the one asked for, as `Spec` does."""
        pairs = [
            ("kind", self.kind, asked.kind),
            ("dtype", self.dtype.name, asked.dtype.name),
            ("reduction_type", self.reduction, asked.reduction),
        ]
        if asked.shape is not None:
            pairs.append(("shape", describe_shape(self.shape), describe_shape(asked.shape)))
        for what, existing, wanted in pairs:
            if existing != wanted:
                yield what, existing, wanted


@dataclass(frozen=True, slots=True)
class Spec:
    """Members, limits and rights of an accumulator.

    Attributes:
        kind: "sparse", "dense" or "group".
        members: The members, in order; if it is no group, only one, without a name.
        reduction: The reduction; in a group, that of members without their own.
        lanes: How many applies go on at a time; None: 1, or as an existing accumulator has it.
        capacity: How many gradients may be pending; None: any number, or as an existing accumulator
            has it.
        mode: Permission bits of segment and semaphore; None: 0600, or as an existing accumulator
            has them.
        private: Whether the accumulator is removed with its creator.
    """

    kind: str
    members: tuple[MemberSpec, ...]
    reduction: str
    lanes: int | None
    capacity: int | None
    mode: int | None
    private: bool

    @classmethod
    def of_config(cls, config: Config, mode: int) -> Self:
        """Return the spec of a segment with this configuration.

        Args:
            config: The segment's configuration, from the extension.
            mode: The permission bits of the segment's file.

        Raises:
            DataLossError: As for a member's.
        """
        return cls(
            layout.KIND_NAMES[config["kind"]],
            tuple(map(MemberSpec.of_config, config["members"])),
            layout.REDUCTION_NAMES[config["reduction"]],
            config["lanes"],
            config["capacity"],
            mode,
            config["is_private"],
        )

    def disagreements(self, asked: "Spec") -> Iterator[tuple[str, str, str]]:
        """Yield where an existing accumulator differs from the one asked for.

        Each difference is (what, existing, asked). A property that is None in `asked` agrees with
        anything.
        """
        if self.kind != asked.kind:
            yield "kind", self.kind, asked.kind
        elif self.kind == "group":
            yield from self._members_that_differ(asked)
        else:
            yield from self.members[0].disagreements(asked.members[0])
        pairs: list[tuple[str, object, object]] = [
            ("lanes", self.lanes, asked.lanes),
            ("capacity", self.capacity or "unbounded", asked.capacity),
            ("mode", f"{self.mode:04o}", None if asked.mode is None else f"{asked.mode:04o}"),
        ]
        for what, existing, wanted in pairs:
            if wanted is not None and existing != wanted:
                yield what, str(existing), str(wanted)

    def _members_that_differ(self, asked: "Spec") -> Iterator[tuple[str, str, str]]:
        """Yield how members of the same name differ, and missing ones; order does not matter."""
        existing = {member.name: member for member in self.members}
        wanted = {member.name: member for member in asked.members}
        for name, member in wanted.items():
            if name not in existing:
                yield f"member {name!r}", "none", f"{member.kind} {member.dtype.name}"
            else:
                for what, has, wants in existing[name].disagreements(member):
                    yield f"{what} of member {name!r}", has, wants
        for name, member in existing.items():
            if name not in wanted:
                yield f"member {name!r}", f"{member.kind} {member.dtype.name}", "none"
