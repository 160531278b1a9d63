"""Real processes, under every start method, that share nothing but names and pickled handles."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import process_work
from helpers.apart import Apart, every_start_method
from helpers.process_work import SHARED, WIDTH, gradient
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew

pytestmark = pytest.mark.threads


@pytest.fixture
def sparse() -> Iterator[SparseConditionalAccumulator]:
    """A named sparse accumulator of sums, removed at the end."""
    with SparseConditionalAccumulator(
        np.float32, (None, WIDTH), "sparse", reduction_type="SUM"
    ) as acc:
        yield acc
        acc.unlink()


@every_start_method
def test_pickled_handles_and_names(crew: Crew, acc: ConditionalAccumulator) -> None:
    children = [crew.start(process_work.apply_one, acc, 1.0)]
    children.append(crew.start(process_work.open_and_apply, "acc", 2.0))
    assert [child.result() for child in children] == [True, True]
    # Here the parent makes, the child takes.
    acc.apply_grad(4.0)
    taker = crew.start(process_work.take_one, "acc", 3, LONG)
    assert taker.result() == (7.0, 3, 0)
    assert acc.global_step == 1
    assert crew.start(process_work.apply_one, acc, 1.0, 0).result() is False
    assert acc.stats().dropped == 1


@pytest.mark.parametrize("crew", ["spawn"], indirect=True)
def test_private_handles_pickle_too_and_errors_come_back(
    crew: Crew, acc: ConditionalAccumulator
) -> None:
    with ConditionalAccumulator(np.float32) as private:
        child = crew.start(process_work.apply_one, private, 1.0)
        otherwise = crew.start(process_work.open_otherwise, acc.shared_name)
        assert private.take_grad(1, timeout=LONG).item() == 1.0
        assert child.result()
        # The child is gone, and closed it; it is its creator's.
        assert private.apply_grad(1.0, local_step=1)
    with pytest.raises(errors.InvalidArgumentError):
        otherwise.result()
    assert acc.num_accumulated() == 0


def test_any_other_process_with_the_name_alone(
    sparse: SparseConditionalAccumulator, namespace: str
) -> None:
    """It ends without a close: what it applied stays; its private one goes with it."""
    script = """if True:
        import shmacc, sys
        shmacc.attach("sparse").apply_grad([4], [[1, 2, 3]])
        private = shmacc.ConditionalAccumulator("f4")
        private.apply_grad(1.0)
        print(private.shared_name)
        assert len(shmacc.testing.leaked_names(sys.argv[1])) > 1
    """
    command = [sys.executable, "-P", "-W", "ignore", "-c", script, namespace]
    done = subprocess.run(command, check=True, timeout=LONG, capture_output=True, text=True)
    taken = sparse.take(1, timeout=0)
    assert (taken.indices.tolist(), taken.values.tolist()) == ([4], [[1, 2, 3]])
    until(lambda: sparse.stats().attached == 1)
    with pytest.raises(errors.NotFoundError):
        shmacc.attach(done.stdout.strip())


def test_forked_child_uses_its_parents_handle(sparse: SparseConditionalAccumulator) -> None:
    """Not pickled, not attached again: the very handle, and the parent's threads were using it."""
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            sparse.num_accumulated()

    def apply(number: int) -> None:
        for i in range(20):
            sparse.apply_grad(*gradient(number, i, 20), local_step=0)
        sparse.close()

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        reading = pool.submit(keep_reading)
        children = []
        for number in range(4):
            children.append(stack.enter_context(Apart(apply, number)))
            assert sparse.apply_grad([number], np.zeros((1, WIDTH)))
        for child in children:
            child.result()
        stop.set()
        reading.result()
    taken = sparse.take(84, timeout=0)
    assert taken.count == 84
    check_members(taken.indices, taken.values, 4, 20, [range(20)] * 4)


def check_members(indices: Any, values: Any, workers: int, each: int, members: list[Any]) -> None:
    """Prove twice that these sums are of these gradients: by identity rows, and by adding up."""
    identities = indices[indices >= SHARED] - SHARED
    assert identities.tolist() == [w * each + i for w in range(workers) for i in members[w]]
    assert (values[indices >= SHARED] == 1).all()

    expected = np.zeros((SHARED + workers * each, WIDTH))
    for worker in range(workers):
        for number in members[worker]:
            rows, more = gradient(worker, number, each)
            np.add.at(expected, rows, more)
    got = np.zeros_like(expected)
    got[indices] = values
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("crew", ["fork"], indirect=True)
def test_eight_processes_at_once(crew: Crew, sparse: SparseConditionalAccumulator) -> None:
    """While they apply, takes go on; all takes together are all gradients, each once."""
    workers, each = 8, 25
    apply = process_work.apply_all
    children = [crew.start(apply, "sparse", worker, each) for worker in range(workers)]
    total = np.zeros((SHARED + workers * each, WIDTH), np.float64)
    seen = np.zeros(len(total), dtype=np.int64)
    count = 0
    numbers = np.random.default_rng(0)
    while count < workers * each:
        wanted = int(numbers.integers(1, min(9, workers * each - count + 1)))
        taken = sparse.take(wanted, timeout=LONG)
        assert taken.count >= wanted
        assert (np.diff(taken.indices) > 0).all()
        total[taken.indices] += taken.values
        own = taken.indices[taken.indices >= SHARED]
        assert len(own) == taken.count
        seen[own] += 1
        count += taken.count
    assert [child.result() for child in children] == [list(range(each))] * workers
    # Once by identity: each gradient was in exactly one take.
    assert (seen[SHARED:] == 1).all()
    # And once by the sums.
    check_members(np.arange(len(total)), total, workers, each, [range(each)] * workers)
    stats = sparse.stats()
    assert (stats.applied, stats.dropped) == (workers * each, 0)
    assert sparse.num_accumulated() == 0


def test_accepted_is_taken_and_dropped_is_not(
    crew: Crew, sparse: SparseConditionalAccumulator
) -> None:
    """Workers that follow the step race with the takes: True means in a take, False in none."""
    workers, each = 8, 40
    follow = partial(process_work.apply_all, follow=True)
    children = [crew.start(follow, "sparse", worker, each) for worker in range(workers)]
    total = np.zeros((SHARED + workers * each, WIDTH), np.float64)
    count = takes = 0
    while not all(child.pipe.poll() for child in children):
        try:
            taken = sparse.take(3, timeout=0.02)
        except errors.DeadlineExceededError:
            continue
        total[taken.indices] += taken.values
        count += taken.count
        takes += 1
    accepted = [child.result() for child in children]
    rest = sparse.take_partial(0)
    total[rest.indices] += rest.values
    assert count + rest.count == sum(map(len, accepted))
    assert sparse.global_step == takes
    here = np.flatnonzero(total.any(axis=1) & (np.arange(len(total)) >= SHARED))
    indices = np.concatenate([np.arange(SHARED), here])
    check_members(indices, total[indices], workers, each, accepted)
    assert sparse.stats().dropped == workers * each - sum(map(len, accepted))


def test_workers_follow_the_step(crew: Crew, acc: ConditionalAccumulator) -> None:
    steps = 10
    workers = [crew.start(process_work.follow_steps, "acc", steps, LONG) for _ in range(3)]
    for step in range(steps):
        taken = acc.take(3, timeout=LONG)
        assert (taken.value.item(), taken.count, taken.step) == (3.0, 3, step)
    assert [worker.result() for worker in workers] == [list(range(steps))] * 3
    assert acc.stats().dropped == 0
