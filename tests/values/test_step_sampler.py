"""`StepSampler`: each epoch is a permutation, divided among the workers."""

import copy
import itertools
import pickle
from typing import Any, Final

import numpy as np
import pytest

from shmacc import StepSampler, errors

SIZES: Final = [
    case
    for case in itertools.product((1, 2, 7, 10, 23), (1, 2, 3, 8), (1, 2, 3))
    if case[0] >= case[2]
]


def epoch_of(samplers: list[StepSampler], epoch: int) -> list[list[list[int]]]:
    """Return the batches of each step, by rank."""
    steps = samplers[0].steps_per_epoch
    return [[each[epoch * steps + step].tolist() for each in samplers] for step in range(steps)]


def flat(epoch: list[list[list[int]]]) -> list[int]:
    return [sample for step in epoch for batch in step for sample in batch]


@pytest.mark.parametrize(("length", "batch", "replicas"), SIZES)
def test_without_drop_last_an_epoch_has_all_samples(length: int, batch: int, replicas: int) -> None:
    if batch == 1 and length % replicas:
        with pytest.raises(errors.InvalidArgumentError, match="larger batch_size, or drop_last"):
            StepSampler(length, batch, replicas, 0, drop_last=False)
        return
    samplers = [
        StepSampler(length, batch, replicas, rank, 5, drop_last=False) for rank in range(replicas)
    ]
    for number in range(3):
        epoch = epoch_of(samplers, number)
        assert len(epoch) == -(-length // (batch * replicas))
        assert sorted(flat(epoch)) == list(range(length))
        sizes = [len(one) for step in epoch for one in step]
        assert 1 <= min(sizes) <= max(sizes) <= batch
        # At most the last two steps are short: the last may get samples from the one before it.
        assert all(size == batch for size in sizes[: -2 * replicas])


@pytest.mark.parametrize(("length", "batch", "replicas"), SIZES)
def test_with_drop_last_batches_are_full_and_no_sample_is_there_twice(
    length: int, batch: int, replicas: int
) -> None:
    if length < batch * replicas:
        with pytest.raises(errors.InvalidArgumentError, match="samples at least"):
            StepSampler(length, batch, replicas, 0)
        return
    samplers = [StepSampler(length, batch, replicas, rank) for rank in range(replicas)]
    epochs = [epoch_of(samplers, number) for number in range(40)]
    for epoch in epochs:
        assert {len(one) for step in epoch for one in step} == {batch}
        assert len(set(flat(epoch))) == length // (batch * replicas) * batch * replicas
    if length > 2:
        assert set().union(*map(flat, epochs)) == set(range(length))  # each sample is in some epoch
        assert len({tuple(flat(epoch)) for epoch in epochs}) > 1


def test_a_batch_is_a_function_of_arguments_and_step() -> None:
    sampler = StepSampler(100, 7, 3, 1, seed=4)
    steps = [50, 3, 3, 0, 1_000_000, 50]
    batches = [sampler[step] for step in steps]
    for other in (
        StepSampler(100, 7, 3, 1, 4),
        copy.deepcopy(sampler),
        pickle.loads(pickle.dumps(sampler)),
    ):
        for step, batch in zip(reversed(steps), reversed(batches), strict=True):
            np.testing.assert_array_equal(other[step], batch)
            other[step][:] = -1  # the caller may change a batch
    assert batches[0].dtype == np.int64
    assert StepSampler(100, 7, 3, 1, seed=5)[0].tolist() != batches[3].tolist()
    assert "100, 7, 3, 1" in repr(sampler)


def test_without_a_seed_samples_keep_their_order() -> None:
    samplers = [StepSampler(9, 2, 2, rank, None, drop_last=False) for rank in range(2)]
    assert epoch_of(samplers, 3) == [[[0, 1], [2, 3]], [[4, 5], [6]], [[7], [8]]]


BAD: Final[list[tuple[tuple[Any, ...], str]]] = [
    ((10, 2, 3, 3), "rank must be 0 to 2, but was 3"),
    ((10, 2, 3, -1), "rank must be 0 to 2, but was -1"),
    ((10, 0, 3, 0), "batch_size must be positive, but was 0"),
    ((10, 2, 0, 0), "replicas must be positive, but was 0"),
    ((5, 2, 3, 0), "must be 6 samples at least, batch_size for each of 3 replicas"),
    ((2, 2, 3, 0, 0, False), "must be 3 samples at least, one for each of 3 replicas"),
    ((0, 2, 3, 0), "must be 6 samples at least"),
    ((10, 2, 3, 0, -1), "seed must not be negative"),
    ((10.0, 2, 3, 0), "length"),
    ((10, True, 3, 0), "batch_size"),
    ((10, 2, "3", 0), "replicas"),
    ((10, 2, 3, 0, 0, None), "drop_last must be True or False, but was None"),
]


@pytest.mark.parametrize(("arguments", "why"), BAD)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=why):
        StepSampler(*arguments)


def test_bad_steps_are_refused() -> None:
    sampler: Any = StepSampler(10, 2, 2, 0)
    with pytest.raises(errors.InvalidArgumentError, match="step must not be negative, but was -1"):
        sampler[-1]
    with pytest.raises(errors.InvalidArgumentError, match="step"):
        sampler[1.0]
    with pytest.raises(TypeError, match="not iterable"):
        iter(sampler)
