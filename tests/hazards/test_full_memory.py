"""A full /dev/shm raises a helpful error, changes nothing, and never ends in SIGBUS.

Docker gives a container 64 MiB. Each test has less, in a mount namespace of its own. It tries many
amounts of free space, so that each place where space can run out is reached.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, apart, needs_own_shm, run_apart
from helpers.full_memory import PAGE, SIZE, free_bytes, leave, make_room, says_it_all
from helpers.support import LONG, state_of, until

import shmacc
from shmacc import errors, init, inspection, optim, testing

pytestmark = [needs_own_shm, pytest.mark.threads]


def contents(made: Any) -> Any:
    """Return all contents: an accumulator's are what a take would return, but the round stays."""
    if isinstance(made, Both):
        return state_of(made.params), made.group.stats().update
    partial = made.take_partial(0, timeout=0)
    if partial.count:
        assert made.apply_partial(partial, shmacc.NEVER_STALE)
    members = partial.values() if isinstance(partial, shmacc.GroupPartial) else [partial]
    return (partial.count, partial.step, partial.contributors.tolist()), [
        getattr(member, array).tolist()
        for member in members
        for array in ("value", "indices", "values", "row_counts")
        if hasattr(member, array)
    ]


def sweep(
    prepare: Callable[[], Any],
    attempt: Callable[[Any], Any],
    step: int,
    most: int,
    check: Callable[[Any], None] = lambda _: None,
) -> tuple[int, int]:
    """Try with each amount of room; return how often it was too little, and how often enough.

    An attempt returns what it made, or None if it changed what was prepared.
    """
    failed = succeeded = 0
    for room in range(0, most, step):
        prepared = prepare()
        before = contents(prepared) if prepared else None
        # Limit the room only now, since `contents` may itself have grown the segment.
        leave(room)
        try:
            made = attempt(prepared) or prepared
            succeeded += 1
            make_room()
        except errors.ResourceExhaustedError as error:
            failed += 1
            says_it_all(error)
            assert prepared or testing.leaked_names() == (), f"left, with {room} bytes free"
            make_room()
            assert (contents(prepared) if prepared else None) == before
            made = attempt(prepared) or prepared
        check(made)
        made.unlink()
        made.close()
        assert testing.leaked_names() == ()
    return failed, succeeded


class Both(NamedTuple):
    """Parameters, and the group of their gradients."""

    params: shmacc.Parameters
    group: shmacc.AccumulatorGroup

    def unlink(self) -> None:
        for one in self:
            one.unlink()

    def close(self) -> None:
        for one in self:
            one.close()

    def update(self, gradient: Any, **more: Any) -> None:
        self.group.apply(gradient, self.group.global_step)
        self.try_update(**more)

    def try_update(self, **more: Any) -> None:
        with self.group.round(1) as taken:
            self.params.update(taken, **more)
        assert self.params.step == self.group.global_step

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.params["t"].ids().tolist()
        assert len(self.params["t"]) == len(ids)
        return ids


def _both(contents: Any) -> Both:
    params = shmacc.Parameters({"t": contents}, "params", optimizer=optim.Adagrad(0.1))
    return Both(params, shmacc.AccumulatorGroup(params.member_specs(["t"]), "full"))


def _of_rows(rows: Any, width: int) -> dict[str, Any]:
    return {"t": (rows, np.ones((len(rows), width), "f4"))}


EVERY_SECOND: Final = np.arange(0, 2000, 2)


def _array() -> Both:
    both = _both(np.ones((2000, 8), "f4"))
    both.group.apply(_of_rows(EVERY_SECOND, 8), 0)
    return both


def _update(both: Both) -> None:
    both.try_update()
    assert (both.params["t"][EVERY_SECOND] < 1).all()


TABLE: Final = shmacc.TableSpec((4,), initial=init.Uniform(-1, 1))


def _table(there: int) -> Both:
    """Make a table with `there` rows, and a group with a gradient of these and 4000 more rows."""
    both = _both(TABLE)
    if there:
        both.update(_of_rows(np.arange(there), 4), remove={"t": [3, 4, 5]})
    # Let the accumulator reserve what it needs for the gradient.
    for _ in range(2):
        both.group.advance_step(both.group.global_step + 1)
        both.group.apply(_of_rows(np.arange(3, there + 4000), 4), both.group.global_step)
    return both


def _grow(both: Both) -> None:
    ids = set(both.ids)
    new = range(3, max(ids, default=-1) + 1 + 4000)
    both.try_update(remove={"t": new[:100]})
    assert both.ids == sorted({*ids, *new} - {*new[:100]})


@cache
def _large_state() -> dict[str, Any]:
    with shmacc.Parameters({"t": TABLE}, optimizer=optim.Adagrad(0.1)) as larger:
        with shmacc.AccumulatorGroup(larger.member_specs()) as group:
            Both(larger, group).update(_of_rows(np.arange(7000), 4))
        return larger.state()


def _small_table() -> Both:
    _large_state()  # while there is room for it
    both = _both(TABLE)
    both.update(_of_rows(np.arange(50) * 2**40, 4), remove={"t": [0]})
    return both


def _restore_table(both: Both) -> None:
    free = free_bytes()
    try:
        both.params.restore(_large_state())
    except errors.ResourceExhaustedError:
        assert free_bytes() >= free, "it gives its memory back"
        raise


def _check_table(both: Both) -> None:
    assert state_of(both.params) == {name: it.tobytes() for name, it in _large_state().items()}
    both.group.set_global_step(both.params.step)
    both.update(_of_rows(np.arange(8000), 4))
    assert len(both.ids) == 8000
    assert inspection.check("params") == ()


def _sparse() -> Any:
    return shmacc.SparseConditionalAccumulator("f4", None, "full", reduction_type="SUM")


def _dense() -> Any:
    return shmacc.ConditionalAccumulator("f4", None, "full", reduction_type="SUM")


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
    "rows": shmacc.IndexedSlicesSpec(None, "float32", reduction_type="SUM"),
    "array": shmacc.TensorSpec(None, "float32", reduction_type="SUM"),
    "more rows": shmacc.IndexedSlicesSpec(None, "float64", reduction_type="SUM"),
}


def _of_all_members(rows: int) -> dict[str, Any]:
    return {
        "rows": (range(rows), np.ones((rows, 8), "f4")),
        "array": np.ones(10, "f4"),
        "more rows": (range(rows, 0, -1), np.ones((rows, 4))),
    }


@cache
def _partial_of_many_contributors() -> shmacc.GroupPartial:
    """Return a partial with so many contributors that the set of contributors must grow."""
    with shmacc.AccumulatorGroup(THREE) as other:
        for contributor in range(3, 1000):
            other.apply({}, 0, contributor=contributor)
        other.apply(_of_all_members(1500), 0, contributor=2)
        return other.take_partial(1)


def _group(lanes: int) -> shmacc.AccumulatorGroup:
    _partial_of_many_contributors()  # while there is room for it
    group = shmacc.AccumulatorGroup(THREE, "full", lanes=lanes)
    assert group.apply(_of_all_members(20), 0, contributor=1)
    return group


def _apply_to_all(group: shmacc.AccumulatorGroup) -> None:
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
        assert member.indices.size == 1500  # the first twenty rows are among them
        assert member.row_counts.sum() == 1520
        assert member.values.sum() == 1520 * member.values.shape[1]


# For each: how to prepare, the attempt, the room's step and limit, maybe a check of the result.
SWEEPS: Final[dict[str, tuple[Any, ...]]] = {
    # Places, rows and index are all reserved in this apply.
    "first rows": (_sparse, lambda acc: _apply_rows(acc, range(500), 16), 6 * PAGE, 400 * 1024),
    # Known and new rows in one gradient: rows and places grow, the index is built anew.
    "growth of rows, index and undo": (lambda: _filled(5000, 4),
        lambda acc: _apply_rows(acc, range(9000), 4), 13 * PAGE, 700 * 1024),
    # Adding to known rows needs no row, but room to save the old ones.
    "undo": (lambda: _filled(2000, 8), lambda acc: _apply_rows(acc, range(2000), 8), 5 * PAGE,
        280 * 1024),
    # Room may run out in any member, or in the set of contributors.
    "a group": (lambda: _group(1), _apply_to_all, 9 * PAGE, 480 * 1024),
    "a group of two lanes": (lambda: _group(2), _apply_to_all, 9 * PAGE, 480 * 1024),
    "a dense buffer": (_dense, _apply_array, 8 * PAGE, 400 * 1024),
    "an update": (_array, _update, 6 * PAGE, 280 * 1024),
    "a restore of an array": (_array, lambda both: both.params.restore(both.params.state()),
        6 * PAGE, 280 * 1024, _update),
    "a table's first rows": (lambda: _table(0), _grow, 12 * PAGE, 700 * 1024),
    "a table's growth": (lambda: _table(5000), _grow, 12 * PAGE, 700 * 1024),
    "a restore of a table": (_small_table, _restore_table, 24 * PAGE, 1000 * 1024, _check_table),
    "a new accumulator": (lambda: None, lambda _: _sparse(), PAGE, 12 * PAGE),
    "a private one": (lambda: None, lambda _: shmacc.ConditionalAccumulator("f4"), PAGE, 12 * PAGE),
}  # fmt: skip


@pytest.mark.parametrize("what", SWEEPS)
def test_an_operation_in_nearly_full_memory_succeeds_or_raises(what: str) -> None:
    """An error changes no sum, row or name, and makes no round final."""
    failed, succeeded = run_apart(sweep, *SWEEPS[what], shm=SIZE)
    assert failed > 2
    assert failed + succeeded > 10
    assert succeeded > 1


def _fill(acc: Any) -> None:
    for i in range(10_000):
        acc.apply_grad(range(i * 1000, (i + 2) * 1000), np.ones((2000, 64), "f4"))


@apart(shm=SIZE)
def test_a_table_that_fills_memory_raises_and_the_next_round_finds_room() -> None:
    acc = _sparse()
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        _fill(acc)
    says_it_all(caught.value)
    accepted = acc.num_accumulated()
    # Memory was really full: the table has most of it.
    assert accepted * 1000 * 64 * 4 > SIZE * 0.8
    # An apply that needs no more room succeeds.
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


@apart(shm=SIZE)
def test_operations_that_need_no_memory_succeed_without_a_free_byte() -> None:
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


@apart(shm=SIZE)
def test_a_take_without_room_in_the_queue_raises_and_others_stay() -> None:
    acc = _dense()
    ends: list[str] = []

    def wait() -> None:
        try:
            acc.take_grad(1, timeout=LONG)
            ends.append("taken")
        except errors.ShmaccError as error:
            ends.append(type(error).__name__)

    leave(0)
    # More takes than fit into the one page that every segment has for them from the start.
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


@apart(shm=SIZE)
def test_an_apply_without_room_in_the_list_of_processes_raises() -> None:
    """Fork more children than fit the page of processes that every segment has."""
    acc = _dense()
    for _ in range(2):
        acc.apply_grad(1.0)  # now both buffers have memory
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
                child.finish()
        acc.close()
        # The refused children are alive, but do not use the segment.
        shmacc.ConditionalAccumulator(
            "f4", (), "full", if_exists="replace", unlink_on_close=True
        ).close()


@apart(shm=SIZE)
def test_a_refused_gradient_that_freed_memory_leaves_correct_records() -> None:
    """The gradient needs room, frees memory of an earlier round, and is still refused."""
    with shmacc.SparseConditionalAccumulator("f4", None, "full") as acc:
        for step, rows in enumerate([20_000] + [1] * 8):
            acc.apply_grad(range(rows), np.ones((rows, 64), "f4"), local_step=step)
            acc.take(1)
        with pytest.raises(errors.ResourceExhaustedError):
            acc.apply_grad(range(60_000), np.ones((60_000, 64), "f4"), local_step=9)
        assert inspection.describe("full").stats.applied == 9
        acc.unlink()


@apart(shm=SIZE)
def test_a_refused_update_keeps_no_memory_for_old_rows() -> None:
    """A refused update gives all its memory back, including the memory for saving old rows."""
    rows = np.arange(40_000)
    with (
        shmacc.Parameters({"a": np.zeros((40_000, 16), "f4")}, optimizer=optim.SGD(1.0)) as params,
        shmacc.AccumulatorGroup(params.member_specs(["a"])) as group,
    ):
        group.apply({"a": (rows, np.ones((40_000, 16), "f4"))}, 0)
        with group.round(1) as taken:
            leave(1 << 20)
            with pytest.raises(errors.ResourceExhaustedError):
                params.update(taken)
            assert free_bytes() == 1 << 20
            make_room()
            assert params.update(taken)


@apart(shm=SIZE)
def test_a_refused_update_of_a_table_keeps_no_memory_for_new_rows() -> None:
    """An update that finds no room for new rows gives its memory back."""
    both = _both(TABLE)
    both.update(_of_rows(np.arange(10), 4))
    both.group.apply(_of_rows(np.arange(100_000), 4), 1)
    leave(1 << 20)
    with both.group.round(1) as taken:
        with pytest.raises(errors.ResourceExhaustedError):
            both.params.update(taken)
        assert free_bytes() == 1 << 20
        assert both.params.skip(taken)
    make_room()
    both.unlink()
