"""The actor that writes the published arrays of its node."""

import os
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from shmacc._accumulators.shared_arrays import SharedArrays

Arrays = dict[str, npt.NDArray[Any]]
Rows = Mapping[str, tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]]
"""From array to the numbers of rows and their values; None: the whole."""


class KeeperActor:
    """Writes the arrays of its node: one call at a time, and what one chief sends."""

    def __init__(self, shared_name: str, options: Mapping[str, Any]) -> None:
        self._shared_name, self._options = shared_name, options
        self._arrays: SharedArrays | None = None
        self._chief: str | None = None

    def pid(self) -> int:
        """Return the process that the keeper is."""
        return os.getpid()

    def obey(self, chief: str, everything: Arrays) -> bool:
        """Write everything, and from now on what this chief sends; return True."""
        # New ones are complete before they have their name; existing ones must agree.
        arrays = SharedArrays(everything, self._shared_name, **self._options)
        if self._arrays is not None:
            self._arrays.close()
        self._arrays, self._chief = arrays, chief
        return self.write(chief, {name: (None, values) for name, values in everything.items()})

    def write(self, chief: str, changed: Rows) -> bool:
        """Write rows; False: another chief publishes now."""
        if self._arrays is None or self._chief != chief:
            return False
        for name, (rows, values) in changed.items():
            self._arrays[name][... if rows is None else rows] = values
        return True

    def end(self) -> None:
        """Remove the arrays' name on this node."""
        if self._arrays is not None:
            self._arrays.unlink()
            self._arrays.close()
