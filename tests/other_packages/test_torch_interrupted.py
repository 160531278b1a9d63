"""An exception at any instruction of a step, a round or a loop: each gradient counts once.

Each gradient has its own row of a table and its own number of a parameter. The chief adds up
what its rounds contain.
"""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from helpers.at_every_point import FOLDER, Points, coming_between
from helpers.support import EVERY_INSTANT, LONG, SHM_DIRECTORY
from other_packages.torch_training import NAME, pair
from torch import nn

from shmacc import errors
from shmacc.optim import SGD
from shmacc.torch import AsyncReplicas, SyncReplicas, TableEmbedding, _run

SIZE: Final = 100
EACH: Final = 1 if EVERY_INSTANT else 13  # one of this many points is tried


def within(points: Points) -> tuple[str]:
    """Choose the code to trace: `shmacc/torch`; for lines at every instant, all of shmacc."""
    everywhere = EVERY_INSTANT and points is Points.LINES
    return (FOLDER if everywhere else f"{FOLDER}torch{os.sep}",)


class AlarmError(Exception):
    """Raised by the handler."""


class Marks(nn.Module):
    def __init__(self, *, table: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.norm = nn.BatchNorm1d(1)
        self.rows = TableEmbedding(1) if table else None

    def leave(self, number: int) -> None:
        """Compute the gradient of one number and one row."""
        loss = self.weight[number] + self.norm(torch.tensor([[1.0], [number]])).sum()
        if self.rows is not None:
            loss = loss + self.rows(torch.tensor([number])).sum()
        loss.backward()


class Ledger:
    """How often the rounds of a training had each gradient."""

    def __init__(self, model: Marks) -> None:
        self.model = model
        self.forget()

    def forget(self) -> None:
        self.found = torch.zeros(SIZE)
        self.rows: dict[int, float] = {}

    def make_rounds(self, replicas: Any) -> None:
        """Make rounds of all that is pending."""
        while replicas._group.num_accumulated():
            with replicas.round(timeout=LONG) as update:
                if self.model.weight.grad is not None:
                    self.found += self.model.weight.grad * update.weight
                if (rows := self.model.rows) is not None and rows.grad is not None:
                    for number, count in zip(
                        update.ids(rows).tolist(), rows.grad[:, 0].tolist(), strict=True
                    ):
                        self.rows[number] = self.rows.get(number, 0) + count * update.weight

    def of(self, number: int) -> float:
        """Return how often a gradient counted."""
        found = round(float(self.found[number]), 3)
        assert self.model.rows is None or round(self.rows.get(number, 0), 3) == found
        return found


def interrupted(call: Callable[[], Any], points: Points, number: int, again: int) -> Any:
    """Return the call's result (None if an exception ended it), and whether an alarm came.

    again: The number of further points after which a second alarm comes; 0: no second alarm.
    """
    came = 0

    def alarm() -> None:
        nonlocal came
        came += 1
        if again and came == 1:
            between._left = again
        raise AlarmError

    with (
        suppress(AlarmError, errors.DeadlineExceededError),
        coming_between(alarm, points, number, within(points)) as between,
    ):
        return call(), came > 0
    return None, came > 0


NEVER: Final = (Points.LINES, 0, 0)
PLANS: Final = {
    "asked again": ("leave", "interrupted"),
    "goes on": ("leave", "interrupted", "leave"),
    "after the update": ("leave", "step", "rounds", "interrupted"),
    "goes on after the update": ("leave", "step", "rounds", "interrupted", "leave"),
}


def follow(plan: str, ledger: Ledger, pair: Any, numbers: Iterator[int], at: Any) -> bool:
    """Follow a plan until a step returns, and check the ledger; return whether an alarm came."""
    replicas, replica = pair
    left: list[int] = []
    answer, came = None, False
    ledger.forget()
    for what in (*PLANS[plan], *["step", "rounds"] * 6):
        if what == "leave":
            left.append(next(numbers))
            replica._model.leave(left[-1])
            answer = None
        elif what == "rounds":
            ledger.make_rounds(replicas)
        elif answer is None:
            when = at if what == "interrupted" else NEVER
            answer, now = interrupted(replica.step, *when)
            came = came or now
    judge(ledger, pair, left, answer, f"{answer} at {at}")
    return came


def judge(ledger: Ledger, pair: Any, left: list[int], answer: bool | None, where: str) -> None:
    replicas, replica = pair
    found = [ledger.of(number) for number in left]
    assert answer is not None, f"replica and chief wait for each other: {where}"
    assert ledger.found.sum() == sum(found), f"another one counted: {where}"
    assert max(found) <= 1, f"counted twice: {where}"
    assert found[-1] == answer, f"not as the step has returned: {found}, {where}"
    if isinstance(replicas, AsyncReplicas) or len(left) == 1:
        assert min(found) == 1, f"lost: {where}"
    if isinstance(replicas, SyncReplicas):
        own: Any = replica._model.norm
        chiefs: Any = replicas._model.norm
        assert torch.equal(own.running_mean, chiefs.running_mean), where
        assert torch.equal(own.num_batches_tracked, chiefs.num_batches_tracked), where


TWICE: Final = (0, 1, 4, 9, 16, 40) if EVERY_INSTANT else (0, 5)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [(SyncReplicas, plan) for plan in PLANS]
    + [(AsyncReplicas, plan) for plan in PLANS if "update" not in plan],
)
def test_an_exception_in_a_step_loses_and_doubles_no_gradient(kind: Any, plan: str) -> None:
    """A second exception may follow soon after the first."""
    model, other = Marks(), Marks()
    ledger, numbers = Ledger(model), itertools.cycle(range(SIZE))
    with pair(model, other, kind, optimizer=SGD(1.0)) as both:
        both[1]._timeout = 0.001
        for points, again in itertools.product((Points.LINES, Points.INSTRUCTIONS), TWICE):
            for number in itertools.count(1 + len(plan) % EACH, EACH):
                if not follow(plan, ledger, both, numbers, (points, number, again)):
                    break
        both[1].close()


def whole_turn(replicas: Any, optimizer: Any) -> None:
    """Do what a chief's loop does in a turn."""
    assert replicas.active
    with replicas.round(timeout=0.001):
        if optimizer is not None:
            optimizer.step()


@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
@pytest.mark.parametrize("of_torch", [False, True], ids=["of shmacc", "of torch"])
def test_an_exception_in_a_round_closes_it_and_loses_nothing(kind: Any, *, of_torch: bool) -> None:
    """No round stays open while the exception exists; afterwards one update has the gradient."""
    model, other = Marks(table=False), Marks(table=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0) if of_torch else None
    with pair(model, other, kind, optimizer=None if of_torch else SGD(1.0)) as (replicas, replica):
        for points in (Points.LINES, Points.INSTRUCTIONS):
            for number in itertools.count(1, EACH):
                mark = number % SIZE
                before = float(model.weight.detach()[mark])
                other.leave(mark)
                with suppress(errors.DeadlineExceededError):
                    replica.step()
                kept: BaseException | None = None
                with coming_between(alarm, points, number, within(points)) as between:
                    try:
                        whole_turn(replicas, optimizer)
                    except AlarmError as error:
                        kept = error
                where = f"at {points}, {number}"
                opened = replicas._group.stats().round_pid is not None
                assert opened == (replicas._turn.state == "open"), where
                suspect = of_torch and _run.half_updated(replicas._run)
                if suspect:  # the block had begun, and the next round says so
                    with pytest.raises(errors.FailedPreconditionError, match="half updated"):
                        replicas.round(timeout=LONG).__enter__()
                    replicas.load_state_dict(replicas.state_dict())
                    replica._follow(replica._group.global_step)  # else its next gradient is dropped
                elif replicas._group.num_accumulated():
                    with suppress(errors.DeadlineExceededError):
                        whole_turn(replicas, optimizer)
                assert suspect or float(model.weight.detach()[mark]) == before - 1, where
                assert replicas._group.num_accumulated() == 0, where
                if isinstance(replicas, SyncReplicas):
                    assert replica.step() or suspect, where
                    saved = replicas.state_dict()["model"]["norm.num_batches_tracked"]
                    assert saved == other.norm.num_batches_tracked, where
                if not between.came:
                    break
                assert kept is not None, where
        replica.close()


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("call", ["made", "closed"])
def test_an_exception_in_a_chiefs_start_or_end_harms_no_training(call: str, namespace: str) -> None:
    """A chief that failed to start ends no later training; an interrupted end can be repeated."""
    for number in itertools.count(1, 1 if EVERY_INSTANT else 101):  # a collection takes long
        first, second = Marks(), Marks()
        maker = SyncReplicas(first, NAME, total_num_replicas=1, optimizer=SGD(1.0))
        made = None
        if call == "closed":
            made = SyncReplicas(second, NAME, total_num_replicas=1, optimizer=SGD(1.0))
        else:
            maker.close()
        points = Points.INSTRUCTIONS
        with suppress(AlarmError), coming_between(alarm, points, number, within(points)) as between:
            if made is not None:
                made.close()
            else:
                made = SyncReplicas(second, NAME, total_num_replicas=1, optimizer=SGD(1.0))
        if call == "closed":
            assert made is not None
            made.close()
            assert not maker._group.running
            maker.close()
            assert not list(Path(SHM_DIRECTORY).glob(f"*{namespace}*")), number
        elif made is None:
            gc.collect()  # at the very last points only the collector closes the chief
            with SyncReplicas(Marks(), NAME, total_num_replicas=1, optimizer=SGD(1.0)) as replicas:
                gc.collect()
                assert replicas._group.running
        else:
            made.close()
        if not between.came:
            break


def alarm() -> None:
    raise AlarmError
