"""Rounds grow, shrink and change their width; each row comes out once and whole."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import SHM_DIRECTORY, same_bits

import shmacc
from shmacc import (
    ConditionalAccumulator,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
)

ROUNDS: Final = [
    *((1, 10, (64,)), (3, 40_000, ()), (2, 5, (3, 2)), (2, 300, (1000,)), (4, 20_000, (8,))),
    *((1, 0, (5,)), (2, 1000, (0,)), (3, 60_000, (1,)), (2, 7, ())),
]
# Row numbers are close together, spread out, or up to the largest index.
SPREADS: Final = [2**12, 2**20, 2**63 - 1]


def gradient(
    rng: np.random.Generator, name: str, rows: int, inner: tuple[int, ...], spread: int
) -> tuple[Any, Any]:
    """Make a gradient of whole numbers; if the spread is small, rows repeat."""
    element = ELEMENTS[name]
    indices = rng.integers(0, spread, size=rows, endpoint=True)
    low = 0 if element.sums.kind == "u" else -2
    values = rng.integers(low, 3, size=(rows, *inner)).astype(element.plain)
    return indices, values.view(element.dtype) if element.quantised else values


@pytest.mark.parametrize("name", ["float64", "bfloat16", "quint8"])
def test_each_row_is_taken_once_whatever_the_previous_round_held(name: str) -> None:
    element = ELEMENTS[name]
    rng = np.random.default_rng(3)
    with SparseConditionalAccumulator(name, reduction_type="SUM") as acc:
        other = shmacc.attach(acc.shared_name)
        for step, (gradients, rows, inner) in enumerate(ROUNDS):
            made = [
                gradient(rng, name, rows, inner, SPREADS[(step + i) % len(SPREADS)])
                for i in range(gradients)
            ]
            for i, grad in enumerate(made):
                handle: Any = other if i % 2 else acc
                assert handle.apply_grad(*grad, local_step=step)
            indices = np.concatenate([g[0] for g in made])
            values = np.concatenate([g[1].view(element.plain) for g in made])
            unique, where = np.unique(indices, return_inverse=True)
            expected = np.zeros((len(unique), *inner), element.sums)
            np.add.at(expected, where, values.astype(element.sums))
            touched = np.zeros(len(unique), np.int64)
            for grad in made:
                touched[np.searchsorted(unique, np.unique(grad[0]))] += 1

            assert acc.stats().rows == len(unique)
            taken = acc.take(gradients, timeout=0)
            same_bits(taken.indices, unique)
            same_bits(taken.values, expected.astype(element.plain).view(element.dtype))
            same_bits(taken.row_counts, touched)
            same_bits(taken.shape, np.array([-1, *inner]))
        other.close()


def test_memory_is_bounded_by_the_rows_that_were_held(namespace: str) -> None:
    """The bound is 1.5 times the rows (each 16 bytes larger), plus one gradient and 1 MiB."""
    width, each = 16, 20_000
    with SparseConditionalAccumulator("f8", None, "rows", unlink_on_close=True) as acc:
        (segment,) = Path(SHM_DIRECTORY).glob(f"shmacc.*{namespace}*rows*")
        most = 0
        for step in range(3):
            for i in range(4):
                rows = np.arange(i * each // 2, i * each // 2 + each)
                assert acc.apply_grad(rows, np.ones((each, width)), local_step=step)
                most = max(most, acc.stats().rows)
                assert most >= each + i * each // 2
                allowed = 1.5 * most * (width * 8 + 16) + each * width * 8 + 2**20
                assert segment.stat().st_blocks * 512 <= allowed
            assert acc.take_grad(4).values.shape == (most, width)


def _occupied(namespace: str) -> int:
    (segment,) = Path(SHM_DIRECTORY).glob(f"shmacc.*{namespace}*rounds*")
    return segment.stat().st_blocks * 512


SMALL_ROUNDS: Final = 8  # after this many small rounds in a row, memory is given back


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_memory_stays_reserved_while_large_rounds_come_often(kind: str, namespace: str) -> None:
    """Reserving memory again for every large round would cost more than the rounds."""
    width, many = 16, 20_000
    of_kind: Any = SparseConditionalAccumulator if kind == "sparse" else ConditionalAccumulator
    acc = of_kind(np.float64, shared_name="rounds", unlink_on_close=True)

    def round_of(rows: int) -> None:
        for _ in range(2):
            values = np.ones((rows, width))
            gradient = (np.arange(rows), values) if kind == "sparse" else (values,)
            assert acc.apply_grad(*gradient, local_step=acc.global_step)
        acc.take_grad(2, timeout=0)

    with acc:
        round_of(10)
        little = _occupied(namespace)
        round_of(many)
        much = _occupied(namespace)
        assert much > many * width * 8
        for _ in range(3):
            for _ in range(SMALL_ROUNDS - 1):
                round_of(10)
                assert _occupied(namespace) == much
            round_of(many)
            assert _occupied(namespace) == much
        for _ in range(SMALL_ROUNDS + 1):  # the last round's first gradient frees memory
            round_of(10)
        # All regions together may keep half a MiB.
        assert _occupied(namespace) <= little + 2**19


ROWS: Final = 50_000
GRADIENT: Final = np.arange(ROWS), np.ones((ROWS, 16), np.float32)
SPECS: Final = {"rows": IndexedSlicesSpec((None, 16), "f4"), "array": TensorSpec((ROWS, 16), "f4")}


@pytest.mark.parametrize("kind", ["group", "parameters"])
def test_repeated_restores_need_no_more_memory(kind: str, tmp_path: Path, namespace: str) -> None:
    """The segment may grow by 256 KiB; an undo log of all rows would have 3 MiB."""
    one: Any
    if kind == "group":
        one = shmacc.AccumulatorGroup(SPECS, "rounds")
        for _ in range(2):  # from the second apply on, a dense member has two buffers
            one.apply({"rows": GRADIENT, "array": GRADIENT[1]}, 0)
    else:
        one = shmacc.Parameters({"t": GRADIENT[1]}, "rounds", optimizer=shmacc.optim.Adam(0.1))
    path = tmp_path / "it.npz"
    with one:
        before = _occupied(namespace)
        shmacc.save(path, {"it": one})
        for restore in (lambda: one.restore(one.state()), lambda: shmacc.load(path, {"it": one})):
            for _ in range(2):
                restore()
                assert _occupied(namespace) <= before + (1 << 18)
        one.unlink()
