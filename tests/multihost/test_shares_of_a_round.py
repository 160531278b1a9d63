"""With real segments, the shards' parts of a round add up to the round of one group."""

import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.joined import join

import shmacc
from shmacc._base import layout
from shmacc._multihost.columns import Piece
from shmacc._multihost.messages import Batch, BatchKey, Fence, HostBatch, Opened, Share
from shmacc._multihost.pieces import Joining, Plan
from shmacc._multihost.segment import Content, HostGroup, LocalSegment
from shmacc.errors import InvalidArgumentError

pytestmark = pytest.mark.threads

SPECS = {
    "rows": shmacc.IndexedSlicesSpec((None, 4), "float32"),
    "sums": shmacc.IndexedSlicesSpec((50,), "int32", reduction_type="SUM"),
    "large": shmacc.TensorSpec((200, 100), "float16", reduction_type="CMEAN"),
    "scalar": shmacc.TensorSpec((), "float64"),
    "never": shmacc.TensorSpec((3,), "float32"),
    **{
        reduction: shmacc.IndexedSlicesSpec((9,), "float64", reduction_type=reduction)
        for reduction in layout.REDUCTIONS
    },
}


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_group_of_only_sparse_or_dense_members_is_reduced_as_on_one_host(kind: str) -> None:
    specs = {"a": SPECS["sums"], "b": SPECS["MEAN"]}
    if kind == "dense":
        specs = {"a": SPECS["scalar"], "b": SPECS["large"]}
    plan = Plan(specs, 2)
    values: dict[str, object] = {"a": 1.0, "b": np.ones((200, 100), np.float16)}
    gradient = values if kind == "dense" else {"a": ([3], [1]), "b": ([], [])}
    with HostGroup(specs) as group:
        assert group.apply(gradient, 0)
        content = LocalSegment(group, plan).hold()
        expected = group.snapshot()
    opened = Opened(Fence(1, 0), 0, (HostBatch(BatchKey("h", 1, 1), content.batch),))
    parts = {}
    for shard, piece in content.pieces.items():
        with HostGroup(plan.at_shard(shard)) as group:
            parts[shard] = group.reduce([piece], Share.of(opened, shard))
    taken = join(plan, parts, opened)
    for name, theirs in expected.items():
        for field in type(theirs).__slots__:
            assert np.array_equal(getattr(taken[name], field), getattr(theirs, field))


@pytest.mark.parametrize("shards", [1, 3])
def test_reducing_over_hosts_and_shards_equals_one_group(  # noqa: C901, PLR0912
    shards: int, request: pytest.FixtureRequest
) -> None:
    """Members, counts, weights and contributors are equal to the bit, since the sums are exact."""
    random = np.random.default_rng(shards)
    flat = shmacc.AccumulatorGroup(SPECS)
    hosts = [HostGroup(SPECS, lanes=lanes) for lanes in (1, 2, 3)]
    plan = Plan(flat.members, shards)
    at_shards = [HostGroup(plan.at_shard(shard)) for shard in range(shards)]
    for group in flat, *hosts, *at_shards:
        request.addfinalizer(group.close)
    for step in range(2):
        for i in range(7):
            gradient: dict[str, object] = {}
            if i % 2:
                values = random.integers(-9, 9, (30, 4)).astype(np.float32)
                gradient["rows"] = random.integers(0, 1000, 30), values
            if i % 3:
                gradient["sums"] = random.integers(0, 50, 3), random.integers(-9, 9, 3)
            if i != 2:
                gradient["large"] = random.integers(-9, 9, (200, 100)).astype(np.float16)
            for reduction in layout.REDUCTIONS:  # not every host has rows at every shard
                gradient[reduction] = [i, 8], [float(i + 1), 1.0]
            if i == 4:
                gradient["scalar"] = 3.0
                gradient["rows"] = np.empty(0, np.int64), np.empty((0, 4), np.float32)
            for group in flat, hosts[i % 3]:
                assert group.apply(gradient, step, contributor=i, weight=i % 2 + 1)
        segments = [LocalSegment(host, plan) for host in hosts]
        staged: list[dict[BatchKey, Piece]] = [{} for _ in range(shards)]
        members = []
        for number, segment in enumerate(segments):
            content = segment.hold()
            key = BatchKey(f"host{number}", 1, 1)
            members.append(HostBatch(key, content.batch))
            for shard, piece in content.pieces.items():
                staged[shard][key] = piece
        opened = Opened(Fence(1, step), step, tuple(members))
        parts = {
            n: group.reduce(staged[n].values(), Share.of(opened, n))
            for n, group in enumerate(at_shards)
        }
        got, expected = join(plan, parts, opened), flat.take(1)
        assert list(got) == list(expected) == [name for name in SPECS if name != "never"]
        assert (got.count, got.weight, got.step) == (7, expected.weight, step)
        assert got.contributors.tolist() == expected.contributors.tolist()
        for name, part in expected.items():
            for field in type(part).__slots__:
                ours, theirs = getattr(got[name], field), getattr(part, field)
                assert np.array_equal(ours, theirs), (name, field)
                assert np.asarray(ours).dtype == np.asarray(theirs).dtype, (name, field)
        for segment in segments:
            segment.consume()
            assert segment.group.global_step == step + 1


def test_pieces_are_hardly_larger_than_their_sums() -> None:
    specs = {
        "rows": shmacc.IndexedSlicesSpec((10**6, 16), "float32"),
        "whole": shmacc.TensorSpec((100_000,), "float32"),
    }
    rows = np.random.default_rng(0).choice(10**6, 20_000, replace=False)
    with HostGroup(specs) as group:
        gradient = {"rows": (rows, np.ones((20_000, 16), np.float32)), "whole": np.ones(100_000)}
        assert group.apply(gradient, 0)
        pieces = LocalSegment(group, Plan(group.members, 8)).hold().pieces
        sums = group.look()
    shipped = sum(len(pickle.dumps(piece)) for piece in pieces.values())
    assert set(pieces) == set(range(8))
    assert shipped <= 1.05 * len(pickle.dumps(sums))


def test_a_mean_counts_gradients_without_rows_at_the_shard() -> None:
    members = {"m": shmacc.IndexedSlicesSpec((None,), "float64", reduction_type="CMEAN")}
    plan = Plan(members, 2)

    def pieces_of(row: int) -> dict[int, Piece]:
        with HostGroup(members) as group:
            assert group.apply({"m": ([row], [6.0])}, 0)
            return LocalSegment(group, plan).hold().pieces

    # For each shard, find a host that has a row there.
    pieces = {BatchKey(str(row), 1, 1): pieces_of(row) for row in range(99)}
    keys = [next(key for key in pieces if shard in pieces[key]) for shard in range(2)]
    batches = [Batch(1, 1, members={"m": (1, 1)}, shards=frozenset({shard})) for shard in range(2)]
    opened = Opened(Fence(1, 0), 0, tuple(map(HostBatch, keys, batches)))
    parts = {}
    for shard, key in enumerate(keys):
        with HostGroup(plan.at_shard(shard)) as group:
            parts[shard] = group.reduce([pieces[key][shard]], Share.of(opened, shard))
    assert join(plan, parts, opened)["m"].values.tolist() == [3.0, 3.0]


def test_a_shard_that_lacks_part_of_a_dense_member_is_refused() -> None:
    """The missing values would be whatever was in memory."""
    with HostGroup({"m": shmacc.TensorSpec((2,), "float64")}) as group:
        plan = Plan(group.members, 1)
        assert group.apply({"m": np.ones(2)}, 0)
        content = LocalSegment(group, plan).hold()
        opened = Opened(Fence(1, 0), 0, (HostBatch(BatchKey("h", 1, 1), content.batch),))
        part = group.reduce(content.pieces.values(), Share.of(opened, 0))
    assert join(plan, {0: part}, opened)["m"].value.tolist() == [1.0, 1.0]
    for length in (None, 0, 1, 3):
        parts = part.rows.parts.copy()
        parts[0, 3] = length or 0
        rows = {} if length is None else {0: replace(part.rows, parts=parts)}
        with pytest.raises(InvalidArgumentError, match="run of a dense member"):
            Joining(plan, opened, rows)


def local(group: HostGroup) -> LocalSegment:
    """Return a segment whose sums all go to one shard."""
    return LocalSegment(group, Plan(group.members, 1))


def value_of(content: Content, dtype: type[np.generic] = np.float64) -> Any:
    """Return the only sum of a group that has one scalar member."""
    [value] = content.pieces[0].columns.values.view(dtype)
    return value


def test_a_held_segment_keeps_its_gradients_until_the_step_moves() -> None:
    with HostGroup({"m": shmacc.TensorSpec((), "float64")}) as group:
        segment = local(group)
        assert segment.hold().batch == Batch(0, 0), "no shard is to wait for a piece"
        assert not group.apply({"m": 1.0}, 0), "held, though it is empty"
        segment.release()
        assert group.apply({"m": 1.0}, 0, contributor=1)
        first, again = segment.hold(), segment.hold()
        assert value_of(first) == value_of(again) == 1.0
        assert (
            first.batch == again.batch == Batch(1, 1, frozenset({1}), {"m": (1, 1)}, frozenset({0}))
        )
        segment.reset(5)
        assert (group.global_step, group.num_accumulated()) == (5, 0)
        assert group.apply({"m": 7.0}, 5, contributor=1)
        held = segment.hold()
        assert value_of(held) == 7.0
        assert held.batch == again.batch
        segment.set_step(2)
        assert group.apply({"m": 1.0}, 2)
        assert group.num_accumulated() == 2


def test_a_reset_to_a_later_step_does_not_undo_a_processs_finish() -> None:
    with HostGroup({"m": shmacc.TensorSpec((), "float64")}) as group:
        segment = local(group)
        assert group.apply({"m": 1.0}, 0)
        segment.hold()
        group.finish()
        segment.reset(5)
        assert not segment.is_held
        assert (group.running, group.global_step, group.num_accumulated()) == (False, 5, 0)
        segment.reset(5)
        assert group.running, "begun anew"


def test_a_new_forwarder_takes_over_a_segment_that_a_stopped_forwarder_holds() -> None:
    with (
        HostGroup({"m": shmacc.TensorSpec((), "float64")}, "shared") as group,
        HostGroup.attach("shared") as other,
    ):
        assert group.apply({"m": 1.0}, 0)
        stopped, new = local(other), local(group)
        stopped.hold()
        assert new.hold().batch.count == 1
        stopped.release()  # it continues too late: its hold is over
        assert not group.apply({"m": 1.0}, 0)
        group.unlink()


def test_threads_of_one_process_neither_lose_nor_double_a_gradient() -> None:
    """Two threads apply while a third holds, releases and consumes."""
    with HostGroup({"m": shmacc.TensorSpec((), "int64")}) as group:
        accepted = [0, 0]

        def work(number: int) -> None:
            for _ in range(400):
                accepted[number] += group.apply({"m": 1}, shmacc.NEVER_STALE)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        segment, taken = local(group), 0
        while any(thread.is_alive() for thread in threads) or group.num_accumulated():
            content = segment.hold()
            count = content.batch.count
            if count % 2:
                segment.release()
            else:
                taken += count
                assert count == (value_of(content, np.int64) if count else 0)
                segment.consume()
            if not any(thread.is_alive() for thread in threads) and group.num_accumulated() % 2:
                assert group.apply({"m": 1}, shmacc.NEVER_STALE)
                accepted[0] += 1
        assert taken == sum(accepted) == group.stats().applied


def test_a_group_over_hosts_needs_declared_shapes() -> None:
    members = {"m": shmacc.TensorSpec((None, 3), "float32")}
    with pytest.raises(InvalidArgumentError, match=r"'m'.*needs a shape"):
        Plan(members, 2)
