"""The data that chief and workers share: the plan, the text, the parameters, the workers' notes.

It is an anonymous memory file that the chief keeps open, and others open as the chief's descriptor,
``/proc/PID/fd/N``. It has no name of its own, so it cannot be left behind: it disappears with the
last process that has it, killed or not.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shmacc_demo.batches import Recipe
from shmacc_demo.exchange import PARTS
from shmacc_demo.model import Parameters
from shmacc_demo.plan import Plan

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from shmacc_demo.corpus import Corpus

NOTES = np.dtype([("step", "i8"), ("giving", "i8"), ("accepted", "i8", 3), ("refused", "i8", 3)])
"""One worker's notes, a cache line of its own: the step it works at (`NOT_YET`: it has not begun);
the part that it is giving just now, counted from 1 (0: none yet, `GIVEN`: it has given all); and
how many of each part were accepted and refused."""

NOT_YET = -1
GIVEN = len(PARTS) + 1

_HEAD = 4096
_LINE = 64


@dataclass(frozen=True)
class Charter:
    """What a worker must know before it can read the rest of the board."""

    chief: int
    """The chief's pid."""
    words: int
    length: int
    plan: Plan

    def to_json(self) -> bytes:
        """Write it down."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read it."""
        fields = json.loads(text)
        plan = fields.pop("plan")
        recipe = Recipe(**plan.pop("recipe"))
        return cls(plan=Plan(recipe=recipe, **plan), **fields)


class Board:
    """The board, mapped: arrays that all processes see."""

    def __init__(self, fd: int, charter: Charter, path: str) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.charter = charter
        self.path = path
        """By which any process of this user can open the board."""
        arrays = {
            name: np.frombuffer(self._map, dtype, int(np.prod(shape)), at).reshape(shape)
            for name, dtype, shape, at in _places(charter)
        }
        self.stream: NDArray[np.int32] = arrays["stream"]
        self.counts: NDArray[np.int64] = arrays["counts"]
        self.parameters = Parameters(arrays["inputs"], arrays["outputs"], arrays["bias"])
        self.notes: NDArray[Any] = arrays["notes"]

    @classmethod
    def create(cls, plan: Plan, corpus: Corpus) -> Self:
        """Put up a new board with the text on it; the parameters are all zero."""
        charter = Charter(os.getpid(), len(corpus.words), len(corpus.stream), plan)
        *_, (_, dtype, shape, at) = _places(charter)
        fd = os.memfd_create("shmacc-demo")
        try:
            # Reserved now, so that a lack of memory is an error here and not a SIGBUS later.
            os.posix_fallocate(fd, 0, at + np.dtype(dtype).itemsize * int(np.prod(shape)))
            os.pwrite(fd, charter.to_json(), 0)
            board = cls(fd, charter, f"/proc/{os.getpid()}/fd/{fd}")
        except BaseException:
            os.close(fd)
            raise
        board.stream[:] = corpus.stream
        board.counts[:] = corpus.counts
        return board

    @classmethod
    def open(cls, path: str) -> Self:
        """Open a board that some process has put up."""
        fd = os.open(path, os.O_RDWR)
        charter = Charter.from_json(os.pread(fd, _HEAD, 0).rstrip(b"\0"))
        return cls(fd, charter, path)

    def close(self) -> None:
        """Let go of the file; its memory goes with the last array that lies in it."""
        os.close(self._fd)

    def accepted(self) -> dict[str, int]:
        """Add up what the workers noted as accepted."""
        return dict(zip(PARTS, self.notes["accepted"].sum(axis=0).tolist(), strict=True))

    def refused(self) -> int:
        """Add up what they noted as refused."""
        return int(self.notes["refused"].sum())


def _places(charter: Charter) -> list[tuple[str, DTypeLike, tuple[int, ...], int]]:
    table = (charter.words, charter.plan.width)
    arrays: list[tuple[str, DTypeLike, tuple[int, ...]]] = [
        ("notes", NOTES, (charter.plan.workers,)),
        ("inputs", np.float32, table),
        ("outputs", np.float32, table),
        ("bias", np.float32, (charter.words,)),
        ("counts", np.int64, (charter.words,)),
        ("stream", np.int32, (charter.length,)),
    ]
    places, at = [], _HEAD
    for name, dtype, shape in arrays:
        places.append((name, dtype, shape, at))
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        at += -(-size // _LINE) * _LINE
    return places
