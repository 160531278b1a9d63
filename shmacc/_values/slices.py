"""Rows of a tensor; and the class that marks partials, which must not be applied as gradients."""

from typing import Any


class Undivided:
    """The base of partials, whose counts would be lost if they were applied as gradients."""

    __slots__ = ()


class IndexedSlices:
    """Some rows of a tensor, like ``tf.IndexedSlices``.

    Args:
        values: Shape ``(n, ...)``: the rows.
        indices: Shape ``(n,)``: which rows they are.
        dense_shape: The shape of the whole tensor, or None.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values: Any = values
        self.indices: Any = indices
        self.dense_shape: Any = dense_shape

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape!r})"
        )
