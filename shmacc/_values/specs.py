"""Specs of tensors, as a user gives them: of a group's members, of new arrays."""

from typing import TYPE_CHECKING, Any

from shmacc._values import arguments, dtypes

if TYPE_CHECKING:
    import numpy as np

    from shmacc._base.array_types import Shape

OVER_HOSTS: set[int] = set()
"""The tokens of parameters that shmacc.ray has spread over hosts: their groups are spread, too."""


class TensorSpec:
    """A dense member of a group: an array of this shape and dtype.

    Args:
        shape: The shape of gradients; None: the rank is unknown; None as a dimension: the dimension
            is unknown.
        dtype: One of TensorFlow's 19 accumulator dtypes, in any spelling.
        reduction_type: The member's reduction; None: the group's.

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


class IndexedSlicesSpec(TensorSpec):
    """A sparse member of a group: rows of a tensor of this shape and dtype.

    Like ``tf.IndexedSlicesSpec``, it takes the arguments of `TensorSpec`. Errors are the same, too.
    """

    __slots__ = ()
    _KIND = "sparse"
