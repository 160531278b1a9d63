"""The soak's books detect each fault that an accumulator is made to have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from helpers.books import Books, Fate, Findings, audit
from helpers.soak_campaigns import apply
from helpers.soak_plans import DenseMember, Gradients, Plan, SparseMember, plans

from shmacc import NEVER_STALE, Stats

WORKER, TAKER = 0, 1
ROUNDS, EACH = 3, 8
_PLACES: Final = Gradients(1).places
PLAN: Final = Plan(
    "a group",
    {
        "rows": SparseMember("float32", 2, "SUM", rows=20, touched=5),
        "array": DenseMember("float32", 10, "SUM", _PLACES),
        "means": DenseMember("float64", 10, "MEAN", _PLACES),
        "means of rows": SparseMember("float64", 3, "MEAN", rows=20, touched=5),
    },
    Gradients(1, 4, contribute=True, weighted=True),
    chief=True,
)


class Sound:
    """A correct accumulator; tests replace one of its methods by a faulty function from below."""

    def __init__(self, plan: Plan) -> None:
        self.acc = plan.create("soak")
        self.applies = self.takes = 0

    @property
    def global_step(self) -> int:
        return int(self.acc.global_step)

    @property
    def faulty(self) -> bool:
        """Return whether this is the apply with the fault."""
        return self.applies == 12

    def apply_grad(self, *gradient: Any, **terms: Any) -> bool:
        return bool(self.acc.apply_grad(*gradient, **terms))

    def apply(self, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
        self.applies += 1
        return bool(self.acc.apply(gradient, step, **terms))

    def wait_step(self, after: int, *, timeout: float) -> None:
        """Return at once: no other process of the test moves the step."""

    def take(self) -> Any:
        self.takes += 1
        return self.acc.take(1, timeout=0)

    def stats(self) -> Stats:
        stats = self.acc.stats()
        assert isinstance(stats, Stats)
        return stats


@pytest.fixture(autouse=True)
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers repeat no apply: the tests put their faults into applies by number."""
    monkeypatch.setattr("helpers.soak_campaigns._ONCE_MORE", 0.0)


def campaign(make: type[Sound], plan: Plan = PLAN) -> Findings:
    """Make ROUNDS rounds of EACH gradients in this process, and audit the books."""
    books, broken = Books(2), make(plan)
    with broken.acc:
        for number in range(ROUNDS * EACH):
            apply(books, plan, broken, WORKER, number)
            if number % EACH == EACH - 1:
                plan.note(books, TAKER, broken.take())
        found = audit(books, broken.stats())
        broken.acc.unlink()
    return found


def test_a_sound_accumulator_has_no_faults() -> None:
    for plan in [PLAN, *plans(1)]:
        found = campaign(Sound, plan)
        assert (found.faults, found.counts["takes and rounds"]) == (0, ROUNDS)
        accepted, refused = "gradients accepted", "gradients refused as stale"
        assert found.counts[accepted] + found.counts[refused] == ROUNDS * EACH
        assert found.counts[accepted] > 0


def tears(self: Sound, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
    """One gradient is not in all of its members."""
    if self.faulty:
        gradient = {name: gradient[name] for name in list(gradient)[1:]}
    return Sound.apply(self, gradient, step, **terms)


def adds_elsewhere(self: Sound, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
    """One gradient is also in a member that it does not touch."""
    if self.applies >= 12 and "array" not in gradient and "means" in gradient:
        (other,) = PLAN.members["array"].part(PLAN.gradients, terms["contributor"])
        gradient = gradient | {"array": other}
    return Sound.apply(self, gradient, step, **terms)


def forgets(self: Sound) -> Any:
    """A row that gradients share is missing from a take's result."""
    taken = Sound.take(self)
    rows = taken["means of rows"]
    rest = {field: getattr(rows, field)[1:] for field in ("indices", "values", "row_counts")}
    taken._members["means of rows"] = replace(rows, **rest)
    return taken


def adds_halves(self: Sound) -> Any:
    """One number in a take's result is not the sum."""
    taken = Sound.take(self)
    taken["rows"].values[3, 1] += 1
    return taken


def loses(self: Sound, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
    """One gradient is accepted, and not added."""
    if self.faulty:
        self.applies += 1
        return True
    return Sound.apply(self, gradient, step, **terms)


def takes_twice(self: Sound) -> Any:
    """A take leaves its gradients in the accumulator."""
    if self.takes == 1:
        self.takes += 1
        taken = self.acc.snapshot()
        self.acc.set_global_step(taken.step + 1)
        return taken
    return Sound.take(self)


def repeats(self: Sound, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
    """A contributor is in the round twice."""
    if self.faulty:
        self.acc.apply(gradient, step, **terms | {"contributor": None})
    return Sound.apply(self, gradient, step, **terms)


def accepts_what_is_stale(self: Sound, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
    """A stale gradient is added to a later round."""
    if self.faulty:
        self.take()
        step = NEVER_STALE
    return Sound.apply(self, gradient, step, **terms)


def refuses_what_it_adds(self: Sound, gradient: dict[str, Any], step: int, **terms: Any) -> bool:
    """A refused gradient is added."""
    return Sound.apply(self, gradient, step, **terms) and self.applies != 12


def forgets_a_contributor(self: Sound) -> Any:
    """The list of contributors lacks one."""
    taken = Sound.take(self)
    taken.contributors = taken.contributors[1:]
    return taken


@pytest.mark.parametrize(("method", "faulty", "fault"), [
    ("apply", tears, "torn"), ("apply", adds_elsewhere, "torn"), ("take", adds_halves, "torn"),
    ("take", forgets, "torn"), ("apply", loses, "lost"), ("take", takes_twice, "doubled"),
    ("apply", repeats, "repeated"), ("apply", accepts_what_is_stale, "misplaced"),
    ("apply", refuses_what_it_adds, "misplaced"), ("take", forgets_a_contributor, "miscounted"),
])  # fmt: skip
def test_the_books_show_each_fault(method: str, faulty: Callable[..., Any], fault: str) -> None:
    assert campaign(type("Faulty", (Sound,), {method: faulty})).counts[fault] > 0


@pytest.mark.parametrize(
    "field", ["applied", "dropped", "discarded", "taken", "takes", "num_accumulated", "global_step"]
)
def test_a_wrong_counter_is_found(field: str) -> None:
    class Miscounts(Sound):
        def stats(self) -> Stats:
            stats = super().stats()
            return replace(stats, **{field: getattr(stats, field) + 1})

    found = campaign(Miscounts)
    assert found.faults == found.counts["miscounted"] > 0


def test_gradients_that_vanish_after_a_round_was_given_up_count_as_lost() -> None:
    """The chief noted the round in its block, but did not consume it."""
    books, acc = Books(2), PLAN.create("soak")
    with acc:
        for number in range(EACH):
            apply(books, PLAN, acc, WORKER, number)
        for _ in range(2):
            PLAN.note(books, TAKER, acc.snapshot())
        assert np.count_nonzero(books.fate == Fate.ACCEPTED) == EACH
        acc.take_partial(0)
        apply(books, PLAN, acc, WORKER, EACH)
        PLAN.note(books, TAKER, acc.take(1, timeout=0))
        found = audit(books, acc.stats())
        acc.unlink()
    counts = found.counts
    assert (counts["lost"], counts["doubled"], counts["torn"]) == (EACH, 0, 0)
