"""What a restore saves in case it dies goes with it: a segment needs no more memory than before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    Parameters,
    SparseConditionalAccumulator,
    TensorSpec,
    optim,
)
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS: Final = 50_000
SPARE: Final = 1 << 18  # bytes; what is saved of each has 3 MiB at least
GRADIENT: Final = np.arange(ROWS), np.ones((ROWS, 16), np.float32)
TABLE: Final = np.ones((ROWS, 16), np.float32)

KINDS: Final[dict[str, Callable[[], Any]]] = {
    "sparse": lambda: SparseConditionalAccumulator("f4", (None, 16), "it"),
    "dense": lambda: ConditionalAccumulator("f4", (ROWS, 16), "it"),
    "group": lambda: AccumulatorGroup(
        {"rows": IndexedSlicesSpec((None, 16), "f4"), "array": TensorSpec((ROWS, 16), "f4")},
        "it",
    ),
    "parameters": lambda: Parameters({"t": TABLE}, "it", optimizer=optim.Adam(0.1)),
}


def _fill(one: Any) -> None:
    for _ in range(2):  # a dense member has two buffers from then on
        if isinstance(one, AccumulatorGroup):
            one.apply({"rows": GRADIENT, "array": TABLE}, 0)
        elif isinstance(one, SparseConditionalAccumulator):
            one.apply_grad(*GRADIENT)
        elif isinstance(one, ConditionalAccumulator):
            one.apply_grad(TABLE)


def _restore(one: Any, _: Path) -> None:
    one.restore(one.state())


def _load(one: Any, path: Path) -> None:
    shmacc.save(path, {"it": one})
    shmacc.load(path, {"it": one})


@pytest.mark.parametrize("restore", [_restore, _load])
@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_is_kept(kind: str, restore: Callable[[Any, Path], None], tmp_path: Path) -> None:
    file = Path(names.segment_name("it").path)
    with KINDS[kind]() as one:
        _fill(one)
        before = file.stat().st_blocks * 512
        for _ in range(2):
            restore(one, tmp_path / "it.npz")
            assert file.stat().st_blocks * 512 <= before + SPARE
        one.unlink()
