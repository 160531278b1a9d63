"""Real processes, under every start method, that share nothing but names and pickled handles."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import process_work
from helpers.apart import every_start_method
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
    assert [child.result() for child in children] == [[True] * each] * workers
    # Once by identity: each gradient was in exactly one take. And once by the sums.
    assert (seen[SHARED:] == 1).all()
    expected = np.zeros_like(total)
    for worker in range(workers):
        for number in range(each):
            np.add.at(expected, *gradient(worker, number, each))
    np.testing.assert_array_equal(total, expected)
    stats = sparse.stats()
    assert (stats.applied, stats.dropped) == (workers * each, 0)
    assert sparse.num_accumulated() == 0


def test_workers_follow_the_step(crew: Crew, acc: ConditionalAccumulator) -> None:
    steps = 10
    workers = [crew.start(process_work.follow_steps, "acc", steps, LONG) for _ in range(3)]
    for step in range(steps):
        taken = acc.take(3, timeout=LONG)
        assert (taken.value.item(), taken.count, taken.step) == (3.0, 3, step)
    assert [worker.result() for worker in workers] == [list(range(steps))] * 3
    assert acc.stats().dropped == 0
