"""Names, files and calls that tests of opening and tests of names share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from helpers.support import SHM_DIRECTORY, path_of

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator

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


# Calls that need an accumulator's segment. Applies are left out: they depend on the gradient.
USES: Final[tuple[Callable[[Any], object], ...]] = (
    lambda acc: acc.take(1, timeout=0), lambda acc: acc.take_grad(1, timeout=0),
    lambda acc: acc.take_partial(0, timeout=0), lambda acc: acc.set_global_step(7),
    lambda acc: acc.advance_step(7), lambda acc: acc.wait_step(-1, timeout=0),
    lambda acc: acc.global_step, lambda acc: acc.num_accumulated(), lambda acc: acc.unseal(),
    lambda acc: acc.cancel(), lambda acc: acc.state(), lambda acc: acc.snapshot(),
    lambda acc: acc.contributors(),
)  # fmt: skip


def in_shared_memory(namespace: str) -> list[Path]:
    """List the files in /dev/shm of this namespace."""
    return [p for p in Path(SHM_DIRECTORY).iterdir() if namespace in p.name]


def exists() -> bool:
    return os.path.lexists(path())


def path() -> Path:
    return path_of(NAME)
