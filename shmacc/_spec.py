"""The properties of an accumulator, as a constructor asks for them or a segment has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from shmacc import _dtypes as dtypes
from shmacc import _layout as layout
from shmacc._arguments import Shape, describe_shape


@dataclass(frozen=True, slots=True)
class Spec:
    """Kind, dtype, shape, reduction and rights of an accumulator.

    Attributes:
        kind: "sparse" or "dense".
        dtype: The accumulator's dtype.
        shape: The declared shape, None for unknown dimensions; None for an unknown rank.
        reduction: "MEAN", "SUM" or "CMEAN".
        mode: Permission bits of segment and semaphore; None: 0600, or what an existing one has.
        private: Whether it is removed with its creator.
    """

    kind: str
    dtype: dtypes.DType
    shape: Shape
    reduction: str
    mode: int | None
    private: bool

    @classmethod
    def of_config(cls, config: dict[str, Any], mode: int) -> Self | None:
        """Return the spec of a segment with this configuration; None if its numbers are invalid.

        Args:
            config: The extension's report of it.
            mode: The permission bits that its file has.
        """
        kind = layout.KIND_NAMES.get(config["kind"])
        dtype = dtypes.by_number(config["dtype"])
        reduction = layout.REDUCTION_NAMES.get(config["reduction"])
        if kind is None or dtype is None or reduction is None:
            return None
        if (dtype.sum_code, dtype.components) != (config["sum"], config["components"]):
            return None
        declared = config["declared"]
        shape = None if declared is None else tuple(None if dim < 0 else dim for dim in declared)
        return cls(kind, dtype, shape, reduction, mode, config["is_private"])

    def disagreements(self, asked: "Spec") -> Iterator[tuple[str, str, str]]:
        """Yield where an existing accumulator differs from the one asked for.

        Each difference is (what, existing, asked). A shape or mode that is not given agrees with
        any.
        """
        pairs = [
            ("kind", self.kind, asked.kind),
            ("dtype", self.dtype.name, asked.dtype.name),
            ("reduction_type", self.reduction, asked.reduction),
        ]
        if asked.shape is not None:
            pairs.append(("shape", describe_shape(self.shape), describe_shape(asked.shape)))
        if asked.mode is not None:
            pairs.append(("mode", f"{self.mode:04o}", f"{asked.mode:04o}"))
        for what, existing, wanted in pairs:
            if existing != wanted:
                yield what, existing, wanted
