"""The specs of segments and members: as a constructor asks for them, or as they exist."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from shmacc._base import layout
from shmacc._base.array_types import Shape
from shmacc._base.reports import Config, MemberConfig
from shmacc._values.arguments import describe_shape
from shmacc._values.dtypes import DType

NOT_REDUCED = "SUM"
"""The reduction of arrays: each segment stores a reduction, but nobody reads an array's."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """An array as a member of a segment; members of accumulators and parameters extend this class.

    Attributes:
        noun: The word for such a member in messages.
        name: The member's name; empty in a single accumulator.
        kind: "sparse", "dense" or "table".
        dtype: The dtype of its numbers.
        shape: The declared shape, with None for unknown dimensions; None: the rank is unknown. The
            shape of a table is the shape of its rows.
    """

    noun: ClassVar[str] = "array"

    name: str
    kind: str
    dtype: DType
    shape: Shape

    def described(self) -> str:
        """Return the member's description. It is part of the format of saved states."""
        return f"{self.dtype.name} {describe_shape(self.shape)}"

    def properties(self) -> dict[str, str | None]:
        """Return the properties that must agree with an existing member's; None always agrees."""
        return {"dtype": self.dtype.name, "shape": describe_shape(self.shape)}

    def config(self) -> tuple[Any, ...]:
        """Return the member in the extension's form."""
        return self._config()

    def _config(
        self, reduction: str = NOT_REDUCED, optimizer: Any = (0, ()), table: Any = None
    ) -> tuple[Any, ...]:
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
            layout.REDUCTIONS[reduction],
            declared,
            lowest,
            highest,
            optimizer,
            table,
        )


_Member = TypeVar("_Member", bound=MemberSpec)


@dataclass(frozen=True, slots=True)
class Spec(Generic[_Member]):
    """Members, limits and rights of a segment.

    Attributes:
        kind: "sparse", "dense", "group", "arrays" or "parameters".
        members: The members, in order.
        reduction: The reduction; in a group, the reduction of members without their own.
        lanes: How many applies go on at a time; None: 1, or the number of an existing accumulator.
        capacity: How many gradients may be pending; None: any number, or the capacity of an
            existing accumulator.
        mode: Permission bits of segment and semaphore; None: 0600, or the mode of an existing
            segment.
        private: Whether the segment is removed with its creator.
    """

    kind: str
    members: tuple[_Member, ...]
    reduction: str
    lanes: int | None
    capacity: int | None
    mode: int | None
    private: bool

    @classmethod
    def of_config(
        cls, config: Config, mode: int, member: Callable[[int, MemberConfig], _Member]
    ) -> Self:
        """Return the spec of a segment with this configuration.

        Args:
            config: The segment's configuration, from the extension.
            mode: The permission bits of the segment's file.
            member: Returns the spec of a member with this number and configuration. If it raises
                DataLossError, so does this.
        """
        return cls(
            layout.KIND_NAMES[config["kind"]],
            tuple(member(number, each) for number, each in enumerate(config["members"])),
            layout.REDUCTION_NAMES[config["reduction"]],
            config["lanes"],
            config["capacity"],
            mode,
            config["is_private"],
        )


def differences(existing: Spec[Any], asked: Spec[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each difference between an existing segment and `asked`: (what, existing, asked).

    Both have the same kind. The order of members does not matter.
    """
    has = {member.name: member for member in existing.members}
    wants = {member.name: member for member in asked.members}
    # Compare in the constructor's order, so that errors name the first difference in that order.
    for name in wants | has:
        yield from _of_member(has.get(name), wants.get(name))
    pairs: list[tuple[str, object, object]] = [
        ("lanes", existing.lanes, asked.lanes),
        ("capacity", existing.capacity or "unbounded", asked.capacity),
        ("mode", f"{existing.mode:04o}", None if asked.mode is None else f"{asked.mode:04o}"),
    ]
    for what, one, other in pairs:
        if other is not None and one != other:
            yield what, str(one), str(other)


def _of_member(has: MemberSpec | None, wants: MemberSpec | None) -> Iterator[tuple[str, str, str]]:
    if has is None or wants is None or has.noun != wants.noun:
        known = [each for each in (has, wants) if each is not None]
        noun = f"{known[0].noun} " if len(known) == 1 else ""
        one, other = ("none" if each is None else each.described() for each in (has, wants))
        yield f"{noun}{known[0].name!r}", one, other
        return
    existing, whose = has.properties(), f" of {wants.noun} {wants.name!r}" if wants.name else ""
    for what, asked in wants.properties().items():
        if asked is not None and existing[what] != asked:
            yield f"{what}{whose}", str(existing[what]), asked
