"""The work of chief and workers. `shmacc.run` starts them, and restarts those that are killed."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np

import shmacc
from shmacc import AccumulatorGroup, Parameters, SharedArrays, TensorSpec, optim
from shmacc_demo.model import SQUARES, TABLES, Arrays, Batches, Plan, start

CHIEF = -1
Show = Callable[[Plan, int, Arrays, str], None]

_TIMEOUT = 60.0  # seconds
_KILLS = 4  # of a process, at most
_LONGEST = 5e-4  # seconds until a kill, at most: it comes within the call, or right after it


def work(rank: int, plan: Plan, victims: Collection[int]) -> None:
    """Act as a worker. The replacement of a killed worker applies the same gradient again."""
    with (
        SharedArrays.attach("books", timeout=_TIMEOUT, writable=True) as books,
        Parameters.attach("params", timeout=_TIMEOUT) as params,
        AccumulatorGroup.attach("group", timeout=_TIMEOUT) as group,
    ):
        batches = Batches(books, plan)
        for step in group.steps():
            if step == plan.steps:
                break
            gradient = batches.gradient(params, step, rank)
            with _perhaps_killed(rank, books, step, victims):
                books["given"][step, rank] = group.apply(gradient, step, contributor=rank)
        books["left"][rank] = True


def lead(text: Arrays, show: Show, plan: Plan, victims: Collection[int]) -> tuple[Arrays, str]:
    """Act as the chief, or as a killed chief's replacement; return the tables, and a report."""
    tables = start(len(text["counts"]), plan) | {"figures": np.zeros((plan.steps, 2))}
    adagrad = dict.fromkeys(TABLES, optim.Adagrad(plan.rate, SQUARES))
    figures = {"figures": TensorSpec((2,), "float64", reduction_type="SUM")}  # summed over workers
    flags = TensorSpec((plan.steps, plan.workers), "int8")
    kept = {
        "begun": TensorSpec((plan.steps,), "int64"),  # how often a round was handed out
        "given": flags,  # which gradients were accepted, as far as their workers know ...
        "taken": flags,  # ... and which the chief took
        "left": TensorSpec((plan.workers,), "int8"),
        "killed": TensorSpec((plan.workers + 1,), "int64"),  # how often; the last is the chief
    }
    with (
        SharedArrays({**kept, **text}, "books") as books,
        Parameters(tables, "params", optimizer=adagrad) as params,
        AccumulatorGroup(
            params.member_specs(TABLES) | figures, "group", reduction_type="CMEAN"
        ) as group,
    ):
        while (step := group.global_step) < plan.steps:
            with group.round(plan.workers - plan.backup) as taken:
                books["begun"][step] += 1
                books["taken"][step, taken.contributors] = True
                part: Any = taken["figures"]
                values = {"figures": ([step], part.value[None])}
                with _perhaps_killed(CHIEF, books, step, victims):
                    params.update(taken, values, learning_rate=plan.rate_at(step))
            show(plan, params.step, params, f"{books['killed'].sum()} killed")
        while not books["left"].all():
            time.sleep(0.01)
        return params.snapshot()[1], _report(plan, group, books)


@contextlib.contextmanager
def _perhaps_killed(
    rank: int, books: SharedArrays, step: int, victims: Collection[int]
) -> Iterator[None]:
    """Now and then, kill this process within the block, or right after the block."""
    killed, steps = books["killed"], len(books["begun"])
    due = rank in victims and killed[rank] < step * min(_KILLS, steps // 4) // steps
    if due:
        killed[rank] += 1
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, _LONGEST))  # SIGALRM kills
    yield
    if due:
        signal.pause()


def _report(plan: Plan, group: AccumulatorGroup, books: SharedArrays) -> str:
    """Check that no gradient is lost or taken twice; return the numbers."""
    stats, taken, killed = group.stats(), books["taken"], books["killed"].sum()
    report = (
        f"{stats.applied:,} gradients accepted, {stats.dropped:,} dropped, {stats.taken:,} taken; "
        f"{killed} processes killed, {stats.recoveries} operations undone, "
        f"{(books['begun'] > 1).sum()} rounds handed out again"
    )
    unknown = taken - books["given"]  # a killed worker may not have noted its last one
    right = stats.applied == stats.taken == taken.sum() and (plan.backup or taken.all())
    if not right or unknown.min() < 0 or unknown.sum() > killed:
        raise RuntimeError(f"The books do not balance: {report}")
    return report


def train(
    plan: Plan, text: Arrays, show: Show, victims: Collection[int] = ()
) -> tuple[Arrays, str]:
    """Train in several processes; the victims among them are killed now and then."""
    found: tuple[Arrays, str] = shmacc.run(
        partial(lead, text, show), work, workers=plan.workers, args=(plan, victims), restarts=_KILLS
    )
    return found


def train_alone(plan: Plan, text: Arrays, show: Show) -> Arrays:
    """Do the work of all workers and the chief in this process, with NumPy alone."""
    batches, figures = Batches(text, plan), np.zeros((plan.steps, 2))
    tables = start(len(text["counts"]), plan)
    squares = {table: np.full_like(values, SQUARES) for table, values in tables.items()}
    for step in range(plan.steps):
        sums = {table: np.zeros_like(values) for table, values in tables.items()}
        for rank in range(plan.workers):
            gradient = batches.gradient(tables, step, rank)
            figures[step] += gradient["figures"]
            for table, total in sums.items():
                np.add.at(total, *gradient[table])
        for table, total in sums.items():
            slope = total / plan.workers
            squares[table] += slope**2
            tables[table] -= plan.rate_at(step) * slope / np.sqrt(squares[table])
        show(plan, step + 1, {"figures": figures}, "in one process")
    return {**tables, "figures": figures}
