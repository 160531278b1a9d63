"""Names, files and rival segments, for the tests of opening and of names."""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from helpers.support import SHM_DIRECTORY

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection

KINDS: Final = (ConditionalAccumulator, SparseConditionalAccumulator)
NAME: Final = "opened"


def make(**keywords: Any) -> ConditionalAccumulator:
    """Construct an accumulator under the name of these tests."""
    return ConditionalAccumulator("f4", None, NAME, **keywords)


def apply(acc: Any) -> bool:
    if type(acc) is ConditionalAccumulator:
        return acc.apply_grad(np.ones((3, 2)))
    accepted: bool = acc.apply_grad([0], np.ones((1, 2)))
    return accepted


def in_shared_memory(namespace: str) -> list[Path]:
    """List the files in /dev/shm of this namespace."""
    return [p for p in Path(SHM_DIRECTORY).iterdir() if namespace in p.name]


def exists() -> bool:
    return os.path.lexists(path())


def path() -> Path:
    return Path(inspection.resolve(NAME).path)
