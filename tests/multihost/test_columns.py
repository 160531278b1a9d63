"""Pieces of a round that are sent as columns keep every value; malformed columns are refused."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.joined import taken_of

import shmacc
from shmacc import _core
from shmacc._multihost.columns import Columns, Piece, Rows, join
from shmacc._multihost.messages import Fence, Share
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import HostGroup, LocalSegment
from shmacc.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError

pytestmark = pytest.mark.threads


def buffers_of(sent: object) -> list[pickle.PickleBuffer]:
    found: list[pickle.PickleBuffer] = []
    pickle.dumps(sent, protocol=5, buffer_callback=found.append)
    return found


def test_a_piece_of_many_members_is_sent_as_four_buffers_and_keeps_every_value() -> None:
    specs: dict[str, shmacc.TensorSpec] = {
        f"rows {i}": shmacc.IndexedSlicesSpec((None, 4), "float32") for i in range(250)
    }
    specs |= {f"dense {i}": shmacc.TensorSpec((5,), "float64") for i in range(250)}
    specs["large"] = shmacc.TensorSpec((1 << 18,), "float64")
    with HostGroup(specs) as group, HostGroup(Plan(group.members, 1).at_shard(0)) as shard:
        gradient = {
            name: ([i, i + 9], np.full((2, 4), i))
            if isinstance(spec, shmacc.IndexedSlicesSpec)
            else np.full(5 if i < 500 else 1 << 18, i)
            for i, (name, spec) in enumerate(specs.items())
        }
        assert group.apply(gradient, 0, weight=3)
        [piece] = LocalSegment(group, Plan(group.members, 1)).hold().pieces.values()
        assert len(buffers_of(group.look())) >= 1001
        assert len(buffers_of(piece)) == 4
        again: Piece = pickle.loads(pickle.dumps(piece))
        share = Share(Fence(1, 0), (), 1, 3, 0)
        taken = taken_of(group, shard.reduce([again], share), share)
        assert list(taken) == list(specs)
        for name, part in group.snapshot().items():
            for field in type(part).__slots__:
                ours = np.asarray(getattr(taken[name], field)).reshape(-1)
                if field not in {"shape", "contributors"}:
                    theirs = np.asarray(getattr(part, field)).reshape(-1)
                    assert np.array_equal(ours, theirs), (name, field)


def test_a_division_that_does_not_cover_the_whole_member_is_refused() -> None:
    with HostGroup({"m": shmacc.TensorSpec((4,), "float64")}) as group:
        assert group.apply({"m": np.ones(4)}, 0)
        wrong: list[Any] = [[[2, 3]], [[5, 4]], [[-1, 4]], [[2, 4], [0, 0]], [[]], [2, 4]]
        for ends in wrong:
            with pytest.raises(InvalidArgumentError):
                divided(group, ends)
        assert group.num_accumulated() == 1


def divided(group: HostGroup, ends: object) -> _core.RoundResult:
    """Look at the round; return its sums, divided at `ends` (None: undivided)."""
    given = None if ends is None else np.array(ends, np.int64)
    taken = _core.RoundResult(advance=False, seal=False, ends=given)
    group.handle.look(taken, None)
    return taken


def test_a_divided_round_gives_columns_only_and_an_undivided_one_arrays_only() -> None:
    """A divided round has memory only for columns, so none of its members can become an array."""
    with HostGroup({"m": shmacc.TensorSpec((4000,), "float64")}) as group:
        assert group.apply({"m": np.ones(4000)}, 0)
        parts, whole = divided(group, [[4000]]), divided(group, None)
        for part in parts.values, parts.indices, parts.row_counts, parts.shape:
            with pytest.raises(FailedPreconditionError, match="was divided"):
                part(0)
        with pytest.raises(FailedPreconditionError, match="not divided"):
            whole.columns()
        assert whole.values(0).sum() == len(parts.columns()[0][3]) / 8 == 4000


def test_a_kept_round_is_given_only_to_a_take_with_the_same_division() -> None:
    def take(ends: object, required: int = 0) -> _core.RoundResult:
        taken = _core.RoundResult(advance=False, seal=False, ends=ends)
        group.handle.take(taken, required, required, 0.0, raise_departures=False)
        return taken

    ends = np.array([[1, 4]], np.int64)
    with HostGroup({"m": shmacc.TensorSpec((4,), "float64")}) as group:
        assert group.apply({"m": np.ones(4)}, 0)
        assert group.handle.keep(take(ends, 1))
        assert take(None).count == take(ends[:, 1:]).count == 0
        assert [len(values) for *_, values in take(ends).columns()] == [8, 24]


def test_columns_and_counts_of_different_lengths_are_refused() -> None:
    column = np.arange(3)
    for counts, lengths in ([], [column]), ([column], []):
        with pytest.raises(InvalidArgumentError, match="counts and lengths for each"):
            _core.merge_columns([column], counts, lengths)


def piece_of(
    rows: list[int], values: list[int], counts: list[int], count: int = 2, member: int = 0
) -> Piece:
    """Return a piece as a shard may get it, with one number in each row of the member."""
    numbers, column = np.array(rows, np.int64), np.array(counts, np.int64)
    parts = np.array([(member, count, count, len(rows))])
    return Piece(Columns(Rows(parts, numbers, column), join([np.array(values)])), count, count, 0)


def with_parts(parts: object) -> Piece:
    """Return a valid piece whose part headers are replaced by `parts`."""
    rows = replace(GOOD.columns.rows, parts=np.array(parts))
    return replace(GOOD, columns=replace(GOOD.columns, rows=rows))


def share_of(pieces: int) -> Share:
    """Return a shard's share of a round in which `pieces` hosts have two gradients each."""
    return Share(Fence(1, 0), (), 2 * pieces, 2 * pieces, 0)


MEMBERS = {
    "m": shmacc.IndexedSlicesSpec((9,), "int32", reduction_type="SUM"),
    "dense": shmacc.TensorSpec((3,), "int64"),
}
GOOD = piece_of([1, 5], [10, 20], [1, 2])
LINE = GOOD.columns.rows.parts[0].tolist()
NONE = np.empty(0, np.int64)


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
        (piece_of([1, 5], [1, 1], [1]), InvalidArgumentError, "as many counts as rows"),
        (piece_of([], [], []), InvalidArgumentError, "members' lengths"),
        (piece_of([1], [1], [1], 3), InvalidArgumentError, "more gradients than the round has"),
        (piece_of([1], [1], [1], 0), InvalidArgumentError, "counts from 1"),
        (piece_of([1], [1], [1], 2**62), InvalidArgumentError, "more gradients"),
        (piece_of([1], [2**31 - 10], [1]), OutOfRangeError, "does not fit"),
        (piece_of([1], [2**63 - 9], [1]), OutOfRangeError, "does not fit"),
        (with_parts([LINE, LINE]), InvalidArgumentError, "ascending numbers"),
        (with_parts(LINE), InvalidArgumentError, "one dimension, .*and its headers two"),
        (with_parts([[0, 2, 2]]), InvalidArgumentError, "of four numbers each"),
        (
            Piece(Columns(Rows(np.array([[1, 1, 1, 2]]), NONE, NONE), join([NONE])), 2, 2, 0),
            InvalidArgumentError,
            "members' lengths",
        ),
        (with_parts([[0, 2, 2, 2**62]]), InvalidArgumentError, "fewer values"),
        (with_parts([[0, 2, 2, 2**61]]), InvalidArgumentError, "fewer values"),
        (with_parts([[0, 2, 2, 1]]), InvalidArgumentError, "do not fit"),
        (with_parts([[0, 2, 2, 3]]), InvalidArgumentError, "fewer values"),
        (with_parts([[0, 2, 1, 2]]), InvalidArgumentError, "weights from these"),
        (with_parts(np.empty((0, 4), np.int64)), InvalidArgumentError, "do not fit"),
    ],
)
def test_a_piece_that_a_shard_cannot_reduce_is_an_error_that_says_why(
    piece: Piece, kind: type[Exception], said: str
) -> None:
    with HostGroup(MEMBERS) as group:
        for pieces in ([GOOD, piece], [piece, GOOD]):
            with pytest.raises(kind, match=said):
                group.reduce(pieces, share_of(2))
        share = share_of(3)
        reduced = group.reduce([GOOD, piece_of([5, 8], [1, -1], [1, 1]), GOOD], share)
        taken = taken_of(group, reduced, share)
        assert taken["m"].indices.tolist() == [1, 5, 8]
        assert taken["m"].values.tolist() == [20, 41, -1]
        assert taken["m"].row_counts.tolist() == [2, 5, 1]
        assert (taken.count, group.num_accumulated(), group.global_step) == (6, 0, 0)


def test_the_largest_row_number_is_accepted() -> None:
    """Without a declared number of rows, any row below 2**63 is valid."""
    last = 2**63 - 1
    with HostGroup({"m": shmacc.IndexedSlicesSpec((None,), "int32")}) as group:
        share = share_of(1)
        reduced = group.reduce([piece_of([1, last], [4, 6], [1, 2])], share)
        taken = taken_of(group, reduced, share)
        assert taken["m"].indices.tolist() == [1, last]
        with pytest.raises(InvalidArgumentError, match=r"from 0 to below 2\*\*63"):
            group.reduce([piece_of([-1], [4], [1])], share_of(1))


def test_a_misaligned_column_is_refused() -> None:
    def moved(array: np.ndarray) -> np.ndarray:
        """Return a copy one byte off its alignment."""
        memory = np.empty(array.nbytes + 1, np.uint8)[1:]
        copy = memory.view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    columns, rows = GOOD.columns, GOOD.columns.rows
    wrong = [replace(columns, values=moved(columns.values))]
    for field in ("parts", "numbers", "counts"):
        moved_rows = replace(rows, **{field: moved(getattr(rows, field))})
        wrong.append(replace(columns, rows=moved_rows))
    with HostGroup(MEMBERS) as group:
        for each in wrong:
            with pytest.raises(InvalidArgumentError, match="multiples of 8"):
                group.reduce([replace(GOOD, columns=each)], share_of(1))
