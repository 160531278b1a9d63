"""Batches as a function of step and rank, so that a replica that is started again goes on."""

from collections.abc import Iterator, Sized

from shmacc._values import arguments
from shmacc._values.numbers import flag
from shmacc._values.step_sampler import StepSampler as ByStep
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

    They are those of `shmacc.StepSampler`: each epoch is a permutation, divided among the replicas.
    Samples that do not fill a batch for each replica are left out, unless ``drop_last=False``; then
    the last batches are shorter. A loader with worker processes asks for batches in advance, and
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
        drop_last: bool = True,
    ) -> None:
        """Divide a dataset.

        Args:
            dataset: Anything that has a length.
            replica: The replica whose batches these are, by its ``global_step`` and rank.
            batch_size: How many samples a batch has.
            epochs: How many times to go through the dataset; None: until the training ends.
            shuffle: Whether each epoch has a permutation of its own; else the dataset's order.
            seed: The permutations' seed, the same in all replicas.
            drop_last: As for `shmacc.StepSampler`; with False, say ``replica.step(weight=...)``.

        Raises:
            InvalidArgumentError: As for `shmacc.StepSampler`; or `epochs` is negative.
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
