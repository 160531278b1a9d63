"""After a restore or a load, no gradient that was computed before it is accepted.

A worker computes at step 12, and the chief goes back to step 10 (``shmacc.load``, ``restore``). The
worker's gradient is dropped, whatever step it names, even when the new timeline has reached step
12. A gradient that is computed after a new read of the step is accepted.
"""

import asyncio
import contextvars
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Crew, Pipe, every_start_method
from helpers.lock_holder import activity
from helpers.support import LONG, until

import shmacc
from shmacc import optim, raw_ops

NAME: Final = "acc"
BACK: Final = 10
DEAD: Final = 12
NUMBERS: Final = (BACK, 11, DEAD, DEAD + 1, 2**40, shmacc.NEVER_STALE)


def identity(row: int) -> Any:
    """Row `row` of the identity matrix: a sum of such rows shows which gradients are in it."""
    return np.eye(64)[row]


MAKE: Final[dict[str, Callable[..., Any]]] = {
    "dense": lambda **options: shmacc.ConditionalAccumulator("f8", (64,), NAME, **options),
    "sparse": lambda **options: shmacc.SparseConditionalAccumulator(
        "f8", (None, 64), NAME, **options
    ),
    "group": lambda **options: shmacc.AccumulatorGroup(
        {"d": shmacc.TensorSpec((64,), "f8"), "s": shmacc.IndexedSlicesSpec((4, 64), "f8")},
        NAME,
        **options,
    ),
}
MAKE["two lanes"] = lambda **options: MAKE["group"](lanes=2, **options)


def apply(acc: Any, row: int, step: int, **terms: Any) -> bool:
    if isinstance(acc, shmacc.AccumulatorGroup):
        return acc.apply({"d": identity(row), "s": ([1], [identity(row)])}, step, **terms)
    if isinstance(acc, shmacc.SparseConditionalAccumulator):
        return acc.apply_grad([1], [identity(row)], local_step=step, **terms)
    added: bool = acc.apply_grad(identity(row), step, **terms)
    return added


def rows_in(taken: Any) -> set[int]:
    """Return the rows of the gradients that a take returned."""
    if hasattr(taken, "keys"):
        assert rows_in(taken["d"]) == rows_in(taken["s"])
        return rows_in(taken["d"])
    sums = taken.value if hasattr(taken, "value") else taken.values[0]
    return set(np.flatnonzero(sums).tolist())


@pytest.fixture(params=MAKE)
def chief(request: pytest.FixtureRequest) -> Iterator[Any]:
    with MAKE[request.param](reduction_type="SUM") as made:
        yield made
        made.unlink()


@pytest.fixture
def worker(chief: Any) -> Iterator[Any]:
    with closing(type(chief).attach(chief.shared_name)) as made:
        yield made


def save(chief: Any) -> dict[str, Any]:
    """Return the state of step 10, and go on to step 12."""
    chief.advance_step(BACK)
    state: dict[str, Any] = chief.state()
    chief.advance_step(DEAD)
    return state


def go_back_by_load(chief: Any, state: dict[str, Any], folder: Path) -> None:
    np.savez(folder / "made", **{f"it/{key}": value for key, value in state.items()})
    shmacc.load(folder / "made.npz", {"it": chief})


async def _next_of(steps: Any) -> Any:
    return await anext(steps)


READS: Final[dict[str, Callable[[Any], int]]] = {
    "global_step": lambda acc: acc.global_step,
    "wait_step": lambda acc: acc.wait_step(BACK - 1, timeout=LONG),
    "steps": lambda acc: next(acc.steps(timeout=LONG)),
    "wait_step_async": lambda acc: asyncio.run(acc.wait_step_async(BACK - 1, timeout=LONG)),
    "steps_async": lambda acc: asyncio.run(_next_of(acc.steps_async(timeout=LONG))),
}


@pytest.mark.parametrize("go_back", [lambda chief, state, _: chief.restore(state), go_back_by_load])
@pytest.mark.parametrize("read", READS)
def test_a_gradient_of_the_old_timeline_is_dropped(
    chief: Any, worker: Any, read: str, go_back: Any, tmp_path: Path
) -> None:
    state = save(chief)
    assert READS[read](worker) == DEAD
    go_back(chief, state, tmp_path)
    dropped = worker.stats().dropped
    for step in range(BACK, DEAD + 2):  # even at the old gradient's own step
        assert not any(apply(worker, 63, number) for number in NUMBERS)
        assert not worker.apply_partial(chief.take_partial(0), DEAD)
        assert chief.global_step == step
        assert apply(chief, step, step)
        with chief.round(1, timeout=LONG) as taken:
            assert rows_in(taken) == {step}
    assert worker.stats().dropped == dropped + 4 * len(NUMBERS)

    step = READS[read](worker)  # from here on, the worker computes from the restored state
    assert apply(worker, 1, step)
    assert apply(worker, 2, step + 7)  # ahead of the step, but in the same timeline
    assert apply(worker, 3, shmacc.NEVER_STALE)
    with closing(type(chief).attach(NAME)) as later:
        assert apply(later, 4, step)
    assert rows_in(chief.take(4, timeout=0)) == {1, 2, 3, 4}


def test_the_process_that_restores_may_apply_new_gradients_only(chief: Any, tmp_path: Path) -> None:
    """New gradients have the restored step; earlier gradients belong to the old timeline."""
    state = save(chief)
    assert chief.global_step == DEAD
    go_back_by_load(chief, state, tmp_path)
    assert not apply(chief, 1, DEAD)
    assert apply(chief, 2, BACK)
    assert rows_in(chief.take(1, timeout=0)) == {2}
    assert apply(chief, 3, BACK + 1)  # the take's result says which step comes next


@pytest.mark.parametrize("set_step", ["advance_step", "set_global_step"])
def test_set_global_step_begins_no_timeline(chief: Any, worker: Any, set_step: str) -> None:
    step = worker.global_step
    getattr(chief, set_step)(5)
    if set_step == "set_global_step":
        chief.set_global_step(0)
        assert apply(worker, 1, step)
    assert apply(worker, 2, 9)  # a step ahead is accepted, as in TensorFlow
    assert apply(worker, 3, shmacc.NEVER_STALE)


def test_a_handle_that_read_no_step_has_the_timeline_it_opened_in(chief: Any, worker: Any) -> None:
    """With NEVER_STALE, only the first gradient is dropped: it may be older than the restore."""
    state = save(chief)
    chief.restore(state)
    assert not any(apply(worker, 1, number) for number in NUMBERS if number != shmacc.NEVER_STALE)
    assert not apply(worker, 2, shmacc.NEVER_STALE)  # may be older than the restore
    assert apply(worker, 3, shmacc.NEVER_STALE)
    assert not apply(worker, 4, BACK)
    assert worker.global_step == BACK
    assert apply(worker, 5, BACK)
    assert rows_in(chief.take(2, timeout=0)) == {3, 5}


def test_a_step_that_a_thread_read_stays_old_though_another_reads_after_a_restore(
    chief: Any, worker: Any
) -> None:
    state = save(chief)
    read, restored = threading.Event(), threading.Event()

    def compute() -> list[bool]:
        step = worker.global_step
        read.set()
        assert restored.wait(LONG)
        old = [apply(worker, 63, step, contributor=1)]
        return [*old, apply(worker, 1, worker.global_step, contributor=1)]

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(compute)
        assert read.wait(LONG)
        chief.restore(state)
        assert worker.global_step == BACK  # a read by another thread, of the same handle
        chief.advance_step(DEAD)
        assert worker.global_step == DEAD
        assert apply(worker, 2, DEAD)
        restored.set()
        assert slow.result(LONG) == [False, True]
    assert rows_in(chief.take(2, timeout=0)) == {1, 2}


def test_threads_may_get_the_step_from_another_thread(chief: Any, worker: Any) -> None:
    state = save(chief)
    with ThreadPoolExecutor(1) as pool:
        step = worker.global_step
        chief.restore(state)
        assert worker.global_step == BACK
        assert not pool.submit(apply, worker, 63, step).result(LONG)
        assert pool.submit(apply, worker, 1, BACK).result(LONG)
        # The reverse: a pool's thread waits, and this thread applies.
        chief.advance_step(BACK + 1)
        assert pool.submit(worker.wait_step, BACK, timeout=LONG).result(LONG) == BACK + 1
        assert apply(worker, 2, BACK + 1)


async def test_each_task_has_its_own_read_of_the_step(chief: Any, worker: Any) -> None:
    state = save(chief)
    restored = asyncio.Event()

    async def compute(how: str) -> list[bool]:
        answers: list[bool] = []
        async for step in worker.steps_async(timeout=LONG):
            if not answers:
                await restored.wait()
            one = asyncio.create_task(asyncio.to_thread(apply, worker, 63, step))
            answers += [await one] if how == "in a task" else [apply(worker, 63, step)]
            if len(answers) == 2:
                return answers
        raise AssertionError

    slow = [asyncio.create_task(compute(how)) for how in ("itself", "in a task")]
    await asyncio.to_thread(until, lambda: worker.stats().waiting == 0 and len(slow) == 2)
    for _ in range(50):
        await asyncio.sleep(0.001)
    chief.restore(state)
    assert worker.global_step == BACK
    chief.advance_step(DEAD)
    assert await worker.wait_step_async(BACK, timeout=LONG) == DEAD
    restored.set()
    assert await asyncio.gather(*slow) == [[False, True]] * 2


async def test_a_read_in_a_subtask_counts_for_its_parent(chief: Any, worker: Any) -> None:
    """`asyncio.wait_for` makes such a subtask in Python 3.11."""
    state = save(chief)
    step = worker.global_step
    chief.restore(state)
    step = await asyncio.create_task(worker.wait_step_async(BACK - 1, timeout=LONG))
    assert apply(worker, 1, step)


@pytest.mark.parametrize("how", ["itself", "in a thread"])
def test_a_task_keeps_its_creators_read_though_the_creator_reads_after_a_restore(
    chief: Any, worker: Any, how: str
) -> None:
    """The thread reads between two runs of its loop, while a task of the first run computes."""
    state = save(chief)
    restored = threading.Event()

    def compute_in_thread() -> bool:
        assert restored.wait(LONG)
        return apply(worker, 63, DEAD)

    async def compute() -> bool:
        if how == "in a thread":
            return await asyncio.to_thread(compute_in_thread)
        assert await asyncio.to_thread(restored.wait, LONG)
        return apply(worker, 63, DEAD)

    async def begin() -> asyncio.Task[bool]:
        return asyncio.create_task(compute())

    with closing(asyncio.new_event_loop()) as loop:
        assert worker.global_step == DEAD
        slow = loop.run_until_complete(begin())
        chief.restore(state)
        chief.advance_step(DEAD)
        assert worker.global_step == DEAD
        restored.set()
        assert loop.run_until_complete(slow) is False
    assert apply(worker, 1, DEAD)
    assert rows_in(chief.take(1, timeout=0)) == {1}


def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call in a new thread, which has ended."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result(LONG)


def test_a_thread_with_an_ended_threads_number_has_reads_of_its_own(
    chief: Any, worker: Any
) -> None:
    state = save(chief)

    def read() -> tuple[int, list[contextvars.Context]]:
        assert worker.global_step == DEAD
        return threading.get_ident(), [contextvars.copy_context() for _ in range(20)]

    number, (last, *contexts) = in_thread(read)
    chief.restore(state)
    chief.advance_step(DEAD)

    def read_anew(context: contextvars.Context) -> int:
        assert context.run(lambda: worker.global_step) == DEAD
        return threading.get_ident()

    for each in contexts:
        if in_thread(read_anew, each) == number:
            break
    assert not in_thread(last.run, apply, worker, 63, DEAD)
    assert in_thread(each.run, apply, worker, 1, DEAD)


def test_a_threads_contexts_share_its_read_of_the_step(chief: Any, worker: Any) -> None:
    """Tasks of trio are such contexts: one of them may read the step for the others."""
    state = save(chief)
    assert worker.global_step == DEAD
    one, other = (contextvars.copy_context() for _ in range(2))
    chief.restore(state)
    assert not one.run(apply, worker, 63, DEAD)
    chief.advance_step(DEAD)
    assert one.run(lambda: worker.global_step) == DEAD
    assert other.run(apply, worker, 1, DEAD)
    assert apply(worker, 2, DEAD)
    assert apply(worker, 3, shmacc.NEVER_STALE)


def test_a_gradient_that_waits_during_a_restore_is_dropped(chief: Any, worker: Any) -> None:
    state = save(chief)
    with ThreadPoolExecutor() as pool:
        assert apply(chief, 1, DEAD)
        with pytest.raises(shmacc.errors.FailedPreconditionError), chief.round(1):
            waits = pool.submit(apply, worker, 63, DEAD + 1)
            until(lambda: activity(NAME, os.getpid()) == "waits for the end of the round")
            chief.restore(state)
        assert waits.result(LONG) is False
    assert chief.num_accumulated() == 0


def test_a_gradient_that_waits_for_room_during_a_restore_is_dropped() -> None:
    with MAKE["group"](capacity=1, unlink_on_close=True) as chief:
        state = save(chief)
        with closing(shmacc.AccumulatorGroup.attach(NAME)) as worker, ThreadPoolExecutor() as pool:
            assert apply(chief, 1, DEAD)
            waits = pool.submit(apply, worker, 63, worker.global_step)
            until(lambda: activity(NAME, os.getpid()) == "waits for room")
            chief.restore(state)
            assert waits.result(LONG) is False
        assert chief.num_accumulated() == 0


def compute_before(acc: Any, step: int, pipe: Pipe) -> None:
    with acc:
        pipe.turn("attached")
        pipe.say([apply(acc, 63, step), apply(acc, 63, shmacc.NEVER_STALE), acc.global_step])
        pipe.say(apply(acc, 1, acc.global_step))


@every_start_method
def test_a_child_starts_with_the_step_that_its_parent_read(crew: Crew) -> None:
    """The child inherits the handle by fork, or gets it as a pickle."""
    with MAKE["group"](unlink_on_close=True) as chief:
        state = save(chief)
        child = crew.start(compute_before, chief, chief.global_step)
        assert child.hear() == "attached"
        chief.restore(state)
        chief.advance_step(DEAD)
        assert child.turn() == [False, False, DEAD]
        assert child.hear() is True
        child.result()


def count(acc: Any) -> list[bool]:
    with acc:
        return [apply(acc, 1, shmacc.NEVER_STALE) for _ in range(3)]


@every_start_method
def test_a_child_that_never_reads_the_step_loses_one_gradient(crew: Crew) -> None:
    """The child's first gradient may have been computed before the restore, and is dropped."""
    with MAKE["dense"](unlink_on_close=True) as chief, closing(shmacc.attach(NAME)) as parent:
        assert parent.global_step == 0
        chief.restore(chief.state())
        assert crew.start(count, parent).result() == [False, True, True]


def test_a_process_pools_workers_have_the_callers_read_of_the_step() -> None:
    """A pool pickles its arguments in a thread that has not read the step."""
    with MAKE["dense"](unlink_on_close=True) as chief, closing(shmacc.attach(NAME)) as parent:
        state = save(chief)
        step = parent.global_step
        with ThreadPoolExecutor() as another:
            pickled = another.submit(pickle.dumps, parent).result(LONG)
        chief.restore(state)
        with closing(pickle.loads(pickled)) as child:
            assert not apply(child, 63, step)
            assert apply(child, 1, child.global_step)


def test_a_handle_pickled_before_a_restore_must_read_the_step_to_apply(chief: Any) -> None:
    state = save(chief)
    step, pickled = chief.global_step, pickle.dumps(chief)
    chief.restore(state)
    chief.advance_step(DEAD)
    with closing(pickle.loads(pickled)) as unpickled:
        assert not apply(unpickled, 63, step)
        assert unpickled.global_step == DEAD
        assert apply(unpickled, 1, step)


def test_a_handle_pickled_before_a_replacement_applies_nothing() -> None:
    """The new segment's timelines may have the same numbers as the old segment's."""
    with MAKE["dense"]() as first:
        for _ in range(3):
            first.restore(first.state())
        assert first.global_step == 0
        pickled = pickle.dumps(first)
        first.unlink()
    with MAKE["dense"](unlink_on_close=True) as second, closing(pickle.loads(pickled)) as other:
        second.restore(second.state())
        assert not apply(other, 63, 0)


def test_handles_do_not_share_reads_of_the_step() -> None:
    """A new handle does not have the step that a closed handle read in the same thread."""
    with MAKE["dense"](unlink_on_close=True) as chief:
        for _ in range(3):
            with closing(shmacc.ConditionalAccumulator.attach(NAME)) as worker:
                assert worker.global_step == 0
            del worker
        chief.restore(chief.state())
        with closing(shmacc.ConditionalAccumulator.attach(NAME)) as worker:
            assert apply(worker, 1, 0)


def test_a_step_read_in_another_context_counts(chief: Any, worker: Any) -> None:
    state = save(chief)
    step = contextvars.Context().run(lambda: worker.global_step)
    chief.restore(state)
    assert not apply(worker, 63, step)
    assert contextvars.Context().run(lambda: worker.global_step) == BACK
    assert apply(worker, 1, BACK)
    assert not apply(worker, 63, step)


def test_raw_ops_drop_gradients_of_an_old_timeline() -> None:
    ref = raw_ops.ConditionalAccumulator("f8", (64,), shared_name=NAME)
    with ref.accumulator as chief, closing(shmacc.ConditionalAccumulator.attach(NAME)) as worker:
        state = save(chief)
        assert worker.global_step == DEAD
        chief.restore(state)
        given = worker.accumulator_ref, DEAD, identity(63)
        assert not raw_ops.AccumulatorApplyGradient(*given)
        chief.unlink()


def train(pipe: Pipe) -> None:
    """Run a worker whose gradients show from which parameters they were computed."""
    with shmacc.Parameters.attach("p") as params, shmacc.AccumulatorGroup.attach(NAME) as group:
        for step in group.steps(timeout=LONG):
            gradient = {"w": params["w"] + np.array([step, 0])}
            pipe.turn(step)
            pipe.say(group.apply(gradient, step, contributor=0))


def test_each_gradient_of_a_round_was_computed_from_its_parameters(tmp_path: Path) -> None:
    """Each accepted gradient was computed from the parameters that its step began with."""
    path, made = tmp_path / "saved", itertools.count(1)
    with (
        shmacc.Parameters({"w": np.zeros(2)}, "p", optimizer=optim.SGD(1.0)) as params,
        shmacc.AccumulatorGroup(params.member_specs(), NAME) as group,
        Apart(train) as worker,
    ):
        both: dict[str, Any] = {"params": params, "group": group}

        def one_round(step: int) -> None:
            assert worker.hear() == step
            assert worker.turn()
            with group.round(1, timeout=LONG) as taken:
                assert taken["w"].value.tolist() == [step, params["w"][1]]
                params.update(taken, {"w": np.array([0.0, next(made)])})

        for step in range(DEAD):
            if step == BACK:
                shmacc.save(path, both)
            one_round(step)
        for _ in range(3):
            assert worker.hear() == DEAD  # the worker has computed
            shmacc.load(path, both)
            assert not worker.turn()
            for step in range(BACK, DEAD):
                one_round(step)
        assert worker.hear() == DEAD
        group.finish()
        assert not worker.turn()
        worker.result()
        group.unlink()
        params.unlink()
