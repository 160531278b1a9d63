"""Batches as a function of step and rank, so that a worker that is started again goes on."""

import numpy as np

from shmacc._base.array_types import IndexArray
from shmacc._values import arguments
from shmacc._values.numbers import flag
from shmacc.errors import InvalidArgumentError


class StepSampler:
    """The batches of a worker: ``sampler[step]`` are the numbers of the samples in a step's batch.

    A batch is a function of the arguments and the step alone. So a step's batch is always the same,
    also after a restart of the worker, or after the load of a checkpoint::

        sampler = shmacc.StepSampler(len(samples), 32, workers, rank)
        for step in group.steps(timeout=60):
            batch = sampler[step]
            group.apply(gradient(samples[batch]), step, contributor=rank, weight=len(batch))

    Each epoch, of `steps_per_epoch` steps, has a permutation of its own, which is divided among the
    workers: no sample is twice in it.

    Attributes:
        steps_per_epoch: How many steps an epoch has.
    """

    __slots__ = ("_arguments", "_order", "_seed", "steps_per_epoch")

    def __init__(
        self,
        length: int,
        batch_size: int,
        replicas: int,
        rank: int,
        seed: int | None = 0,
        drop_last: bool = True,
    ) -> None:
        """Divide samples.

        Args:
            length: How many samples there are.
            batch_size: How many samples a batch has.
            replicas: How many workers there are.
            rank: The number of this worker, from 0.
            seed: The seed of the permutations, 0 or more, the same in all workers; None: each epoch
                has the samples in their order.
            drop_last: Whether an epoch leaves out the samples that do not fill a batch for each
                worker; each epoch leaves out other samples. False: the last step of an epoch has
                them, in shorter batches, so that each epoch has all samples.

        Raises:
            InvalidArgumentError: A bad argument; or there are too few samples for a full batch for
                each worker (without `drop_last`: for one sample for each worker).
        """
        size, batch, workers, own = (
            arguments.int64(value, what)
            for value, what in (
                (length, "length"),
                (batch_size, "batch_size"),
                (replicas, "replicas"),
                (rank, "rank"),
            )
        )
        for value, what in ((batch, "batch_size"), (workers, "replicas")):
            if value < 1:
                raise InvalidArgumentError(f"{what} must be positive, but was {value}")
        if not 0 <= own < workers:
            raise InvalidArgumentError(f"rank must be 0 to {workers - 1}, but was {own}")
        self._seed = None if seed is None else arguments.int64(seed, "seed")
        if self._seed is not None and self._seed < 0:
            raise InvalidArgumentError(f"seed must not be negative, but was {seed}")
        drop_last = flag(drop_last, "drop_last")
        at_once = batch * workers
        least = at_once if drop_last else workers
        if size < least:
            raise InvalidArgumentError(
                f"There must be {least} samples at least, {'batch_size' if drop_last else 'one'} "
                f"for each of {workers} replicas, but there are {size}"
            )
        if not drop_last and batch == 1 and size % workers:
            raise InvalidArgumentError(
                f"{size} samples in batches of 1 leave {size % workers} for the last step of an "
                f"epoch, but there are {workers} replicas: take a larger batch_size, or drop_last"
            )
        self.steps_per_epoch: int = size // at_once if drop_last else -(-size // at_once)
        self._arguments = size, batch, workers, own
        self._order: tuple[int, IndexArray] = -1, np.empty(0, np.int64)  # the last epoch's

    __iter__ = None  # else Python would iterate from step 0 on, without an end

    def __getitem__(self, step: int) -> IndexArray:
        """Return the numbers of the samples in this worker's batch.

        Args:
            step: The step, from 0.

        Returns:
            int64, shape ``(n,)``: all different. ``n`` is the batch size. Without `drop_last`, it
            may be less, but never 0, in the last two steps of an epoch.

        Raises:
            InvalidArgumentError: The step is no integer, or negative.
        """
        number = arguments.int64(step, "step")
        if number < 0:
            raise InvalidArgumentError(f"step must not be negative, but was {step}")
        size, batch, workers, own = self._arguments
        epoch, number = divmod(number, self.steps_per_epoch)
        # The last step gets at least one sample for each worker, if need be from the step before.
        ends = [min((number + more) * batch * workers, size) for more in (0, 1)]
        last = max(0, size - workers)
        begin = min(ends[0], last)
        end = min(ends[1], last) if number + 1 == self.steps_per_epoch - 1 else ends[1]
        order = self._epoch(epoch)[begin:end]
        return np.array_split(order, workers)[own].copy()

    def _epoch(self, epoch: int) -> IndexArray:
        known, order = self._order
        if known != epoch:
            order = np.arange(self._arguments[0], dtype=np.int64)
            if self._seed is not None:
                np.random.default_rng((self._seed, epoch)).shuffle(order)
            self._order = epoch, order
        return order

    def __repr__(self) -> str:
        size, batch, workers, own = self._arguments
        return (
            f"StepSampler({size}, {batch}, {workers}, {own}, seed={self._seed}, "
            f"{self.steps_per_epoch} steps an epoch)"
        )
