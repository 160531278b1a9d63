"""What has many arrays goes through Ray as one piece of memory.

Each array that is sent is a buffer of its own to Ray, with a cost of its own: the three arrays of
each of 500 members took about three times as long as the same bytes in a few. Packing copies them
once, at the speed of memory; a few arrays are sent as they are.
"""

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_FEW = 16
_ALIGNED = 64  # bytes: where arrays begin, as NumPy's own do


@dataclass(frozen=True)
class Packed:
    """Something with many arrays.

    Attributes:
        pickled: It, without the arrays' contents.
        memory: These.
        places: Where each one begins and ends there.
    """

    pickled: bytes
    memory: npt.NDArray[np.uint8]
    places: list[tuple[int, int]]


def pack(what: Any) -> Any:
    """Return it as it is, or packed if it has many arrays."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(what, protocol=5, buffer_callback=buffers.append)
    if len(buffers) <= _FEW:
        return what
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    places, end = [], 0
    for array in arrays:
        begin = -(-end // _ALIGNED) * _ALIGNED
        end = begin + len(array)
        places.append((begin, end))
    memory = np.empty(end, np.uint8)
    for array, (begin, end) in zip(arrays, places, strict=True):
        memory[begin:end] = array
    return Packed(pickled, memory, places)


def unpack(what: Any) -> Any:
    """Return what was given to `pack`; its arrays are views of the packed memory."""
    if not isinstance(what, Packed):
        return what
    buffers = [what.memory[begin:end] for begin, end in what.places]
    return pickle.loads(what.pickled, buffers=buffers)  # noqa: S301  Ray's own messages are pickles
