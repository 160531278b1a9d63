"""Pieces in few buffers: what comes out is what went in."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import shmacc
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.packed import Packed, PackedArrays, PackedPiece
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import LocalSegment

pytestmark = pytest.mark.threads


def buffers_of(sent: object) -> list[pickle.PickleBuffer]:
    found: list[pickle.PickleBuffer] = []
    pickle.dumps(sent, protocol=5, buffer_callback=found.append)
    return found


@pytest.mark.parametrize("copy", [False, True])
def test_arrays_are_the_same_after_they_were_packed(*, copy: bool) -> None:
    arrays: list[Any] = [
        np.arange(7, dtype=np.int64),
        np.empty((0, 3), np.float32),
        np.arange(9, dtype=np.float16).reshape(3, 3),
        np.ones(1 << 20, np.float32),
        np.array(3.0),
    ]
    packed = Packed.of(arrays, copy=copy)
    again: Packed = pickle.loads(pickle.dumps(packed))
    for ours, theirs in zip(again.arrays(), arrays, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert np.array_equal(ours, theirs)
    shared = [np.shares_memory(*pair) for pair in zip(packed.arrays(), arrays, strict=True)]
    assert shared == [False, False, False, not copy, False], "a large one is not copied for it"


def test_names_are_those_of_the_arrays() -> None:
    arrays = {"a": np.arange(3), "b": np.empty(0)}
    assert {name: part.tolist() for name, part in PackedArrays.of(arrays).unpack().items()} == {
        "a": [0, 1, 2],
        "b": [],
    }
    assert PackedArrays.of({}).unpack() == {}


def test_a_piece_of_many_members_is_one_buffer_and_of_large_ones_their_own() -> None:
    specs: dict[str, shmacc.TensorSpec] = {
        f"rows {i}": shmacc.IndexedSlicesSpec((None, 4), "float32") for i in range(250)
    }
    specs |= {f"dense {i}": shmacc.TensorSpec((5,), "float64") for i in range(250)}
    specs["large"] = shmacc.TensorSpec((1 << 18,), "float64")
    with HostGroup(specs) as group:
        plan = Plan(group.members, 1)
        gradient = {
            name: ([i, i + 9], np.full((2, 4), i))
            if isinstance(spec, shmacc.IndexedSlicesSpec)
            else np.full(plan.dims(name), i)
            for i, (name, spec) in enumerate(specs.items())
        }
        assert group.apply(gradient, 0, weight=3)
        [(_, piece)] = plan.split(LocalSegment(group, 1).seal())
    sent = PackedPiece.of(piece)
    assert len(buffers_of(piece)) >= 1001
    assert len(buffers_of(sent)) == 2
    again = sent.unpack()
    assert (again.count, again.step, again.weight) == (piece.count, piece.step, piece.weight)
    assert list(again) == list(piece)
    for name, sums in piece.items():
        for field in type(sums).__slots__:
            assert np.array_equal(getattr(again[name], field), getattr(sums, field)), (name, field)
