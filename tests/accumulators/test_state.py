"""A saved state has everything that accumulated, and restores it; a snapshot takes nothing."""

import io
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.lock_holder import activity
from helpers.support import LONG, same_bits, same_taken, until

import shmacc
from shmacc import errors

pytestmark = pytest.mark.threads

SPECS: Final = {
    "rows": shmacc.IndexedSlicesSpec((9, 2), "float32"),
    "array": shmacc.TensorSpec((3,), "int16", reduction_type="SUM"),
    "any": shmacc.TensorSpec(None, "float64", reduction_type="CMEAN"),
    "untouched": shmacc.TensorSpec((2,), "float32"),
}


def sparse(lanes: int = 1) -> shmacc.SparseConditionalAccumulator:
    return shmacc.SparseConditionalAccumulator("f4", (9, None), lanes=lanes)


def dense(lanes: int = 1) -> shmacc.ConditionalAccumulator:
    return shmacc.ConditionalAccumulator("bfloat16", (2,), lanes=lanes)


def group(lanes: int = 1) -> shmacc.AccumulatorGroup:
    return shmacc.AccumulatorGroup(SPECS, lanes=lanes)


def turned(lanes: int = 1) -> shmacc.AccumulatorGroup:
    """Return a group like `group`, with its members in reverse order."""
    return shmacc.AccumulatorGroup(dict(reversed(SPECS.items())), lanes=lanes)


def fill(acc: Any) -> None:
    """Apply gradients with contributors and weights, at step 5."""
    acc.set_global_step(5)
    if isinstance(acc, shmacc.AccumulatorGroup):
        acc.apply({"rows": ([3, 1], [[1, 2], [3, 4]]), "array": [1, 2, 3]}, 5, contributor=4)
        acc.apply({"rows": ([1, 8], [[5, 6], [7, 8]])}, 5, weight=3)
        acc.apply({"any": [[1.0, 2.0]]}, 5, contributor=2, weight=2)
        acc.apply({}, 5, contributor=9)
    elif isinstance(acc, shmacc.SparseConditionalAccumulator):
        acc.apply_grad([3, 1], [[1, 2], [3, 4]], local_step=5, contributor=4)
        acc.apply_grad([1, 8], [[5, 6], [7, 8]], local_step=5, weight=3)
        acc.apply_grad([], np.empty((0, 2)), local_step=5, contributor=9)
    else:
        acc.apply_grad([1, 2], local_step=5, contributor=4)
        acc.apply_grad([7, -4], local_step=5, weight=2)
        acc.apply_grad([3, 3], local_step=5, contributor=9)


def saved_and_loaded(state: Mapping[str, Any]) -> Any:
    """Return the state as it comes back from a file."""
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return np.load(file)


MAKE: Final = [sparse, dense, group]


@pytest.mark.parametrize(
    ("make", "lanes", "again", "lanes_again"),
    [(sparse, 1, sparse, 3), (dense, 3, dense, 1), (group, 1, group, 1), (group, 3, turned, 1)],
)
def test_a_restored_accumulator_continues_like_the_saved_one(
    make: Callable[[int], Any], lanes: int, again: Callable[[int], Any], lanes_again: int
) -> None:
    with make(lanes) as acc, again(lanes_again) as other:
        fill(acc)
        before = acc.stats()
        state = acc.state()
        assert acc.stats() == before
        fill(other)
        other.take(1)
        other.restore(saved_and_loaded(state))
        assert other.global_step == 5
        same_taken(other.snapshot(), acc.snapshot())
        same_taken(other.take(3), acc.take(3))
        assert other.global_step == 6


@pytest.mark.parametrize("make", MAKE)
def test_a_restore_replaces_everything(make: Callable[[], Any]) -> None:
    with make() as acc:
        fill(acc)
        state, pending = acc.state(), acc.num_accumulated()
        want = acc.take(1)
        acc.set_global_step(5)
        for _ in range(2):
            fill(acc)
            acc.take_partial(1, seal=True)
            acc.unseal()
            fill(acc)
            acc.restore(state)
            assert acc.num_accumulated() == pending
        stats = acc.stats()
        assert stats.discarded == 2 * pending
        assert stats.applied == stats.taken + stats.discarded + stats.num_accumulated
        same_taken(acc.take(1), want)


def test_restored_contributors_count_as_repeated_in_every_lane() -> None:
    with group(lanes=3) as acc, group(lanes=4) as other:
        for k in range(12):
            acc.apply({"array": [1, 1, 1]}, 0, contributor=k)
        other.restore(acc.state())
        for k in range(14):
            assert other.apply({"array": [1, 1, 1]}, 0, contributor=k)
        taken = other.take(1)
        assert taken.contributors.tolist() == list(range(14))
        assert taken["array"].value.tolist() == [14, 14, 14]
        for k in range(5):
            assert other.apply({"array": [1, 1, 1]}, 1, contributor=k)
        assert other.take(1)["array"].value.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("make", "lanes"), [(sparse, 3), (dense, 1), (group, 3)])
def test_an_empty_accumulators_state_has_its_step(make: Callable[[int], Any], lanes: int) -> None:
    with make(lanes) as acc, make(lanes) as other:
        acc.set_global_step(3)
        fill(other)
        other.restore(acc.state())
        assert (other.num_accumulated(), other.global_step) == (0, 3)
        assert other.snapshot().count == 0
        assert other.contributors().size == 0
        fill(acc)
        fill(other)
        same_taken(other.take(1), acc.take(1))


def test_a_restore_ends_an_open_round() -> None:
    ended = r"ended before its block: .*\brestore\b"
    with sparse() as acc:
        fill(acc)
        want = acc.snapshot()
        with pytest.raises(errors.FailedPreconditionError, match=ended), acc.round(1) as taken:
            acc.restore(acc.state())
            assert acc.stats().round_pid is None
            assert acc.apply_grad([1], [[1, 1]], local_step=5)
            same_taken(taken, want)
        assert (acc.num_accumulated(), acc.global_step) == (4, 5)


def say_and_take(number: int, *, pipe: Pipe) -> int:
    """Tell the test that a take begins, and take; return how many gradients came."""
    with shmacc.ConditionalAccumulator.attach("acc") as own:
        pipe.say()
        return own.take(number, timeout=LONG).count


def test_a_waiting_take_gets_the_restored_gradients(acc: shmacc.ConditionalAccumulator) -> None:
    for _ in range(3):
        acc.apply_grad(1.0)
    state = acc.state()
    acc.advance_step(1)
    with Apart(say_and_take, 3).ready() as head:
        until(lambda: acc.stats().waiting == 1)
        acc.restore(state)
        assert head.result() == 3


def test_a_restore_ends_an_applys_wait_for_a_round(acc: shmacc.ConditionalAccumulator) -> None:
    """The gradient belongs to the old timeline: it is dropped at once, before the block ends."""

    def waits_for_the_end() -> bool:
        return activity("acc", os.getpid()) == "waits for the end of the round"

    acc.apply_grad(1.0)
    state = acc.state()
    with ThreadPoolExecutor(1) as pool, pytest.raises(errors.FailedPreconditionError), acc.round(1):
        waiting = pool.submit(acc.apply_grad, 1.0, local_step=shmacc.NEVER_STALE)
        until(waits_for_the_end)
        acc.restore(state)
        assert waiting.result(LONG) is False
    assert acc.num_accumulated() == 1


def _changed(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state | {key: np.array(value)}


def _with_a_member_twice(state: dict[str, Any]) -> dict[str, Any]:
    again = {f"4{key[1:]}": array for key, array in state.items() if key[0] == "0"}
    named = {key: np.append(state[key], state[key][:1]) for key in ("members", "specs")}
    return state | again | named


def _empty(state: dict[str, Any]) -> dict[str, Any]:
    nothing = {"count": np.array(0), "weight": np.array(0), "contributors": np.empty(0, np.int64)}
    return {name: array for name, array in state.items() if not name[0].isdigit()} | nothing


KEYS: Final = (
    *("members", "specs", "step", "contributors", "count", "weight"),
    *("0.count", "0.weight", "0.indices", "0.row_counts", "0.shape"),
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: 3, "mapping"),
        (lambda state: list(state.items()), "mapping"),
        *(
            (lambda state, key=key: {it: state[it] for it in state if it != key}, f"no '{key}'")
            for key in KEYS
        ),
        (_changed("members", ["rows", "array", "any", "other"]), "'(other|untouched)'.*no such"),
        (_changed("members", ["rows", "array", "any"]), "'untouched'"),
        (_changed("members", [*SPECS, "other"]), "names 5 members, but has specs of 4"),
        (_changed("specs", ["sparse float32 [9,2] MEAN"]), "'(array|any|untouched)'.*no such"),
        (_with_a_member_twice, "member 'rows' more than once"),
        (_changed("4.values", [1.0]), "'4.values', but names 4 members"),
        (_changed("members", [1, 2, 3, 4]), "'members' must be an array of strings"),
        (_changed("specs", [list(SPECS)]), "'specs' must be an array of strings"),
        (lambda state: state | {"members": [["rows"], ["array", "any"]]}, "'members'"),
        (_changed("count", -1), "count"),
        (_changed("count", 1), "Member 'rows'.*count"),
        (_changed("weight", 3), "Member 'rows'.*weight"),
        (lambda state: _empty(state) | {"weight": np.array(1)}, "0 gradients.*weight 1"),
        (lambda state: _empty(state) | {"count": np.array(2)}, "2 gradients.*weight 0"),
        (
            lambda state: _empty(state) | {"contributors": np.array([2])},
            "1 contributors.*count is 0",
        ),
        (_changed("step", 0.5), "step"),
        (_changed("contributors", [2, 2]), "contributors"),
        (_changed("contributors", [-2]), "contributors"),
        (_changed("0.indices", [1, 3, 9]), "Member 'rows'.*9"),
        (_changed("0.indices", [1, 1, 3]), "Member 'rows'.*repeat"),
        (_changed("0.row_counts", [1, 1]), "Member 'rows'"),
        (_changed("0.row_counts", [0, 1, 1]), "Member 'rows'"),
        (_changed("0.values", [[1.0, 2.0]]), "Member 'rows'"),
        (_changed("1.values", [1, 2]), "Member 'array'"),
        (_changed("1.count", 0), "Member 'array'"),
    ],
)
def test_a_bad_state_restores_nothing(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    with group() as acc:
        fill(acc)
        before, stats = acc.snapshot(), acc.stats()
        with pytest.raises(errors.InvalidArgumentError, match=says):
            acc.restore(change(acc.state()))
        assert acc.stats() == stats
        same_taken(acc.snapshot(), before)


def test_a_state_of_another_spec_names_the_member_and_both_specs() -> None:
    other = SPECS | {"array": shmacc.TensorSpec((3,), "int32", reduction_type="SUM")}
    cases: tuple[tuple[Any, Any, str], ...] = (
        (group(), shmacc.AccumulatorGroup(other), r"'array'.*int16.*int32"),
        (sparse(), dense(), r"sparse float32.*dense bfloat16"),
    )
    for one, another, said in cases:
        with one, another, pytest.raises(errors.InvalidArgumentError, match=said):
            another.restore(one.state())


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("make", MAKE)
def test_a_snapshot_equals_the_next_take(make: Callable[[int], Any], lanes: int) -> None:
    with make(lanes) as acc, make(1) as in_one_lane:
        fill(acc)
        fill(in_one_lane)
        before = acc.stats()
        first, second = acc.snapshot(), acc.snapshot()
        assert acc.stats() == before
        same_taken(first, second)
        same_taken(first, in_one_lane.take(1))  # whole numbers, which add up in any order
        taken = acc.take(1)
        same_taken(first, taken)
        if make is not group:
            assert type(first) is type(taken)
            first_array = first.values if make is sparse else first.value
            first_array[...] = 0  # changes the caller's copy only
            same_taken(second, taken)


def test_a_snapshot_of_an_empty_accumulator_is_an_empty_partial() -> None:
    with shmacc.SparseConditionalAccumulator("f2", (9, 2)) as acc:
        acc.set_global_step(4)
        none = acc.snapshot()
        assert (none.count, none.weight, none.step, none.contributors.size) == (0, 0, 4, 0)
        same_bits(none.values, np.empty((0, 2), np.float16))
        assert none.shape.tolist() == [9, 2]
    with shmacc.ConditionalAccumulator("int8", (2, None)) as acc:
        none_dense = acc.snapshot()
        assert none_dense.count == 0
        same_bits(none_dense.value, np.empty((2, 0), np.int8))


def test_a_snapshot_in_an_open_round_shows_the_round(acc: shmacc.ConditionalAccumulator) -> None:
    acc.apply_grad(1.0, contributor=3)
    with shmacc.ConditionalAccumulator.attach("acc") as other, acc.round(1) as taken:
        for handle in (other, acc):
            same_taken(handle.snapshot(), taken)
            assert handle.contributors().tolist() == [3]
    assert acc.snapshot().count == 0


def test_a_snapshot_does_not_wait_in_the_queue(acc: shmacc.ConditionalAccumulator) -> None:
    acc.apply_grad(1.0)
    with Apart(say_and_take, 2).ready() as head:
        until(lambda: acc.stats().waiting == 1)
        assert acc.snapshot().value == 1.0
        acc.apply_grad(2.0)
        assert head.result() == 2


def test_a_malformed_state_of_a_single_accumulator_restores_nothing() -> None:
    changes: tuple[Callable[[dict[str, Any]], Any], ...] = (
        lambda state: {key: array for key, array in state.items() if not key.startswith("0.")},
        lambda state: _empty(state) | {"0.values": state["0.values"]},
        *(_changed("count", 4), _changed("weight", 30)),
        *(_changed("0.count", 1), _changed("0.weight", 2), _with_a_member_twice),
    )
    for make in (sparse, dense):
        with make() as acc:
            fill(acc)
            before, stats = acc.snapshot(), acc.stats()
            for change in changes:
                with pytest.raises(errors.InvalidArgumentError):
                    acc.restore(change(acc.state()))
            assert acc.stats() == stats
            same_taken(acc.snapshot(), before)
