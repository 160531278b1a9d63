"""Measures small gradients: of many tensors, and as torch tensors, JAX arrays and lists."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
)
from shmacc_bench.tables import Table, figure
from shmacc_bench.timing import microseconds

Pair = tuple[str, str, Callable[[], object], Callable[[], object]]
"""What is measured, what it is compared with, and a call of each."""

_WIDTHS: Final = (32, 64, 64, 32, 4)  # of the layers of two networks, as in A3C
SHAPES: Final = {
    f"{network}.{layer}.{what}": shape
    for network in ("actor", "critic")
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(_WIDTHS))
    for what, shape in (("weights", (inputs, outputs)), ("bias", (outputs,)))
}
_APPLIES: Final = 100  # applies in a turn, before a take
_WIDTH: Final = 64
_ROWS, _FEW = 10, 2  # rows of a gradient given as arrays, and as lists
_CALLS: Final = 50  # calls in a turn
_GOAL: Final = 2.0


def measure(quick: bool) -> Iterator[Table]:
    """Yield tables of microseconds per call, for shmacc and for the alternatives to it."""
    yield _many_tensors(15 if quick else 200)
    table = Table("Arrays of other packages (us)", ("apply of", "time", "beside", "time", "ratio"))
    specs = {
        "rows": IndexedSlicesSpec((100, _WIDTH), "float32"),
        "weights": TensorSpec((8, 8)),
        "bias": TensorSpec((8,)),
    }
    with (
        SparseConditionalAccumulator("float32", (100, _WIDTH)) as acc,
        AccumulatorGroup(specs) as group,
    ):
        for what, against, mine, theirs in _pairs(acc, group):
            turns = [
                (microseconds(mine, _CALLS), microseconds(theirs, _CALLS))
                for _ in range(15 if quick else 100)
            ]
            table.compare(what, turns, _GOAL, against)
    yield table


def _many_tensors(turns: int) -> Table:
    """Measure a model of many small tensors: as one group, and as an accumulator for each."""
    rng = np.random.default_rng(0)
    gradient = {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}
    specs = {key: TensorSpec(shape) for key, shape in SHAPES.items()}
    prefix = f"bench.{os.getpid()}.tensors"
    with ExitStack() as stack:
        group = AccumulatorGroup(specs, f"{prefix}.group", unlink_on_close=True)
        singles = [
            ConditionalAccumulator("float32", shape, f"{prefix}.single.{key}", unlink_on_close=True)
            for key, shape in SHAPES.items()
        ]
        for acc in (group, *singles):
            stack.callback(acc.close)

        def as_group() -> None:
            for _ in range(_APPLIES):
                group.apply(gradient, NEVER_STALE)
            group.take(_APPLIES)

        def as_singles() -> None:
            for _ in range(_APPLIES):
                for acc, array in zip(singles, gradient.values(), strict=True):
                    acc.apply_grad(array, NEVER_STALE)
            for acc in singles:
                acc.take(_APPLIES)

        pairs = [
            (microseconds(as_group) / _APPLIES, microseconds(as_singles) / _APPLIES)
            for _ in range(turns)
        ]
        mine, theirs = _kib(f"{prefix}.group"), _kib(f"{prefix}.single.*")
    size = sum(array.nbytes for array in gradient.values()) / 1024
    head = ("", "a group", "an accumulator each", "ratio")
    table = Table(f"{len(SHAPES)} dense tensors, {size:.0f} KiB", head)
    table.compare("an apply of all (us)", pairs, None)
    table.rows.append(("shared memory (KiB)", table.judged("KiB", mine, 400), figure(theirs), ""))
    return table


def _kib(names: str) -> float:
    """Return the KiB that segments occupy; holes in their files do not count."""
    shm = Path("/dev/shm")  # noqa: S108  where POSIX shared memory is on Linux
    return sum(file.stat().st_blocks for file in shm.glob(f"shmacc.*{names}")) / 2


def _pairs(acc: SparseConditionalAccumulator, group: AccumulatorGroup) -> Iterator[Pair]:
    def apply(indices: Any, values: Any) -> None:
        acc.apply_grad(indices, values, None, NEVER_STALE)

    indices, values = _gradient(_ROWS)
    few, its = (array.tolist() for array in _gradient(_FEW))
    yield (
        f"lists, {_FEW} x {_WIDTH}", "np.array of them",
        lambda: apply(few, its), lambda: (np.array(few), np.array(its)),
    )  # fmt: skip
    if find_spec("torch"):
        import torch

        tensors = torch.from_numpy(indices), torch.from_numpy(values)
        arrays = {
            "rows": (indices, values),
            "weights": np.ones((8, 8), np.float32),
            "bias": np.ones(8, np.float32),
        }
        as_tensors = {"rows": tensors, "weights": torch.ones(8, 8), "bias": torch.ones(8)}
        yield (
            f"torch tensors, {_ROWS} x {_WIDTH}", "NumPy's arrays",
            lambda: apply(*tensors), lambda: apply(indices, values),
        )  # fmt: skip
        yield (
            "torch tensors, a group of 3", "NumPy's arrays",
            lambda: group.apply(as_tensors, NEVER_STALE), lambda: group.apply(arrays, NEVER_STALE),
        )  # fmt: skip
    if find_spec("jax"):
        import jax.numpy as jnp

        rows, its_values = jnp.asarray(indices), jnp.asarray(values)
        yield (
            f"JAX's arrays, {_ROWS} x {_WIDTH}", "np.asarray and NumPy's",
            lambda: apply(rows, its_values),
            lambda: apply(np.asarray(rows), np.asarray(its_values)),
        )  # fmt: skip


def _gradient(rows: int) -> tuple[Any, Any]:
    values = np.random.default_rng(0).normal(size=(rows, _WIDTH)).astype(np.float32)
    return np.arange(rows) * 10, values
