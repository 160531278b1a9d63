"""The actor that writes the published arrays of its node."""

import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy.typing as npt

from shmacc._accumulators.shared_arrays import SharedArrays

Arrays = dict[str, npt.NDArray[Any]]
Rows = Mapping[str, tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]]
"""From array to the numbers of rows and their values; None: the whole."""

_Answer = Literal["done", "everything, please", "another chief"]


class KeeperActor:
    """Writes the arrays of its node: one call at a time."""

    def __init__(self, shared_name: str, options: Mapping[str, Any]) -> None:
        self._shared_name, self._options = shared_name, options
        self._arrays: SharedArrays | None = None
        self._chief: str | None = None

    def pid(self) -> int:
        """Return the process that the keeper is."""
        return os.getpid()

    def obey(self, chief: str, everything: Arrays) -> None:
        """Write everything, and from now on what this chief sends."""
        # New ones are complete before they have their name; existing ones must agree.
        arrays = SharedArrays(everything, self._shared_name, **self._options)
        if self._arrays is not None:
            self._arrays.close()
        self._arrays = arrays
        for name, values in everything.items():
            self._arrays[name][...] = values
        self._chief = chief

    def write(self, chief: str, changed: Rows) -> _Answer:
        """Write rows."""
        if self._arrays is None or self._chief is None:
            return "everything, please"
        if self._chief != chief:
            return "another chief"
        for name, (rows, values) in changed.items():
            self._arrays[name][... if rows is None else rows] = values
        return "done"

    def end(self) -> None:
        """Remove the arrays' name on this node."""
        if self._arrays is not None:
            self._arrays.unlink()
            self._arrays.close()
