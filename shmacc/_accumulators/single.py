"""The common base of the sparse and the dense accumulator, for one tensor's gradients."""

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shmacc._accumulators.accumulator import Accumulator
from shmacc._accumulators.member_gradient import MemberInput
from shmacc._accumulators.members import AccumulatedMember, AccumulatorSpec
from shmacc._base.array_types import Shape
from shmacc._segment.options import Options
from shmacc._values import arguments, dtypes

if TYPE_CHECKING:  # the defaults let users write the class without parameters
    from typing_extensions import TypeVar

    _Taken_co = TypeVar("_Taken_co", covariant=True, default=Any)
    _Partial_co = TypeVar("_Partial_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Taken_co = TypeVar("_Taken_co", covariant=True)
    _Partial_co = TypeVar("_Partial_co", covariant=True)

_IS_BASE = (
    "ConditionalAccumulatorBase is the base of two classes: make a SparseConditionalAccumulator or "
    "a ConditionalAccumulator, or get either by its name with shmacc.attach"
)


class ConditionalAccumulatorBase(Accumulator[_Taken_co, _Partial_co]):
    """The base of `SparseConditionalAccumulator` and `ConditionalAccumulator`.

    Use it for ``isinstance`` and annotations. Both classes have everything documented here.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Refuse: only the two subclasses can be instantiated.

        Raises:
            TypeError: Always.
        """
        raise TypeError(_IS_BASE)

    @classmethod
    def _attach(cls, shared_name: object, owners: object, timeout: object, own: Any = None) -> Self:
        if cls is ConditionalAccumulatorBase:
            raise TypeError(_IS_BASE)
        return super()._attach(shared_name, owners, timeout, own)

    def _make(
        self,
        dtype: object,
        shape: object,
        shared_name: str | None,
        name: str | None,
        reduction_type: str | None,
        options: Options,
    ) -> None:
        reduction = arguments.reduction(reduction_type)
        known, declared = dtypes.resolve(dtype), arguments.declared_shape(shape, self._KIND)
        member = AccumulatedMember("", self._KIND, known, declared, reduction)
        self._open((member,), shared_name, options, name, reduction=reduction)

    def _examine(self, existing: AccumulatorSpec, own: str | None) -> None:
        super()._examine(existing, own)
        self._member_spec = self._spec.members[0]
        self._member = MemberInput(0, self._member_spec)
        self._dtype = self._member_spec.dtype
        self._plain_type = self._dtype.plain_type
        self._shape = self._member_spec.shape

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._shared_name!r} {self._dtype.name} "
            f"{arguments.describe_shape(self._shape)} {self._spec.reduction}"
            f"{' closed' if self._handle.closed else ''}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of gradients and results."""
        return self._dtype.numpy

    @property
    def shape(self) -> Shape:
        """The declared shape; None: unknown rank; None as a dimension: unknown dimension."""
        return self._shape
