"""What tests of several processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shmacc import ConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def dense() -> Iterator[ConditionalAccumulator]:
    """A named dense accumulator of sums, removed at the end."""
    with ConditionalAccumulator(np.float64, (), "dense", reduction_type="SUM") as acc:
        yield acc
        acc.unlink()
