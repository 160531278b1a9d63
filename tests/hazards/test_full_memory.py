"""A full /dev/shm raises a helpful error, changes nothing, and never ends in SIGBUS.

Docker gives a container 64 MiB. Each test has less, in a mount namespace of its own. It tries many
amounts of free space, so that each place where space can run out is reached.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, needs_own_shm, run_apart
from helpers.full_memory import PAGE, SIZE, free_bytes, leave, make_room, says_it_all
from helpers.support import LONG, until

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    Parameters,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
    inspection,
    optim,
    testing,
)

pytestmark = [needs_own_shm, pytest.mark.threads]


def contents(acc: Any) -> Any:
    """All that a take would return, and the counters; the round stays."""
    partial = acc.take_partial(0, timeout=0)
    if partial.count:
        assert acc.apply_partial(partial, shmacc.NEVER_STALE)
    members = partial.values() if isinstance(partial, shmacc.GroupPartial) else [partial]
    return (partial.count, partial.step, partial.contributors.tolist()), [
        getattr(member, array).tolist()
        for member in members
        for array in ("value", "indices", "values", "row_counts")
        if hasattr(member, array)
    ]


def sweep(
    prepare: Callable[[], Any], attempt: Callable[[Any], None], step: int, most: int
) -> tuple[int, int]:
    """Try with every amount of room; return how often it was too little, and how often enough."""
    failed = succeeded = 0
    for room in range(0, most, step):
        acc = prepare()
        before = contents(acc)
        # Seen from outside, since `contents` may itself have grown the segment.
        leave(room)
        try:
            attempt(acc)
            succeeded += 1
            make_room()
        except errors.ResourceExhaustedError as error:
            failed += 1
            says_it_all(error)
            make_room()
            assert contents(acc) == before
            attempt(acc)
        acc.unlink()
        acc.close()
        assert testing.leaked_names() == ()
    return failed, succeeded


def _sparse() -> Any:
    return SparseConditionalAccumulator("f4", None, "full", reduction_type="SUM")


def _dense() -> Any:
    return ConditionalAccumulator("f4", None, "full", reduction_type="SUM")


def _filled(rows: int, width: int) -> Any:
    acc = _sparse()
    acc.apply_grad(range(rows), np.ones((rows, width), "f4"), local_step=shmacc.NEVER_STALE)
    return acc


def _apply_rows(acc: Any, rows: range, width: int) -> None:
    before = acc.num_accumulated()
    values = np.full((len(rows), width), 2, "f4")
    assert acc.apply_grad(rows, values, local_step=shmacc.NEVER_STALE)
    assert acc.num_accumulated() == before + 1


def _apply_array(acc: Any) -> None:
    assert acc.apply_grad(np.ones(50_000, "f4"), local_step=shmacc.NEVER_STALE)


THREE: Final = {
    "rows": IndexedSlicesSpec(None, "float32", reduction_type="SUM"),
    "array": TensorSpec(None, "float32", reduction_type="SUM"),
    "more rows": IndexedSlicesSpec(None, "float64", reduction_type="SUM"),
}


def _of_all_members(rows: int) -> dict[str, Any]:
    return {
        "rows": (range(rows), np.ones((rows, 8), "f4")),
        "array": np.ones(10, "f4"),
        "more rows": (range(rows, 0, -1), np.ones((rows, 4))),
    }


@cache
def _partial_of_many_contributors() -> shmacc.GroupPartial:
    """A partial of so many contributors that their set has to grow, too."""
    with AccumulatorGroup(THREE) as other:
        for contributor in range(3, 1000):
            other.apply({}, 0, contributor=contributor)
        other.apply(_of_all_members(1500), 0, contributor=2)
        return other.take_partial(1)


def _group(lanes: int) -> AccumulatorGroup:
    _partial_of_many_contributors()  # while there is room for it
    group = AccumulatorGroup(THREE, "full", lanes=lanes)
    assert group.apply(_of_all_members(20), 0, contributor=1)
    return group


def _apply_to_all(group: AccumulatorGroup) -> None:
    partial = _partial_of_many_contributors()
    whole = group.lanes == 1
    if whole:
        assert group.apply(_of_all_members(1500), 0, contributor=2)
    else:
        assert group.apply_partial(partial, 0)
    taken = group.take(2, timeout=0)
    assert taken.contributors.tolist() == [1, *([2] if whole else partial.contributors)]
    for name in ("rows", "more rows"):
        member: Any = taken[name]
        assert member.indices.size == 1500  # of the first twenty all are among them
        assert member.row_counts.sum() == 1520
        assert member.values.sum() == 1520 * member.values.shape[1]


# What is there, what is applied, and by how much the room grows, up to how much.
SWEEPS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], None], int, int]]] = {
    # Places, rows and index are all reserved in this apply.
    "first rows": (_sparse, lambda acc: _apply_rows(acc, range(500), 16), 6 * PAGE, 400 * 1024),
    # Known and new rows in one gradient: rows and places grow, the index is built anew.
    "growth of rows, index and undo": (
        lambda: _filled(5000, 4),
        lambda acc: _apply_rows(acc, range(9000), 4),
        13 * PAGE,
        700 * 1024,
    ),
    # Adding to known rows needs no row, but room to save the old ones.
    "undo": (
        lambda: _filled(2000, 8),
        lambda acc: _apply_rows(acc, range(2000), 8),
        5 * PAGE,
        280 * 1024,
    ),
    # Room may run out in any member, or in the set of contributors.
    "a group": (lambda: _group(1), _apply_to_all, 9 * PAGE, 480 * 1024),
    "a group of two lanes": (lambda: _group(2), _apply_to_all, 9 * PAGE, 480 * 1024),
    "a dense buffer": (_dense, _apply_array, 8 * PAGE, 400 * 1024),
}


@pytest.mark.parametrize("what", SWEEPS)
def test_an_operation_succeeds_or_raises_with_any_room(what: str) -> None:
    failed, succeeded = run_apart(sweep, *SWEEPS[what], shm=SIZE)
    assert failed > 3
    assert failed + succeeded > 10
    assert succeeded > 2


def _creating(make: Callable[[], Any]) -> int:
    failed = 0
    for room in range(0, 12 * PAGE, PAGE):
        leave(room)
        try:
            acc = make()
        except errors.ResourceExhaustedError as error:
            failed += 1
            says_it_all(error)
            # A segment that was not made leaves no name.
            assert testing.leaked_names() == (), f"left behind, with {room} bytes free"
            make_room()
            acc = make()
        else:
            make_room()
        assert acc.stats().applied == 0
        acc.unlink()
        acc.close()
        assert testing.leaked_names() == ()
    return failed


@pytest.mark.parametrize("make", [_sparse, lambda: ConditionalAccumulator("f4")])
def test_creating_with_every_amount_of_room(make: Callable[[], Any]) -> None:
    """A named segment, and a private one."""
    assert run_apart(_creating, make, shm=SIZE) > 2


def _fill(acc: Any) -> None:
    for i in range(10_000):
        acc.apply_grad(range(i * 1000, (i + 2) * 1000), np.ones((2000, 64), "f4"))


def _to_the_brim() -> None:
    """Grow a table until memory is full."""
    acc = _sparse()
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        _fill(acc)
    says_it_all(caught.value)
    accepted = acc.num_accumulated()
    # Memory was really full: the table has most of it.
    assert accepted * 1000 * 64 * 4 > SIZE * 0.8
    # What needs no more room goes on.
    assert acc.apply_grad([1, 2], np.ones((2, 64), "f4"))
    taken = acc.take(accepted + 1, timeout=0)
    assert taken.indices.size == (accepted + 1) * 1000
    assert taken.values.sum() == (accepted * 2000 + 2) * 64
    # And the next round finds room again.
    acc.apply_grad(range(10**6, 10**6 + 2000), np.ones((2000, 64), "f4"), local_step=1)
    assert acc.take_grad(1, timeout=0).indices.size == 2000
    acc.unlink()


def _attach() -> Any:
    return shmacc.attach("full")


def _what_needs_no_room() -> None:
    """Apply to known rows, take, and attach from another process, with no free byte."""
    with _filled(3000, 4) as acc:
        acc.apply_grad(range(3000), np.ones((3000, 4), "f4"))
        leave(0)
        assert acc.apply_grad(range(3000), np.ones((3000, 4), "f4"))
        assert not acc.apply_grad([1], np.ones((1, 4)), local_step=-1)
        assert run_apart(lambda: _attach().apply_grad(range(3000), np.ones((3000, 4), "f4")))
        (finding,) = inspection.check("full")
        assert (finding.subject, finding.kind) == ("/dev/shm", "bytes_exhausted")  # noqa: S108
        assert inspection.describe("full").stats.applied == 4
        partial = acc.take_partial(4, timeout=0, seal=True)
        assert partial.values.sum() == 4 * 4 * 3000
        acc.unseal()
        assert acc.advance_step(3) == 0
        acc.set_global_step(7)
        acc.cancel()
        acc.unlink()
        make_room()
    assert testing.leaked_names() == ()


def _many_waiting() -> None:
    """A take that gets no entry in the queue raises; one that has an entry keeps it."""
    acc = _dense()
    ends: list[str] = []

    def wait() -> None:
        try:
            acc.take_grad(1, timeout=LONG)
            ends.append("taken")
        except errors.ShmaccError as error:
            ends.append(type(error).__name__)

    leave(0)
    # More than the page of waiting takes holds that every segment has from the start.
    threads = [threading.Thread(target=wait) for _ in range(70)]
    for thread in threads:
        thread.start()
    until(lambda: len(ends) + acc.stats().waiting == len(threads))
    assert set(ends) == {"ResourceExhaustedError"}
    refused = len(ends)
    assert 0 < refused < 20
    make_room()
    acc.apply_grad(1.0)
    until(lambda: "taken" in ends)
    acc.cancel()
    for thread in threads:
        thread.join(LONG)
    assert len(ends) == len(threads)
    assert ends.count("taken") == 1
    assert ends.count("ResourceExhaustedError") == refused
    acc.unlink()


def _apply_and_stay(acc: Any, *, pipe: Pipe) -> None:
    try:
        acc.apply_grad(1.0, local_step=shmacc.NEVER_STALE)
    except errors.ResourceExhaustedError as error:
        says_it_all(error)
        pipe.say("refused")
    else:
        pipe.say("applied")
    pipe.hear()


def _many_attached() -> None:
    """Fork more children than fit the page of processes that every segment has."""
    acc = _dense()
    for _ in range(2):
        acc.apply_grad(1.0)  # both buffers have their room
    leave(0)
    with ExitStack() as stack:
        children = [stack.enter_context(Apart(_apply_and_stay, acc)) for _ in range(40)]
        ends = [child.hear() for child in children]
        assert set(ends) == {"applied", "refused"}
        assert acc.num_accumulated() == 2 + ends.count("applied")
        make_room()
        assert acc.take_grad(1, timeout=0) == 2 + ends.count("applied")
        for child, end in zip(children, ends, strict=True):
            if end == "applied":
                child.say()
                child.result()
        acc.close()
        # The refused children are there, but do not use it.
        ConditionalAccumulator("f4", (), "full", if_exists="replace", unlink_on_close=True).close()


def _too_large_after_small_rounds() -> None:
    """A refused gradient frees memory of its round, and must leave the records."""
    with SparseConditionalAccumulator("f4", None, "full") as acc:
        for step, rows in enumerate([20_000] + [1] * 8):
            acc.apply_grad(range(rows), np.ones((rows, 64), "f4"), local_step=step)
            acc.take(1)
        with pytest.raises(errors.ResourceExhaustedError):
            acc.apply_grad(range(60_000), np.ones((60_000, 64), "f4"), local_step=9)
        assert inspection.describe("full").stats.applied == 9
        acc.unlink()


def _too_little_for_the_old_rows() -> None:
    """A refused update keeps no memory, not even for the old rows' numbers."""
    rows = np.arange(40_000)
    with (
        Parameters({"a": np.zeros((40_000, 16), "f4")}, optimizer=optim.SGD(1.0)) as params,
        AccumulatorGroup(params.member_specs(["a"])) as group,
    ):
        group.apply({"a": (rows, np.ones((40_000, 16), "f4"))}, 0)
        with group.round(1) as taken:
            leave(1 << 20)
            with pytest.raises(errors.ResourceExhaustedError):
                params.update(taken)
            assert free_bytes() == 1 << 20
            make_room()
            assert params.update(taken)


@pytest.mark.parametrize(
    "act",
    [
        _to_the_brim,
        _what_needs_no_room,
        _many_waiting,
        _many_attached,
        _too_large_after_small_rounds,
        _too_little_for_the_old_rows,
    ],
)
def test_full_memory_is_an_error_and_changes_nothing(act: Callable[[], None]) -> None:
    run_apart(act, shm=SIZE)


def _updates(*, restores: bool) -> tuple[int, int]:
    """Try with every amount of room; return how often it was too little, and how often enough."""
    failed = succeeded = 0
    table, rows = np.ones((2000, 8), "f4"), np.arange(0, 2000, 2)
    for room in range(0, 280 * 1024, 6 * PAGE):
        with Parameters({"table": table}, "params", optimizer=optim.Adagrad(0.1)) as params:
            group = AccumulatorGroup(params.member_specs(["table"]), "full")
            group.apply({"table": (rows, np.ones((1000, 8), "f4"))}, 0)
            before = params.state()
            leave(room)
            with group.round(1) as taken:
                try:
                    params.restore(before) if restores else params.update(taken)
                    succeeded += 1
                    make_room()
                except errors.ResourceExhaustedError as error:
                    failed += 1
                    says_it_all(error)
                    assert group.stats().update is None
                    for key, saved in params.state().items():
                        assert saved.tobytes() == before[key].tobytes()
                    make_room()
                if params.step == 0:
                    params.update(taken)
            assert params.step == group.global_step == 1
            assert (params["table"][rows] < 1).all()
            group.unlink()
            group.close()
            params.unlink()
        assert testing.leaked_names() == ()
    return failed, succeeded


@pytest.mark.parametrize("restores", [False, True])
def test_an_update_without_room_changes_nothing(*, restores: bool) -> None:
    """Its round is not final then. The same holds for a restore."""
    failed, succeeded = run_apart(lambda: _updates(restores=restores), shm=SIZE)
    assert failed > 2
    assert succeeded > 2
