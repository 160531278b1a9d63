"""A segment that must leave memory free does so, whatever else grows beside it.

Each test has a small /dev/shm of its own, so the test decides how much is free.
"""

import os
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, apart, needs_own_shm
from helpers.full_memory import free_bytes
from helpers.lock_holder import activity
from helpers.own_shm import MIB
from helpers.support import LONG, until
from helpers.watched_reserving import Reservation, needs_listener, watched

import shmacc
from shmacc import IndexedSlicesSpec, TensorSpec, errors
from shmacc._multihost.segment import HostGroup

pytestmark = [needs_own_shm, pytest.mark.threads]

SIZE: Final = 64 * MIB
NAME: Final = "kept"
WIDTH: Final = 64
SHM: Final = "/dev/shm"  # noqa: S108  the very place


def make(members: str = "a", **options: Any) -> HostGroup:
    specs: dict[str, TensorSpec] = dict.fromkeys(members, IndexedSlicesSpec((None, WIDTH), "f4"))
    return HostGroup(specs, NAME, reduction_type="SUM", unlink_on_close=True, **options)


def rows(first: int, count: int, member: str = "a") -> dict[str, Any]:
    return {member: (np.arange(first, first + count), np.ones((count, WIDTH), np.float32))}


def apply(first: int, count: int, *, pipe: Pipe) -> Any:
    """Tell the test that the apply begins; apply new rows, whatever the step."""
    with shmacc.AccumulatorGroup.attach(NAME) as group:
        pipe.say()
        return group.apply(rows(first, count), shmacc.NEVER_STALE)


def apply_dense() -> bool:
    with shmacc.AccumulatorGroup.attach(NAME) as group:
        return group.apply({"a": np.ones(4 * MIB, np.float32)}, 0)


def wait_for_room(process: Apart) -> None:
    """Return when the process's apply waits for room."""
    process.hear()
    until(lambda: activity(NAME, process.pid) == "waits for room")


def look(group: HostGroup) -> Any:
    """Return what a round would contain, and the counters."""
    seen, stats = group.look(), group.stats()
    sums = {name: (each.indices.tolist(), each.values.sum()) for name, each in seen.items()}
    return seen.count, seen.step, sums, stats.applied, stats.dropped, stats.num_accumulated


def _is_accepted(group: HostGroup, gradient: dict[str, Any]) -> bool:
    """Apply a gradient; return False if there is no room for it now."""
    try:
        return group.apply(gradient, group.global_step, timeout=0)
    except errors.DeadlineExceededError as error:
        if "kept free for others" not in str(error):
            raise
        return False


@apart(shm=SIZE)
def test_growth_stops_at_the_kept_memory_and_a_refused_gradient_changes_nothing() -> None:
    refused = accepted = 0
    for room in range(0, 2 * MIB, 200_000):
        with make() as group:
            assert group.apply(rows(0, 100), 0)
            before, free = look(group), free_bytes()
            group.handle.keep_free(free - room)
            if _is_accepted(group, rows(50, 4000)):
                accepted += 1
            else:
                refused += 1
                assert look(group) == before
                assert free_bytes() >= free - 256 * 1024, "no more than room for the undo"
            assert free_bytes() >= free - room
            group.handle.keep_free(0)
            if look(group) == before:
                assert group.apply(rows(50, 4000), 0, timeout=0)
            taken = group.take(2, timeout=0)["a"]
            assert taken.indices.tolist() == list(range(4050))
            assert taken.values.sum() == (100 + 4000) * WIDTH
            group.unlink()
    assert refused > 1
    assert accepted > 1


@apart(shm=SIZE)
def test_a_gradient_larger_than_all_room_is_an_error_and_leaves_no_page() -> None:
    with make() as group:
        before, free = look(group), free_bytes()
        group.handle.keep_free(free - 4 * MIB)
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            group.apply(rows(0, 30_000), 0)
        error = caught.value
        assert error.free is not None
        assert error.needed is not None
        assert error.kept is not None
        assert (error.kept, error.total) == (free - 4 * MIB, SIZE)
        assert error.needed > error.free - error.kept, "it says why"
        assert str(error.kept) in str(error)
        assert look(group) == before
        assert free_bytes() == free
        assert group.apply(rows(0, 3_000), 0, timeout=0)


@needs_listener
@apart(shm=SIZE)
def test_two_segments_that_grow_at_once_do_not_get_the_same_memory() -> None:
    """Both processes saw the room; the second one gives back what it reserved."""
    taken = [0]

    def somebody_else(call: Reservation) -> int:
        if not taken[0] and call.size > MIB:  # the segment has found room, and reserves it now
            taken[0] = 20 * MIB
            fd = os.open(f"{SHM}/other", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, taken[0])
            os.close(fd)
        return 0

    with HostGroup({"a": TensorSpec((4 * MIB,), "f4")}, NAME) as group:  # the group grows once
        kept = free_bytes() - 24 * MIB
        group.handle.keep_free(kept)
        with (
            watched(apply_dense, decide=somebody_else) as process,
            pytest.raises(errors.ResourceExhaustedError, match="kept"),
        ):
            process.result(LONG)
        assert taken[0]
        assert kept + 3 * MIB < free_bytes() <= kept + 4 * MIB, "all that it has reserved"


@pytest.mark.parametrize(("members", "lanes"), [("a", 3), ("ab", 1)])
@apart(shm=SIZE)
def test_memory_of_earlier_rounds_is_freed_for_a_gradient(members: str, lanes: int) -> None:
    with make(members, lanes=lanes) as group:
        assert group.apply(rows(0, 60_000), 0, contributor=0)
        group.take(1, timeout=0)
        kept = free_bytes()
        group.handle.keep_free(kept)
        # The last round's memory belongs to another lane or member.
        assert group.apply(rows(7, 30_000, members[-1]), 1, contributor=lanes - 1, timeout=LONG)
        assert free_bytes() >= kept
        assert group.take(1, timeout=0)[members[-1]].indices.tolist() == list(range(7, 30_007))
        assert group.apply(rows(3, 40_000), 2, contributor=0, timeout=LONG)
        assert group.take(1, timeout=0)["a"].indices.tolist() == list(range(3, 40_003))
        assert group.stats().recoveries == 0


def _full(group: HostGroup) -> int:
    """Fill memory except for the kept part; return how many gradients fitted."""
    group.handle.keep_free(free_bytes() - 8 * MIB)
    count = 0
    while _is_accepted(group, rows(2000 * count, 2000)):
        count += 1
    return count


def _take(count: int) -> int:
    with shmacc.AccumulatorGroup.attach(NAME) as group, Apart(apply, 10**9, 2000) as worker:
        wait_for_room(worker)
        taken = group.take(count, timeout=LONG).count
        assert worker.result(LONG)
        group.take(1, timeout=0)
        return taken


@apart(shm=SIZE)
def test_a_worker_that_waits_for_room_goes_on_after_a_take() -> None:
    with make() as group:
        count = _full(group)
        with Apart(_take, count) as chief:
            assert chief.result(LONG) == count
        assert _full(group)


@pytest.mark.parametrize("by", ["finish", "seal", "less is kept"])
@apart(shm=SIZE)
def test_a_worker_that_waits_for_room_looks_again_after_a_change(by: str) -> None:
    with make() as group:
        count = _full(group)
        with Apart(apply, 10**9, 2000) as worker:
            wait_for_room(worker)
            if by == "finish":
                group.finish()
                assert worker.result(LONG) is False
            elif by == "seal":
                group.take_partial(count, timeout=0, seal=True)
                assert worker.result(LONG) is False
            else:  # others have released memory
                group.handle.keep_free(0)
                assert worker.result(LONG) is True
                assert group.num_accumulated() == count + 1


def make_large(group: HostGroup) -> Any:
    """Return a saved state that is too large for the group's memory."""
    with shmacc.AccumulatorGroup(group.members) as other:
        assert other.apply(rows(0, 60_000), 0)
        return other.state()


@apart(shm=2 * SIZE)
def test_partials_wait_for_room_and_a_restore_raises() -> None:
    with make() as group:
        count = _full(group)
        with shmacc.AccumulatorGroup(group.members) as other:
            assert other.apply(rows(10**9, 3000), 0, contributor=5)
            partial = other.take_partial(1, timeout=0)
        before = look(group)
        with pytest.raises(errors.DeadlineExceededError, match="kept free for others"):
            group.apply_partial(partial, timeout=0.1)
        assert look(group) == before
        assert group.take(count, timeout=0).count == count
        assert group.apply_partial(partial, shmacc.NEVER_STALE, timeout=0)
        assert group.contributors().tolist() == [5]
        state = group.state()
        group.take(1, timeout=0)
        group.handle.keep_free(free_bytes())
        before = look(group)
        large = make_large(group)
        with pytest.raises(errors.ResourceExhaustedError, match="kept"):
            group.restore(large)
        assert look(group) == before
        group.restore(state)
        assert group.num_accumulated() == 1
