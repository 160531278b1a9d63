"""The actor that writes the published arrays of its node, and what it is sent."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from shmacc._accumulators.shared_arrays import SharedArrays
from shmacc.errors import InvalidArgumentError
from shmacc.ray._head import LONG
from shmacc.ray._parts import find_actor, make_actor

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


def find_keeper(shared_name: str, node: str, seconds: float = LONG) -> Any | None:
    """Return the keeper of a node; None: there is none now.

    Raises:
        DeadlineExceededError: Ray's head has not answered for so many seconds.
    """
    return find_actor(_name(shared_name, node), seconds)


def make_keeper(shared_name: str, node: str, options: Mapping[str, Any], seconds: float) -> Any:
    """Make the keeper of a node, or find it.

    Raises:
        DeadlineExceededError: Ray's head has not answered for so many seconds.
    """
    kind, name = ray.remote(KeeperActor), _name(shared_name, node)
    return make_actor(kind, name, node, shared_name, options, seconds=seconds)


def rows_of(arrays: SharedArrays, changed: Mapping[str, npt.ArrayLike | None]) -> Rows:
    """Return the contents of these rows, each once.

    Raises:
        InvalidArgumentError: No array of this name.
        IndexError: No such row.
    """
    found: dict[str, tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]] = {}
    for name, rows in changed.items():
        if name not in arrays:
            raise InvalidArgumentError(f"There is no array {name!r} in {arrays.shared_name!r}")
        if rows is None:
            found[name] = None, arrays[name]
        elif len(numbers := np.unique(np.asarray(rows, np.int64))):
            found[name] = numbers, arrays[name][numbers]
    return found


def _name(shared_name: str, node: str) -> str:
    return f"{shared_name}/keeper {node}"
