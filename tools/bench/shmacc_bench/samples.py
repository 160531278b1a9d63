"""Medians and their spread, and ratios that a drifting machine does not move."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in five numbers, in the unit of its samples."""

    count: int
    median: float
    p10: float
    p90: float
    mad: float


def summarise(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one sample."""
    if not samples:
        raise ValueError("no samples")
    array = np.asarray(samples, np.float64)
    median = float(np.median(array))
    p10, p90 = (float(p) for p in np.percentile(array, (10, 90)))
    mad = float(np.median(np.abs(array - median)))
    return Summary(len(samples), median, p10, p90, mad)


def paired_ratio(mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Summary:
    """Return the distribution of mine / theirs over the rounds that both took part in.

    Both were measured within the same fraction of a second in each round, so that whatever else
    the machine was doing then slowed both, and the ratio is steadier than either.
    """
    ratios = [
        float(np.median(a) / np.median(b)) for a, b in zip(mine, theirs, strict=False) if a and b
    ]
    return summarise(ratios)
