"""The members of accumulators, which reduce gradients."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shmacc._base import layout
from shmacc._base.reports import MemberConfig
from shmacc._segment.spec import MemberSpec, Spec
from shmacc._values import dtypes
from shmacc._values.arguments import describe_shape
from shmacc._values.specs import IndexedSlicesSpec, TensorSpec
from shmacc.errors import DataLossError


@dataclass(frozen=True, slots=True)
class AccumulatedMember(MemberSpec):
    """A member of a group, or the member of a single accumulator, which has no name.

    Attributes:
        reduction: The reduction, as a user names it.
        parameters: The same as in `TensorSpec`; None for a member of an existing segment.
    """

    noun: ClassVar[str] = "member"

    reduction: str
    parameters: tuple[int, str] | None = None

    @classmethod
    def of_tensor(cls, name: str, spec: TensorSpec, reduction: str) -> Self:
        """Return the member of this spec, in a group with this `reduction`."""
        kind = "sparse" if isinstance(spec, IndexedSlicesSpec) else "dense"
        reduction = spec.reduction_type or reduction
        dtype = dtypes.resolve(spec.dtype)
        return cls(name, kind, dtype, spec.shape, reduction, spec.parameters)

    @classmethod
    def of_config(cls, _: int, config: MemberConfig) -> Self:
        """Return the member of this configuration; the extension has checked the name.

        Raises:
            DataLossError: The dtype is unknown, or its type of sums does not fit the dtype.
        """
        dtype = dtypes.stored(config["dtype"])
        if (dtype.sum_code, dtype.components) != (config["sum"], config["components"]):
            raise DataLossError(f"A member of {dtype.name} has the sums of another dtype")
        declared = config["declared"]
        shape = None if declared is None else tuple(None if dim < 0 else dim for dim in declared)
        kind = layout.KIND_NAMES[config["kind"]]
        return cls(config["name"], kind, dtype, shape, layout.REDUCTION_NAMES[config["reduction"]])

    def tensor_spec(self) -> TensorSpec:
        """Return the member's spec as a user gives it."""
        make = IndexedSlicesSpec if self.kind == "sparse" else TensorSpec
        return make(self.shape, self.dtype.numpy, reduction_type=self.reduction)

    def described(self) -> str:
        """Return the description, as in `MemberSpec`."""
        shape = describe_shape(self.shape)
        return f"{self.kind} {self.dtype.name} {shape} {self.reduction}"

    def properties(self) -> dict[str, str | None]:
        """Return the properties that must agree; None, for an undeclared shape, always agrees."""
        return {
            "kind": self.kind,
            "dtype": self.dtype.name,
            "reduction_type": self.reduction,
            "shape": None if self.shape is None else describe_shape(self.shape),
        }

    def config(self) -> tuple[Any, ...]:
        """Return the member in the extension's form, as in `MemberSpec`."""
        return self._config(self.reduction)


AccumulatorSpec = Spec[AccumulatedMember]
