"""Pieces in a few columns: what comes out is what went in, and what is wrong is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shmacc
from shmacc._multihost.columns import Piece, Rows, Values
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import Fence
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import LocalSegment
from shmacc._multihost.share import Share
from shmacc.errors import InvalidArgumentError, OutOfRangeError

pytestmark = pytest.mark.threads


def buffers_of(sent: object) -> list[pickle.PickleBuffer]:
    found: list[pickle.PickleBuffer] = []
    pickle.dumps(sent, protocol=5, buffer_callback=found.append)
    return found


def test_values_are_the_same_after_they_were_sent() -> None:
    arrays: list[Any] = [
        np.arange(7, dtype=np.int64),
        np.empty((0, 3), np.float32),
        np.arange(9, dtype=np.float16).reshape(3, 3),
        np.ones(1 << 20, np.float32),
        np.array(3.0),
    ]
    sent = Values.of(arrays)
    again: Values = pickle.loads(pickle.dumps(sent))
    parts = again.split([array.nbytes for array in arrays])
    for ours, theirs in zip(parts, arrays, strict=True):
        assert np.array_equal(ours.view(theirs.dtype).reshape(theirs.shape), theirs)
    large = sent.split([array.nbytes for array in arrays])
    shared = [np.shares_memory(*pair) for pair in zip(large, arrays, strict=True)]
    assert shared == [False, False, False, True, False], "a large one is not copied for it"
    assert Values.of([]).split([]) == []
    for sizes in ([56], [56, 0, 18, 1 << 22, 16], [48, 0, 18, 1 << 22, 8]):
        with pytest.raises(InvalidArgumentError, match="more or fewer values"):
            sent.split(sizes)


def test_a_piece_of_many_members_is_few_buffers_and_of_large_ones_their_own() -> None:
    specs: dict[str, shmacc.TensorSpec] = {
        f"rows {i}": shmacc.IndexedSlicesSpec((None, 4), "float32") for i in range(250)
    }
    specs |= {f"dense {i}": shmacc.TensorSpec((5,), "float64") for i in range(250)}
    specs["large"] = shmacc.TensorSpec((1 << 18,), "float64")
    with HostGroup(specs) as group, HostGroup(Plan(group.members, 1).at_shard(0)) as shard:
        plan = Plan(group.members, 1)
        gradient = {
            name: ([i, i + 9], np.full((2, 4), i))
            if isinstance(spec, shmacc.IndexedSlicesSpec)
            else np.full(5 if i < 500 else 1 << 18, i)
            for i, (name, spec) in enumerate(specs.items())
        }
        assert group.apply(gradient, 0, weight=3)
        sealed = LocalSegment(group, 1).seal()
        [(_, piece)] = plan.split(sealed)
        assert len(buffers_of(sealed)) >= 1001
        assert len(buffers_of(piece)) == 5
        own = piece.copy()
        assert np.array_equal(own.values.large[500], piece.values.large[500])
        assert not np.shares_memory(own.values.large[500], piece.values.large[500])
        again: Piece = pickle.loads(pickle.dumps(piece))
        taken = shard.reduce([again], Share(Fence(1, 0), (), 1, 3, 0))
        assert list(taken) == list(sealed)
        for name, part in group.snapshot().items():
            for field in type(part).__slots__:
                ours = np.asarray(getattr(taken[name], field)).reshape(-1)
                if field not in {"shape", "contributors"}:
                    theirs = np.asarray(getattr(part, field)).reshape(-1)
                    assert np.array_equal(ours, theirs), (name, field)


def piece_of(
    rows: list[int], values: list[int], counts: list[int], count: int = 2, member: int = 0
) -> Piece:
    """A piece as a shard may get it, of a member "m" with rows of one number."""
    numbers, column = np.array(rows, np.int64), np.array(counts, np.int64)
    table = [(member, count, count, len(rows))]
    return Piece(
        Rows.of(table, [numbers], [column]), Values.of([np.array(values)]), count, count, 0
    )


def share_of(pieces: int) -> Share:
    """What a shard has of a round of so many hosts, of two gradients each."""
    return Share(Fence(1, 0), (), 2 * pieces, 2 * pieces, 0)


MEMBERS = {
    "m": shmacc.IndexedSlicesSpec((9,), "int32", reduction_type="SUM"),
    "dense": shmacc.TensorSpec((3,), "int64"),
}
GOOD = piece_of([1, 5], [10, 20], [1, 2])
LINE = GOOD.rows.table


@pytest.mark.parametrize(
    ("piece", "kind", "said"),
    [
        (piece_of([1], [1], [1], member=7), InvalidArgumentError, "numbers of the group's members"),
        (piece_of([1], [1], [1], member=-1), InvalidArgumentError, "numbers of the group's memb"),
        (piece_of([5, 1], [1, 1], [1, 1]), InvalidArgumentError, "'m'.*must ascend"),
        (piece_of([1, 1], [1, 1], [1, 1]), InvalidArgumentError, "'m'.*must ascend"),
        (piece_of([1, 9], [1, 1], [1, 1]), InvalidArgumentError, "below 9"),
        (piece_of([-1, 5], [1, 1], [1, 1]), InvalidArgumentError, "from 0"),
        (piece_of([1, 5], [1, 1], [1, 0]), InvalidArgumentError, "'m'.*counts be from 1 to 2"),
        (piece_of([1, 5], [1, 1], [1, 3]), InvalidArgumentError, "'m'.*counts be from 1 to 2"),
        (piece_of([1, 5], [1], [1, 1]), InvalidArgumentError, "fewer values"),
        (piece_of([1, 5], [1, 1, 1], [1, 1]), InvalidArgumentError, "more or fewer values"),
        (piece_of([1, 5], [1, 1], [1]), InvalidArgumentError, "do not fit"),
        (piece_of([], [], []), InvalidArgumentError, "members' lengths"),
        (piece_of([1], [1], [1], 3), InvalidArgumentError, "more gradients than the round has"),
        (piece_of([1], [1], [1], 0), InvalidArgumentError, "counts from 1"),
        (piece_of([1], [1], [1], 2**62), InvalidArgumentError, "more gradients"),
        (piece_of([1], [2**31 - 10], [1]), OutOfRangeError, "does not fit"),
        (piece_of([1], [2**63 - 9], [1]), OutOfRangeError, "does not fit"),
        (
            replace(GOOD, rows=replace(GOOD.rows, table=np.vstack([LINE, LINE]))),
            InvalidArgumentError,
            "ascending numbers",
        ),
        (
            replace(GOOD, rows=replace(GOOD.rows, table=LINE.reshape(-1))),
            InvalidArgumentError,
            "one dimension, and its table two",
        ),
        (
            Piece(Rows.of([(1, 1, 1, 2)], [], []), Values.of([np.array([1, 2])]), 2, 2, 0),
            InvalidArgumentError,
            "members' lengths",
        ),
        (
            replace(GOOD, rows=replace(GOOD.rows, table=np.array([[0, 2, 2, 2**62]]))),
            InvalidArgumentError,
            "do not fit",
        ),
        (
            replace(GOOD, rows=replace(GOOD.rows, table=np.array([[0, 2, 2, 1]]))),
            InvalidArgumentError,
            "do not fit",
        ),
    ],
)
def test_a_piece_that_a_shard_cannot_reduce_is_an_error_that_says_why(
    piece: Piece, kind: type[Exception], said: str
) -> None:
    with HostGroup(MEMBERS) as group:
        for pieces in ([GOOD, piece], [piece, GOOD]):
            with pytest.raises(kind, match=said):
                group.reduce(pieces, share_of(2))
        taken = group.reduce([GOOD, piece_of([5, 8], [1, -1], [1, 1]), GOOD], share_of(3))
        assert taken["m"].indices.tolist() == [1, 5, 8]
        assert taken["m"].values.tolist() == [20, 41, -1]
        assert taken["m"].row_counts.tolist() == [2, 5, 1]
        assert (taken.count, group.num_accumulated(), group.global_step) == (6, 0, 0)
