"""TensorFlow's clipping by the global norm, for the gradients of a round."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmacc._base.array_types import ValueArray
from shmacc._values.numbers import finite
from shmacc._values.slices import IndexedSlices
from shmacc.errors import InvalidArgumentError


def clip_by_global_norm(taken: Mapping[str, Any], clip_norm: float) -> tuple[dict[str, Any], float]:
    """Clip as `shmacc.optim.clip_by_global_norm` documents."""
    measures = isinstance(clip_norm, float) and clip_norm == math.inf
    limit = math.inf if measures else finite(clip_norm, "clip_norm")
    if limit < 0:
        raise InvalidArgumentError(f"clip_norm must not be negative, but was {limit:g}")
    if not isinstance(taken, Mapping):
        raise InvalidArgumentError(
            "The gradients must be a mapping from names, as a group's round gives, but were a "
            f'{type(taken).__name__}; of a single accumulator\'s round: {{"name": taken}}'
        )
    values = {name: _values(name, part) for name, part in taken.items()}
    norm = math.sqrt(sum(map(_square_sum, values.values())))
    scale = limit / max(norm, limit) if limit < norm < math.inf else 1.0
    if not math.isfinite(norm):
        scale = math.nan
    scaled = {name: _scaled(each, scale) for name, each in values.items()}
    clipped = {
        name: IndexedSlices(scaled[name], part.indices)
        if hasattr(part, "indices")
        else scaled[name]
        for name, part in taken.items()
    }
    return clipped, norm


def _values(name: str, part: Any) -> ValueArray:
    found = getattr(part, "values" if hasattr(part, "indices") else "value", None)
    if not isinstance(found, np.ndarray):
        raise InvalidArgumentError(
            f"The gradient of {name!r} must be a part of a round, as taken[{name!r}], but was a "
            f"{type(part).__name__}"
        )
    if not np.can_cast(found.dtype, np.float64) or found.dtype.kind in "biu":
        raise InvalidArgumentError(
            f"{name!r} has {found.dtype}, and is no gradient to clip: leave it out, by "
            f"taken.without({name!r})"
        )
    return found


def _square_sum(values: ValueArray) -> float:
    flat = values.reshape(-1)
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64, casting="unsafe"))


def _scaled(values: ValueArray, scale: float) -> ValueArray:
    if scale == 1.0:
        return values
    scaled = np.empty_like(values)
    return np.multiply(values, scale, out=scaled, dtype=np.float64, casting="unsafe")
