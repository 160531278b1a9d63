"""Batches as a function of step and rank, so that a replica continues after a restart."""

from collections.abc import Iterator, Sized

from shmacc._values import arguments
from shmacc._values.numbers import flag
from shmacc._values.step_sampler import StepSampler as ByStep
from shmacc.errors import InvalidArgumentError
from shmacc.torch._replica import Replica


class StepSampler:
    """The batches of a replica; each is a function of the step and the rank.

    So after a restart or the load of a checkpoint, a replica computes the batch of its step. A loop
    over a dataset would begin again::

        loader = DataLoader(dataset, batch_sampler=StepSampler(dataset, replica, 32))
        for inputs, labels in loader:  # until the training or the last epoch has ended
            loss(model(inputs), labels).backward()
            replica.step()

    Batches are the same as in `shmacc.StepSampler`: each epoch is a permutation, divided among the
    replicas. Samples that do not fill a batch for each replica are left out; with
    ``drop_last=False``, the last batches are shorter instead. A loader with worker processes asks
    for batches in advance, and gets batches of the next steps. So set ``num_workers`` to 0, except
    if all of this is true: replicas are synchronous, make one step per batch, and are in every
    round (see ``replicas_to_aggregate``); and the chief loads no checkpoint while they run.
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
        drop_last: bool = True,
    ) -> None:
        """Divide a dataset.

        Args:
            dataset: Anything that has a length.
            replica: The replica whose batches these are, by its ``global_step`` and rank.
            batch_size: How many samples a batch has.
            epochs: How many times to go through the dataset; None: until the training ends.
            shuffle: Whether each epoch has its own permutation; else all have the dataset's order.
            seed: The permutations' seed, the same in all replicas.
            drop_last: As in `shmacc.StepSampler`; with False, pass ``weight`` to ``replica.step``.

        Raises:
            InvalidArgumentError: `shmacc.StepSampler` raises it; or `epochs` is negative.
        """
        if not isinstance(replica, Replica):
            raise InvalidArgumentError(
                f"replica must be a Replica, but was of {type(replica).__name__}"
            )
        replicas, own = replica.total_num_replicas, replica.rank
        self._batches = ByStep(
            len(dataset),
            batch_size,
            replicas,
            own,
            seed if flag(shuffle, "shuffle") else None,
            drop_last,
        )
        self._replica = replica
        self._end: int | None = None  # the first step after the last epoch
        if epochs is not None:
            times = arguments.int64(epochs, "epochs")
            if times < 0:
                raise InvalidArgumentError(f"epochs must not be negative, but was {times}")
            self._end = times * self._batches.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield each batch as a list of sample numbers, starting at the replica's step."""
        seen = self._replica._at  # noqa: SLF001
        step = seen.global_step
        while self._replica.running and (self._end is None or step < self._end):
            yield self.batch(step)
            now = self._replica._at  # noqa: SLF001
            # Go on to the next step if `step` was not called since the last batch (a loader asks in
            # advance), or if it led to one update, which an asynchronous replica need not see. In
            # other cases a checkpoint has set the step, or the batch must be computed again.
            made = {0, 1} if self._replica._asynchronous else {now.made - seen.made} & {0, 1}  # noqa: SLF001
            step = step + 1 if now.global_step - seen.global_step in made else now.global_step
            seen = now

    def __len__(self) -> int:
        """Return how many batches are left, starting at the replica's step.

        Raises:
            TypeError: ``epochs`` is None.
        """
        if self._end is None:
            raise TypeError("A StepSampler without epochs has no length: it ends with the training")
        return max(0, self._end - self._replica.global_step)

    def batch(self, step: int) -> list[int]:
        """Return the numbers of the samples in this replica's batch.

        Args:
            step: The step, from 0.
        """
        numbers: list[int] = self._batches[step].tolist()
        return numbers
