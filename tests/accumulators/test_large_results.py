"""Results larger than the caches bypass them, and equal the results of small calls."""

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
from shmacc.errors import InvalidArgumentError, OutOfRangeError

LARGE = 33 << 20  # bytes; results of 32 MiB and more are written past the caches

# Rows of one cache line, of more than one piece, of several lines, and of a fraction of lines.
WIDTHS = [("float32", 16), ("float64", 1000), ("complex64", 64), ("float32", 100), ("uint8", 40)]


def table(name: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows in random order, with values that are exact in every dtype."""
    sums = 8 if name in ("int64", "uint8", "complex64", "float64") else 4
    count = LARGE // (width * sums) + 3
    indices = np.random.default_rng(0).permutation(2 * count)[:count]
    values = np.arange(count * width).reshape(count, width) % 61
    return indices, values.astype(shmacc.IndexedSlicesSpec((None, width), name).dtype)


@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_a_take_of_many_rows_equals_numpy(name: str, width: int) -> None:
    indices, values = table(name, width)
    shape = (2 * len(indices), width)
    with shmacc.SparseConditionalAccumulator(name, shape, reduction_type="MEAN") as accumulator:
        assert accumulator.apply_grad(indices, values, local_step=0)
        assert accumulator.apply_grad(indices[::3], values[::3], local_step=0)
        taken = accumulator.take_grad(2)
    order = np.argsort(indices)
    assert np.array_equal(taken.indices, indices[order])
    assert np.array_equal(taken.values, values[order])


@pytest.mark.parametrize(("name", "more"), [("float32", 0), ("float16", 1), ("int64", 1023)])
def test_a_take_of_a_large_array_equals_numpy(name: str, more: int) -> None:
    size = LARGE // (8 if name == "int64" else 4) // 1024 * 1024 + more
    value = (np.arange(size) % 100).astype(name)
    with shmacc.ConditionalAccumulator(name, (size,)) as accumulator:
        for _ in range(3):
            assert accumulator.apply_grad(value, local_step=0)
        assert np.array_equal(accumulator.take_grad(3), value)


def shipped(*gradients: Any) -> list[Piece]:
    """Return the pieces that hosts send to one shard; each host has one of the gradients."""
    pieces = []
    for given in gradients:
        numbers, values = given if isinstance(given, tuple) else (np.empty(0, np.int64), given)
        length = len(numbers) if isinstance(given, tuple) else values.size
        rows = Rows(np.array([[0, 1, 1, length]]), numbers, np.ones(len(numbers), np.int64))
        pieces.append(Piece(Columns(rows, join([values])), 1, 1, 0))
    return pieces


def share_of(count: int) -> Share:
    return Share(Fence(1, 0), (), count, count, 0)


def test_rows_of_several_hosts_are_added_up() -> None:
    count = LARGE // 256
    rows = [np.arange(start, count, step) for start, step in ((0, 1), (1, 2), (0, 3))]
    values = [(np.arange(len(own) * 64).reshape(-1, 64) % 61).astype(np.float32) for own in rows]
    expected, counts = np.zeros((count, 64), np.float32), np.zeros(count, np.int64)
    for own, part in zip(rows, values, strict=True):
        expected[own] += part
        counts[own] += 1
    members = {"m": shmacc.IndexedSlicesSpec((None, 64), "float32", reduction_type="SUM")}
    with HostGroup(members) as group:
        pieces = shipped(*zip(rows, values, strict=True))
        taken = taken_of(group, group.reduce(pieces, share_of(3)), share_of(3))["m"]
    assert np.array_equal(taken.indices, np.arange(count))
    assert np.array_equal(taken.row_counts, counts)
    assert np.array_equal(taken.values, expected)


def test_arrays_of_several_hosts_are_added_up() -> None:
    size = LARGE // 8 + 5
    arrays = [np.arange(size) % (7 * host + 11) for host in range(3)]
    with HostGroup({"m": shmacc.TensorSpec((size,), "int64")}) as group:
        taken = taken_of(group, group.reduce(shipped(*arrays), share_of(3)), share_of(3))["m"]
        assert np.array_equal(taken.value, sum(arrays) // 3)
        arrays[1][-2] = 2**63 - 1
        with pytest.raises(OutOfRangeError):
            group.reduce(shipped(*arrays), share_of(3))


def test_a_result_that_overflows_is_found_anywhere_in_an_array() -> None:
    count = LARGE // (64 * 8)
    values = np.full((count, 64), 100, np.int8)
    with shmacc.SparseConditionalAccumulator("int8", (count, 64), reduction_type="SUM") as sums:
        for row in 0, count // 2, count - 1:
            step = sums.global_step
            assert sums.apply_grad(np.arange(count), values, local_step=step)
            assert sums.apply_grad([row], values[:1], local_step=step)
            with pytest.raises(OutOfRangeError, match="does not fit"):
                sums.take_grad(2)
            assert sums.advance_step(step + 1) == 2


@pytest.mark.parametrize(("width", "lanes"), [(64, 2), (100, 1)])
def test_a_held_round_has_each_row_in_one_piece_in_ascending_order(width: int, lanes: int) -> None:
    indices, values = table("float32", width)
    members = {"m": shmacc.IndexedSlicesSpec((2 * len(indices), width), "float32")}
    with HostGroup(members, lanes=lanes) as group:
        assert group.apply({"m": (indices, values)}, 0)
        pieces = LocalSegment(group, Plan(group.members, 5)).hold().pieces
    columns = [piece.columns for piece in pieces.values()]
    assert sorted(pieces) == list(range(5))
    for own in columns:
        assert (np.diff(own.rows.numbers) > 0).all()
        assert len(own.rows.numbers) > len(indices) // 6
    where = np.argsort(rows := np.concatenate([own.rows.numbers for own in columns]))
    got = np.concatenate([own.values.view(np.float32).reshape(-1, width) for own in columns])
    order = np.argsort(indices)
    assert np.array_equal(rows[where], indices[order])
    assert np.array_equal(got[where], values[order])


@pytest.mark.parametrize(
    ("row_bytes", "size"), [(4, 1 << 12), (12, LARGE), (64, LARGE), (256, 1 << 12)]
)
def test_put_values_writes_each_value_at_its_index(row_bytes: int, size: int) -> None:
    """There are three members: rows, a part of a dense array, and rows again."""
    count = size // row_bytes
    random = np.random.default_rng(1)
    wholes = [_core.memory(n * row_bytes).reshape(n, row_bytes) for n in (count, count, 7)]
    for whole in wholes:
        whole[:] = 0
    places = random.permutation(count)[: count // 2], random.permutation(7)[:3]
    shapes = (count // 2, row_bytes), (count // 3, row_bytes), (3, row_bytes)
    parts = [random.integers(1, 256, shape, dtype=np.uint8) for shape in shapes]
    lengths = np.array([len(part) for part in parts])
    firsts = np.array([-1, 5, -1])
    _core.put_values(wholes, firsts, lengths, np.concatenate(places), join(parts))
    assert np.array_equal(wholes[0][places[0]], parts[0])
    assert np.array_equal(wholes[1][5 : 5 + count // 3], parts[1])
    assert np.array_equal(wholes[2][places[1]], parts[2])
    untouched = np.ones(7, bool)
    untouched[places[1]] = False
    assert not wholes[1][:5].any()
    assert not wholes[2][untouched].any()


def test_values_without_a_place_are_refused_and_nothing_is_written() -> None:
    cases: list[tuple[int, int, list[int], int]] = [
        *((-1, 2, [0, 4], 6), (-1, 2, [0, -1], 6), (-1, 2, [0, 2**40], 6), (-1, 2, [0], 6)),
        *((-1, 2, [0, 1, 2], 6), (-1, 5, [0, 1, 2, 3, 0], 15), (-1, 2, [0, 1], 5)),
        *((-1, 2, [0, 1], 7), (-1, -1, [0, 1], 6), (3, 2, [], 6), (5, 0, [], 0)),
        *((2**62, 2, [], 6), (1, 2**62, [], 6), (1, 2, [0], 6)),
    ]
    for first, length, positions, size in cases:
        whole, values = np.zeros((4, 3), np.uint8), np.ones(size, np.uint8)
        place = np.array(positions, np.int64)
        given = [whole], np.array([first]), np.array([length]), place, values
        with pytest.raises(InvalidArgumentError):
            _core.put_values(*given)
        assert not whole.any()
    one = np.array([1])
    fixed = np.frombuffer(bytes(12), np.uint8).reshape(4, 3)
    with pytest.raises(TypeError, match="writable"):
        _core.put_values([fixed], one, one, np.empty(0, np.int64), np.ones(3, np.uint8))


@pytest.mark.parametrize(
    ("highest", "count"), [(2**11, 200), (2**32, 5000), (2**63 - 1, 200), (9, 0), (9, 1)]
)
def test_columns_are_merged_member_by_member(highest: int, count: int) -> None:
    random = np.random.default_rng(count)
    members = [np.unique(random.integers(0, highest, count, dtype=np.int64)) for _ in range(4)]
    homes = [random.integers(0, 3, len(rows)) for rows in members]
    of_shards = [
        [rows[home == shard] for rows, home in zip(members, homes, strict=True)]
        for shard in range(3)
    ]
    columns = [np.concatenate(own) for own in of_shards]
    lengths = [np.array([len(rows) for rows in own]) for own in of_shards]
    rows, counts, positions = _core.merge_columns(columns, [c % 7 for c in columns], lengths)
    assert np.array_equal(rows, np.concatenate(members))
    assert np.array_equal(counts, rows % 7)
    for own, found in zip(of_shards, positions, strict=True):
        expected = [np.searchsorted(*pair) for pair in zip(members, own, strict=True)]
        assert np.array_equal(found, np.concatenate(expected))


def test_columns_whose_lengths_do_not_fit_are_refused() -> None:
    two = np.array([3, 4])
    shards: list[tuple[list[int], list[int]]] = [
        *(([1], [2]), ([1, 1], [1]), ([1, 1], [3]), ([1, 1], [-1, 3]), ([1, 1], [2**62, 2]))
    ]
    for counts, lengths in shards:
        with pytest.raises(InvalidArgumentError, match="do not fit"):
            _core.merge_columns([two], [np.array(counts)], [np.array(lengths)])
    with pytest.raises(InvalidArgumentError, match="do not fit"):
        _core.merge_columns([two, two], [two, two], [np.array([2]), np.array([1, 1])])
    assert [len(each) for each in _core.merge_columns([], [], [])] == [0, 0, 0]
