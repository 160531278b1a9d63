"""The actor that writes the published arrays of its node, and the rows that a chief sends it."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc._parameters.shared_arrays import SharedArrays
from shmacc.errors import InvalidArgumentError, ShmaccError

Arrays = dict[str, npt.NDArray[Any]]
Rows = Mapping[str, tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]]
"""From array to the numbers of rows (None: all rows) and their values."""


class KeeperActor:
    """Writes the arrays of its node: one call at a time, and only what the last chief sends."""

    def __init__(self, shared_name: str) -> None:
        self._shared_name = shared_name
        self._arrays: SharedArrays | None = None
        self._chief: str | None = None

    def pid(self) -> int:
        return os.getpid()

    def obey(self, chief: str, options: Mapping[str, Any], everything: Arrays) -> bool | None:
        """Write everything, and from now on what this chief sends; return True."""
        # New arrays are complete before they have their name; existing ones must agree.
        try:
            kept = {**options, "if_exists": "attach"}
            arrays = SharedArrays(everything, self._shared_name, **kept)
        except InvalidArgumentError:
            if options["if_exists"] != "replace":
                raise
            arrays = SharedArrays(everything, self._shared_name, **options)
        if self._arrays is not None:
            self._arrays.close()
        self._arrays, self._chief = arrays, chief
        return self.write(chief, {name: (None, values) for name, values in everything.items()})

    def write(self, chief: str, changed: Rows) -> bool | None:
        """Write rows; False: another chief publishes now; None: there are no arrays yet."""
        if self._arrays is None or self._chief != chief:
            return None if self._arrays is None else False
        for name, (rows, values) in changed.items():
            self._arrays[name][... if rows is None else rows] = values
        return True

    def end(self) -> None:
        """Remove the arrays' name on this node."""
        if self._arrays is not None:
            self._arrays.unlink()
            self._arrays.close()


def refusal(shared_name: str, node: str, cause: Exception) -> Exception:
    """Return a keeper's error, with the id of its node added to the message."""
    if not isinstance(cause, ShmaccError):
        return cause
    return type(cause)(f"Node {node} cannot have {shared_name!r}: {cause}")


def rows_of(arrays: SharedArrays, changed: Mapping[str, npt.ArrayLike | None]) -> Rows:
    """Return the contents of these rows, each once.

    Raises:
        InvalidArgumentError: No array of this name; or rows are not given by their numbers.
        IndexError: No such row.
    """
    if not isinstance(changed, Mapping):
        raise InvalidArgumentError(
            f"Argument changed must map arrays to numbers of rows, but was {changed!r}"
        )
    found: dict[str, tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]] = {}
    for name, rows in changed.items():
        if name not in arrays:
            raise InvalidArgumentError(f"There is no array {name!r} in {arrays.shared_name!r}")
        if rows is None:
            found[name] = None, arrays[name]
        elif len(numbers := np.unique(given := np.asarray(rows))):
            if given.dtype.kind not in "iu":
                raise InvalidArgumentError(
                    f"The rows of {name!r} must be integers, their numbers, but were of dtype "
                    f"{given.dtype}; of a mask, numpy.flatnonzero gives them"
                )
            found[name] = numbers, arrays[name][numbers]
    return found
