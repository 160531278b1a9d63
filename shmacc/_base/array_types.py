"""The types of arrays that the public API hands out."""

from typing import Any

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]
ValueArray = npt.NDArray[Any]
