"""The types of arrays that the public API hands out, and of their shapes."""

from typing import Any

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]

Shape = tuple[int | None, ...] | None
"""A declared shape: None for an unknown rank, None as a dimension for an unknown dimension."""
