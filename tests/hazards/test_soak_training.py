"""The soak's training detects each fault that a run is made to have."""

from collections.abc import Callable
from typing import Any, Final

import pytest
from helpers.books import Findings
from helpers.soak_training import Training, gradient, update

from shmacc import AccumulatorGroup, Parameters

WORKERS: Final = 3
ROUNDS: Final = 30
WRONG: Final = 17  # the faulty round; rounds 12 and 25 are skipped


class Sound:
    """A run in one process; subclasses make it faulty."""

    def __init__(self) -> None:
        """Make the segments that a campaign makes."""
        self.training = Training(WORKERS)
        self.group = AccumulatorGroup.attach("soak")
        self.params = Parameters.attach("soak.parameters")

    def run(self) -> Findings:
        """Make rounds, and audit them as a campaign does."""
        with self.group, self.params:
            for step in range(ROUNDS):
                for worker in range(WORKERS):
                    self.apply(worker, step)
                with self.group.round(1) as taken:
                    self.update(taken)
        return self.training.audit()

    def apply(self, worker: int, step: int) -> None:
        """Apply a worker's gradient."""
        self.group.apply(gradient(worker, step, self.params), step)

    def update(self, taken: Any) -> None:
        """Update, or skip."""
        update(self.params, taken)


def test_a_sound_run_has_no_faults() -> None:
    found = Sound().run()
    assert (found.faults, found.counts["rounds in trained parameters"]) == (0, ROUNDS)


class Loses(Sound):
    """A gradient is not in its round."""

    def apply(self, worker: int, step: int) -> None:
        if (worker, step) != (1, WRONG):
            super().apply(worker, step)


class Doubles(Sound):
    """A gradient is in its round twice."""

    def apply(self, worker: int, step: int) -> None:
        super().apply(worker, step)
        if (worker, step) == (1, WRONG):
            super().apply(worker, step)


class UpdatesTwice(Sound):
    """A round is in the parameters twice."""

    def apply(self, worker: int, step: int) -> None:
        for _ in range(1 + (step == WRONG)):
            super().apply(worker, step)


class SkipsOne(Sound):
    """A round is not in the parameters."""

    def update(self, taken: Any) -> None:
        if taken.step == WRONG:
            self.params.skip(taken)
        else:
            super().update(taken)


class ReadsEarly(Sound):
    """A gradient is computed from older parameters."""

    def apply(self, worker: int, step: int) -> None:
        if step == WRONG and worker == 0:
            self.params.restore(self.before)
            old = {name: array.copy() for name, array in self.params.items()}
            self.params.restore(self.now)
            self.group.apply(gradient(worker, step, old), step)
        else:
            super().apply(worker, step)

    def update(self, taken: Any) -> None:
        self.before = self.params.state()
        super().update(taken)
        self.now = self.params.state()


class WritesHalf(Sound):
    """One element is not what it should be."""

    def update(self, taken: Any) -> None:
        super().update(taken)
        if taken.step == WRONG:
            state = self.params.state()
            number = list(self.params).index("dense")
            state[f"{number}.array"][5] += 1e-9
            self.params.restore(state)


@pytest.mark.parametrize(("make", "fault"), [
    (Loses, "lost"), (Doubles, "doubled"), (UpdatesTwice, "updated twice"),
    (SkipsOne, "not updated"), (ReadsEarly, "torn"), (WritesHalf, "torn"),
])  # fmt: skip
def test_the_audit_shows_each_fault(make: Callable[[], Sound], fault: str) -> None:
    found = make().run()
    assert found.counts[fault] > 0
    of_rounds = {"lost", "doubled", "updated twice", "not updated"} - {fault}
    assert not any(found.counts[other] for other in of_rounds)
