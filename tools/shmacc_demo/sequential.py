"""The same training in one process, without accumulators, for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from shmacc_demo.batches import Sampler
from shmacc_demo.model import Adagrad, Parameters, gradient, mean
from shmacc_demo.plan import Outcome, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_demo.corpus import Corpus
    from shmacc_demo.plan import Plan


class Sequential:
    """A run in this process: all workers' batches of a step, one after the other."""

    def __init__(self, plan: Plan, corpus: Corpus) -> None:
        self._plan = plan
        self._sampler = Sampler(corpus.stream, corpus.counts, plan.recipe)
        self._parameters = Parameters.new(len(corpus.words), plan.width)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave behind."""

    def train(self) -> Iterator[Progress]:
        """Train, step after step."""
        plan, parameters = self._plan, self._parameters
        parameters.fill(plan.seed)
        optimizer = Adagrad(parameters, plan.rate, plan.steps)
        words = 0.0
        for step in range(plan.steps):
            gradients = [
                gradient(parameters, self._sampler.draw(plan.seed, step, worker))
                for worker in range(plan.workers)
            ]
            average = mean(gradients)
            optimizer.follow(average, step)
            words += sum(one.words for one in gradients)
            yield Progress(step=step + 1, loss=average.loss, words=words)

    def outcome(self) -> Outcome:
        """Say what the run came to, when it is over."""
        return Outcome(self._parameters, None)
