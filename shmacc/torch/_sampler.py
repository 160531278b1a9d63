"""Batches as a function of step and rank, so that a replica that is started again goes on."""

from collections.abc import Iterator, Sized

import torch

from shmacc._values import arguments
from shmacc.errors import InvalidArgumentError
from shmacc.torch._replica import Replica


class StepSampler:
    """The batches of a replica; each is a function of the step and the rank.

    So a replica that is started again, or follows a checkpoint, computes the batch that its step
    needs, where a loop over a dataset would begin again::

        loader = DataLoader(dataset, batch_sampler=StepSampler(dataset, replica, 32))
        for inputs, labels in loader:  # until the training or the last epoch has ended
            loss(model(inputs), labels).backward()
            replica.step()

    All replicas' batches together are an epoch's permutation; samples that do not fill a batch for
    each replica are left out. A loader with worker processes asks for batches in advance, and
    gets those of the next steps. So ``num_workers`` must be 0 unless replicas are synchronous, make
    one step per batch, and are in every round (see ``replicas_to_aggregate``), and the chief loads
    no checkpoint while they run.
    """

    def __init__(
        self,
        dataset: Sized,
        replica: Replica,
        batch_size: int,
        *,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """Divide a dataset.

        Args:
            dataset: Anything that has a length.
            replica: The replica whose batches these are, by its ``global_step`` and rank.
            batch_size: How many samples a batch has.
            epochs: How many times to go through the dataset; None: until the training ends.
            shuffle: Whether each epoch has a permutation of its own; else the dataset's order.
            seed: The permutations' seed, the same in all replicas.

        Raises:
            InvalidArgumentError: The dataset has less than a batch for each replica.
        """
        self._size = len(dataset)
        self._replica = replica
        self._batch = arguments.int64(batch_size, "batch_size")
        at_once = self._batch * replica.total_num_replicas
        if self._batch < 1:
            raise InvalidArgumentError(f"batch_size must be positive, but was {batch_size}")
        if at_once > self._size:
            raise InvalidArgumentError(
                f"The dataset must have a batch for each replica ({replica.total_num_replicas} of "
                f"batch_size {batch_size}), but has {self._size} samples"
            )
        self._steps = self._size // at_once  # in an epoch
        self._epochs = None if epochs is None else arguments.int64(epochs, "epochs")
        self._shuffle, self._seed = shuffle, seed
        self._order: tuple[int, list[int]] = -1, []  # the last epoch, and its order

    def __iter__(self) -> Iterator[list[int]]:
        """Yield each batch as a list of sample numbers, starting at the replica's step."""
        seen = self._replica._at  # noqa: SLF001
        step = seen.global_step
        while self._replica.running and (self._epochs is None or step < self._epochs * self._steps):
            yield self.batch(step)
            now = self._replica._at  # noqa: SLF001
            # The next step, if a batch is asked for in advance (`step` was not called since), or if
            # `step` led to one update; an asynchronous replica need not see this. Otherwise a
            # checkpoint has set the step, or the batch must be computed again.
            made = {0, 1} if self._replica._asynchronous else {now.made - seen.made} & {0, 1}  # noqa: SLF001
            step = step + 1 if now.global_step - seen.global_step in made else now.global_step
            seen = now

    def __len__(self) -> int:
        """Return how many batches are left, starting at the replica's step.

        Raises:
            TypeError: ``epochs`` is None.
        """
        if self._epochs is None:
            raise TypeError("A StepSampler without epochs has no length: it ends with the training")
        return max(0, self._epochs * self._steps - self._replica.global_step)

    def batch(self, step: int) -> list[int]:
        """Return the numbers of the samples in this replica's batch.

        Args:
            step: The step, from 0.
        """
        epoch, number = divmod(step, self._steps)
        if self._order[0] != epoch:
            self._order = epoch, self._order_of(epoch)
        begin = (number * self._replica.total_num_replicas + self._replica.rank) * self._batch
        return self._order[1][begin : begin + self._batch]

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        random = torch.Generator("cpu").manual_seed(self._seed + epoch)
        return list(torch.randperm(self._size, generator=random, device="cpu").tolist())
