"""A model of many small tensors: as one group, and as an accumulator for each tensor."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmacc import NEVER_STALE, AccumulatorGroup, ConditionalAccumulator, TensorSpec
from shmacc_bench.tables import Table, figure, paired, spread
from shmacc_bench.timing import microseconds

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDTHS: Final = (32, 64, 64, 32, 4)  # of the layers of two networks, as in A3C
SHAPES: Final = {
    f"{network}.{layer}.{what}": shape
    for network in ("actor", "critic")
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(_WIDTHS))
    for what, shape in (("weights", (inputs, outputs)), ("bias", (outputs,)))
}
_APPLIES: Final = 100  # applies in a turn, before a take


def measure(quick: bool) -> Iterator[Table]:
    """Yield the microseconds of an apply of all tensors, and the memory held."""
    rng = np.random.default_rng(0)
    gradient = {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
    prefix = f"bench.{os.getpid()}.tensors"
    with AccumulatorGroup(
        {k: TensorSpec(s) for k, s in SHAPES.items()}, f"{prefix}.group"
    ) as group:
        singles = [
            (ConditionalAccumulator("float32", shape, f"{prefix}.single.{key}"), gradient[key])
            for key, shape in SHAPES.items()
        ]

        def as_group() -> None:
            for _ in range(_APPLIES):
                group.apply(gradient, NEVER_STALE)
            group.take(_APPLIES)

        def as_singles() -> None:
            for _ in range(_APPLIES):
                for acc, array in singles:
                    acc.apply_grad(array, NEVER_STALE)
            for acc, _ in singles:
                acc.take(_APPLIES)

        turns = [
            (microseconds(as_group) / _APPLIES, microseconds(as_singles) / _APPLIES)
            for _ in range(15 if quick else 200)
        ]
        kib = _kib(group), sum(_kib(acc) for acc, _ in singles)
        for acc in (group, *(acc for acc, _ in singles)):
            acc.unlink()
            acc.close()
    ratio = paired(turns)
    size = sum(int(np.prod(shape)) for shape in SHAPES.values()) * 4 / 1024
    table = Table(
        f"{len(SHAPES)} dense tensors, {size:.0f} KiB",
        ("", "an apply of all (us)", "shared memory (KiB)", "time over the other's"),
    )
    table.rows += [
        (
            "a group",
            spread([mine for mine, _ in turns]),
            table.judged("KiB", kib[0], 400),
            figure(ratio),
        ),
        ("an accumulator each", spread([theirs for _, theirs in turns]), figure(kib[1]), ""),
    ]
    yield table


def _kib(acc: Any) -> float:
    """Return the memory that a segment holds: its file without holes."""
    shm = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is on Linux
    return sum(file.stat().st_blocks for file in shm.glob(f"shmacc.*{acc.shared_name}")) / 2
