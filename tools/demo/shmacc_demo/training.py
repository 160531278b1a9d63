"""The training: what workers and chief do; and the parent, which starts them and kills some."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from shmacc import AccumulatorGroup, Parameters, SharedArrays, TensorSpec, inspection, optim
from shmacc_demo.model import SQUARES, TABLES, Arrays, Batches, Plan, start

CHIEF = -1
Show = Callable[[Plan, int, Arrays, str], None]


def work(
    group: AccumulatorGroup, params: Parameters, books: SharedArrays, plan: Plan, rank: int
) -> None:
    """Act as a worker. The replacement of a killed worker gives the same gradient again."""
    batches = Batches(books, plan)
    for step in group.steps():
        if step == plan.steps:
            break  # the chief is about to finish
        gradient = batches.gradient(params, step, rank)
        books["given"][step, rank] = group.apply(gradient, step, contributor=rank)


def lead(group: AccumulatorGroup, params: Parameters, books: SharedArrays, plan: Plan) -> None:
    """Act as the chief, or as the replacement of a killed chief."""
    while (step := group.global_step) < plan.steps:
        with group.round(plan.workers - plan.backup) as taken:
            books["begun"][step] += 1
            books["taken"][step, taken.contributors] = True
            part: Any = taken["figures"]
            figures = {"figures": ([step], part.value[None])}
            params.update(taken, figures, learning_rate=plan.rate_at(step))
    group.finish()


def train(plan: Plan, text: Arrays, show: Show, victims: Sequence[int] = ()) -> tuple[Arrays, str]:
    """Train in processes; kill some victims now and then; check that no gradient is lost."""
    name, flags = f"demo-{os.getpid()}", TensorSpec((plan.steps, plan.workers), "int8")
    most = min(12, plan.steps // 4)  # how often to kill
    tables = start(len(text["counts"]), plan) | {"figures": np.zeros((plan.steps, 2))}
    adagrad = dict.fromkeys(TABLES, optim.Adagrad(plan.rate, SQUARES))
    figures = {"figures": TensorSpec((2,), "float64", reduction_type="SUM")}  # summed over workers
    kept = {
        "begun": TensorSpec((plan.steps,), "int64"),  # how often a round was handed out
        "given": flags,  # which gradients were accepted, as far as their workers know ...
        "taken": flags,  # ... and which the chief took
    }
    ours: Any = {"if_exists": "replace", "unlink_on_close": True}  # no other run has these names
    with (
        SharedArrays({**kept, **text}, f"{name}.books", **ours) as books,
        Parameters(tables, f"{name}.params", optimizer=adagrad, **ours) as params,
        AccumulatorGroup(
            params.member_specs(TABLES) | figures, name, reduction_type="CMEAN", **ours
        ) as group,
        contextlib.closing(_Cast(group, params, books, plan)) as cast,
    ):
        while cast.works():
            time.sleep(0.05)
            if victims and cast.killed < group.global_step % plan.steps * most // plan.steps:
                for victim in random.sample(victims, random.randint(1, len(victims))):
                    cast.kill(victim)
            show(plan, params.step, params, f"{cast.killed} killed")
        stats, taken, again = group.stats(), books["taken"], (books["begun"] > 1).sum()
        report = (
            f"{stats.applied:,} gradients accepted, {stats.dropped:,} dropped, {stats.taken:,} "
            f"taken; {cast.killed} processes killed, {stats.recoveries} operations undone, "
            f"{again} rounds handed out again"
        )
        unknown = taken - books["given"]  # a killed worker may not have noted its last one
        right = stats.applied == stats.taken == taken.sum() and (plan.backup or taken.all())
        if not right or unknown.min() < 0 or unknown.sum() > cast.killed:
            raise RuntimeError(f"The books do not balance: {report}")
        return params.snapshot()[1], report


class _Cast:  # a process for the chief and each worker
    def __init__(self, group: AccumulatorGroup, *more: Any) -> None:
        # more: the other arguments of `lead`
        self._group, self._begun, self.killed = group, more[1]["begun"], 0
        self._jobs: dict[int, Any] = {CHIEF: (lead, group, *more)}
        self._jobs |= {rank: (work, group, *more, rank) for rank in range(more[-1].workers)}
        self._processes = {rank: self._start(rank) for rank in self._jobs}

    def _start(self, rank: int) -> SpawnProcess:
        process = SpawnProcess(target=_attend, args=self._jobs[rank], daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only we handle Ctrl-C
        process.start()
        signal.signal(signal.SIGINT, handler)
        return process

    def works(self) -> bool:
        """Return False when all have done their work."""
        for rank, process in self._processes.items():
            if process.exitcode:
                raise RuntimeError(f"Process {rank} ended with status {process.exitcode}")
        return any(process.is_alive() for process in self._processes.values())

    def kill(self, rank: int) -> None:
        """Kill and replace the chief in a round, or a worker in an apply or after it."""
        process, doing = self._processes[rank], random.choice(("applies", "waits for the step"))
        for pid in [process.pid or 0] * 1000:  # retried: it may be starting
            if not process.is_alive():
                return  # its work is done
            soon = time.monotonic() + 0.1 * (rank == CHIEF)  # a chief's rounds are short
            while time.monotonic() < soon and self._group.stats().round_pid != pid:
                time.sleep(0.0001)
            os.kill(pid, signal.SIGSTOP)  # so that it does not go on while we look
            found = inspection.describe(self._group.shared_name)
            at_it = [one.pid for one in found.processes if one.activity == doing]
            in_round = found.stats.round_pid == pid and self._begun[found.stats.global_step] > 0
            if in_round or pid in at_it:
                break
            os.kill(pid, signal.SIGCONT)
            time.sleep(random.uniform(0, 0.005))
        process.kill()
        process.join()
        self.killed += 1
        self._processes[rank] = self._start(rank)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


def _attend(role: Callable[..., None], *job: Any) -> None:
    threading.Thread(target=_leave_with_parent, args=job[:3], daemon=True).start()
    role(*job)


def _leave_with_parent(*named: Any) -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    for one in named:  # the parent was killed before it unlinked them
        one.unlink()
    os._exit(1)


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
