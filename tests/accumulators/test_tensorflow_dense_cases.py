"""What TensorFlow's own tests of ConditionalAccumulator check, restated case by case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors


def test_constructor() -> None:
    with ConditionalAccumulator("float32", name="Q") as acc:
        assert acc.dtype == np.float32
        assert acc.shape is None
        assert acc.name == "Q"
        assert acc.reduction_type == "MEAN"


def test_constructor_with_shape() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1, 5, 2, 8]) as acc:
        assert acc.shape == (1, 5, 2, 8)
        assert acc.reduction_type == "MEAN"


def test_constructor_with_invalid_argument() -> None:
    with pytest.raises(ValueError, match="Invalid"):
        ConditionalAccumulator(np.float32, name="Q", reduction_type="Invalid")


def test_size_empty() -> None:
    with ConditionalAccumulator(np.float32, name="Q") as acc:
        assert acc.num_accumulated() == 0


def test_set_global_step() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        acc.set_global_step(1)
        assert acc.global_step == 1


def test_apply_grad_float32() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        assert acc.apply_grad((10.0,)) is True
        assert acc.num_accumulated() == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(dtype: str) -> None:
    with ConditionalAccumulator(dtype, shape=[1]) as acc:
        for grad in range(10):
            acc.apply_grad((float(grad),))
        mean = acc.take_grad(1)
    assert mean.dtype == dtype
    assert mean.tolist() == [4.5]


def test_multiple_accumulators() -> None:
    kinds = ["float32", "float32", "float16", "float16"]
    accs = [ConditionalAccumulator(dtype, name="Q") for dtype in kinds]
    for value, acc in enumerate(accs, start=10):
        acc.apply_grad((float(value),))
    assert [acc.take_grad(1).tolist() for acc in accs] == [[10.0], [11.0], [12.0], [13.0]]
    for acc in accs:
        acc.close()


def test_apply_and_take_grad_with_shape() -> None:
    grads = [np.array([[1, 2], [3, 4], [5, 6]]), np.array([[8, 6], [4, 2], [0, -2]])]
    with ConditionalAccumulator(np.float32, name="Q", shape=(3, 2)) as acc:
        for grad in grads:
            acc.apply_grad(grad)
        mean = acc.take_grad(1)
    assert mean.tolist() == [[4.5, 4.0], [3.5, 3.0], [2.5, 2.0]]


@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_apply_grad_with_wrong_shape(shape: tuple[int, ...]) -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=(3, 2)) as acc:
        with pytest.raises(ValueError, match="expected"):
            acc.apply_grad(np.ones(shape))
        assert acc.num_accumulated() == 0


def test_dynamic_shape() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=None) as acc:
        acc.apply_grad([[0.0, 1.0], [2.0, 3.0]])
        acc.apply_grad([[4.0, 5.0], [6.0, 7.0]])
        assert acc.take_grad(1).tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
def test_wrong_dynamic_shape(shape: tuple[int, ...]) -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=None) as acc:
        acc.apply_grad(np.ones((3, 2)))
        with pytest.raises(errors.InvalidArgumentError):
            acc.apply_grad(np.ones(shape))
        assert acc.take_grad(1).tolist() == [[1.0, 1.0]] * 3


def test_size_after_apply_grad() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        counts = [acc.num_accumulated()]
        for _ in range(2):
            acc.apply_grad((10.0,))
            counts.append(acc.num_accumulated())
    assert counts == [0, 1, 2]


def test_size_after_apply_grad_and_take_grad() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        for _ in range(2):
            acc.apply_grad((10.0,))
        acc.take_grad(2)
        assert acc.num_accumulated() == 0
        for count in range(1, 5):
            acc.apply_grad((10.0,), local_step=1)
            assert acc.num_accumulated() == count
        # All four go, not only the two that were asked for.
        acc.take_grad(2)
        assert acc.num_accumulated() == 0


@pytest.mark.parametrize(("reduction", "result"), [("MEAN", 15.0), ("SUM", 30.0)])
def test_take_grad(reduction: str, result: float) -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1], reduction_type=reduction) as acc:
        for round_ in range(2):
            acc.apply_grad((10.0,), local_step=round_)
            acc.apply_grad((20.0,), local_step=round_)
            # The number may be a NumPy integer, as it was a tensor there.
            number: Any = np.int32(2) if round_ else 2
            assert acc.take_grad(number).tolist() == [result]


def test_take_grad_invalid_reduction_type() -> None:
    with pytest.raises(ValueError, match="Invalid"):
        ConditionalAccumulator(np.float32, name="Q", shape=[1], reduction_type="Invalid")


def test_invalid_take_grad() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        acc.apply_grad((10.0,))
        acc.apply_grad((20.0,))
        with pytest.raises(errors.InvalidArgumentError):
            acc.take_grad(-1)
        assert acc.num_accumulated() == 2


@pytest.mark.parametrize(("reduction", "results"), [("MEAN", [15.0, 25.0]), ("SUM", [30.0, 50.0])])
def test_repeated_take_grad(reduction: str, results: list[float]) -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1], reduction_type=reduction) as acc:
        acc.apply_grad((10.0,))
        acc.apply_grad((20.0,))
        first = acc.take_grad(2)
        acc.apply_grad((20.0,), local_step=1)
        acc.apply_grad((30.0,), local_step=1)
        second = acc.take_grad(2)
    assert [first.item(), second.item()] == results


def test_increment_global_step() -> None:
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        step: Any = np.zeros((), dtype=np.int64)
        for expected in (1, 2, 3):
            step += 1
            acc.set_global_step(step)
            assert acc.global_step == expected


def test_set_global_step_prevents_accumulation() -> None:
    steps = range(1000, 1005)
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        for current in steps:
            acc.set_global_step(current)
            accepted = [acc.apply_grad((float(s),), local_step=s) for s in steps]
            assert accepted == [s >= current for s in steps]
            mean = acc.take_grad(1)
            assert mean.item() == np.mean([s for s in steps if s >= current])


def test_parallel_apply_grad() -> None:
    grads = [10.0 * i for i in range(1, 11)]
    with ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc:
        with ThreadPoolExecutor(10) as pool:
            assert all(pool.map(lambda grad: acc.apply_grad((grad,)), grads))
        assert acc.take_grad(1).tolist() == [55.0]


def test_parallel_take_grad() -> None:
    grads = [float(e) for e in range(10)]
    with (
        ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc,
        ThreadPoolExecutor(10) as pool,
    ):
        takes = [pool.submit(acc.take_grad, 1, timeout=LONG) for _ in grads]
        until(lambda: acc.stats().waiting == 10)
        # One right after the other: each waiting take must get exactly one of them all the same.
        for step, grad in enumerate(grads):
            assert acc.apply_grad((grad,), local_step=step)
        assert {take.result().item() for take in takes} == set(grads)


def test_apply_and_blocking_take() -> None:
    with (
        ConditionalAccumulator(np.float32, name="Q", shape=[1]) as acc,
        ThreadPoolExecutor(1) as pool,
    ):
        take = pool.submit(acc.take_grad, 3, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        for grad in (10.0, 20.0):
            acc.apply_grad((grad,))
        assert not take.done()
        assert acc.num_accumulated() == 2
        acc.apply_grad((30.0,))
        assert take.result().tolist() == [20.0]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancel(how: str) -> None:
    acc: Any = ConditionalAccumulator(np.float32, name="Q", shape=[1])
    with acc, ThreadPoolExecutor(1) as pool:
        take = pool.submit(acc.take_grad, 1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        getattr(acc, how)()
        with pytest.raises(errors.CancelledError, match="was cancelled"):
            take.result()


def test_default_local_step_is_stale_in_the_second_round() -> None:
    """The commonest trap of the original, kept, but the False tells."""
    with shmacc.ConditionalAccumulator(np.float32) as acc:
        assert acc.apply_grad(1.0) is True
        acc.take_grad(1)
        assert acc.apply_grad(1.0) is False
        assert acc.num_accumulated() == 0
