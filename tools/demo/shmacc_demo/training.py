"""The training: what workers and chief do, and the process that starts them, and kills some.

The state of the model is in shared memory twice: that of step s is copy s % 2. The chief's block
writes only that of step s + 1, computed from that of step s and the gradients of the round. So it
can be done twice: if the chief dies in the middle, the round is handed out again, to the chief that
is started in its place. And step s is open again meanwhile; late workers find its state intact.
"""

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

from shmacc import AccumulatorGroup, IndexedSlicesSpec, SharedArrays, TensorSpec, inspection
from shmacc_demo.model import TABLES, Arrays, Batches, Plan, start, update

CHIEF = -1
Show = Callable[[Plan, int, Arrays, str], None]


def work(group: AccumulatorGroup, shared: SharedArrays, plan: Plan, rank: int) -> None:
    """Be a worker. One that is started in place of a killed one gives the same gradient again."""
    batches, step = Batches(shared, plan), group.global_step
    while step < plan.steps:
        gradient = batches.gradient(_state(shared, step), step, rank)
        shared["given"][step, rank] = group.apply(gradient, step, contributor=rank)
        step = group.wait_step(step)


def lead(group: AccumulatorGroup, shared: SharedArrays, plan: Plan) -> None:
    """Be the chief, the first one or one that is started in place of a killed one."""
    while (step := group.global_step) < plan.steps:
        with group.round(plan.workers - plan.backup) as taken:
            shared["begun"][step] += 1
            part: Any = taken  # of the kinds that `members` below says
            means = {table: (part[table].indices, part[table].values) for table in TABLES}
            update(_state(shared, step), _state(shared, step + 1), means, step, plan)
            shared["figures"][step] = part["figures"].value
            shared["taken"][step, taken.contributors] = True


def _state(shared: SharedArrays, step: int) -> dict[str, Any]:
    return {table: shared[table][step % 2] for table in TABLES}


def train(plan: Plan, text: Arrays, show: Show, victims: Sequence[int] = ()) -> tuple[Arrays, str]:
    """Train in processes, kill victims (`CHIEF`, a worker's rank) now and then, keep books."""
    words, name = len(text["counts"]), f"demo-{os.getpid()}"
    members = {
        "inputs": IndexedSlicesSpec((words, plan.width), "float64"),
        "outputs": IndexedSlicesSpec((words, plan.width), "float64"),
        "bias": IndexedSlicesSpec((words,), "float64"),
        "figures": TensorSpec((2,), "float64", reduction_type="SUM"),
    }
    flags, most = TensorSpec((plan.steps, plan.workers), "int8"), min(12, plan.steps // 4)  # kills
    arrays = {table: np.stack([array] * 2) for table, array in start(words, plan).items()} | {
        "figures": TensorSpec((plan.steps, 2), "float64"),
        "begun": TensorSpec((plan.steps,), "int64"),  # how often a round was handed out
        "given": flags,  # which gradients were accepted, as far as their workers know ...
        "taken": flags,  # ... and which the chief took
    }
    ours: Any = {"if_exists": "replace", "unlink_on_close": True}  # the names
    with (
        SharedArrays({**arrays, **text}, f"{name}.arrays", **ours) as shared,
        AccumulatorGroup(members, name, reduction_type="CMEAN", **ours) as group,
        contextlib.closing(_Crew(group, shared, plan)) as crew,
    ):
        while crew.works():
            time.sleep(0.05)
            if victims and crew.killed < group.global_step % plan.steps * most // plan.steps:
                for victim in random.sample(victims, random.randint(1, len(victims))):
                    crew.kill(victim)
            show(plan, group.global_step, shared, f"{crew.killed} killed")
        found = _state(shared, plan.steps) | {"figures": shared["figures"]}
        stats, taken, again = group.stats(), shared["taken"], (shared["begun"] > 1).sum()
        report = (
            f"{stats.applied:,} gradients accepted, {stats.dropped:,} dropped, {stats.taken:,} "
            f"taken; {crew.killed} processes killed, {stats.recoveries} operations undone, "
            f"{again} rounds handed out again"
        )
        unknown = taken - shared["given"]  # a worker that is killed does not know of its last one
        right = stats.applied == stats.taken == taken.sum() and (plan.backup or taken.all())
        if not right or unknown.min() < 0 or unknown.sum() > crew.killed:
            raise RuntimeError(f"The books do not balance: {report}")
        return {key: value.copy() for key, value in found.items()}, report


class _Crew:  # the chief and the workers, a process each
    def __init__(self, group: AccumulatorGroup, shared: SharedArrays, plan: Plan) -> None:
        self._name, self.killed = group.shared_name, 0
        self._jobs: dict[int, Any] = {CHIEF: (lead, group, shared, plan)}
        self._jobs |= {rank: (work, group, shared, plan, rank) for rank in range(plan.workers)}
        self._processes = {rank: self._start(rank) for rank in self._jobs}

    def _start(self, rank: int) -> SpawnProcess:
        process = SpawnProcess(target=_attend, args=self._jobs[rank], daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for us
        process.start()
        signal.signal(signal.SIGINT, handler)
        return process

    def works(self) -> bool:
        """Start others in place of the killed; return False when all have done their work."""
        for rank, process in self._processes.items():
            if process.exitcode == -signal.SIGKILL:
                self._processes[rank] = self._start(rank)
            elif process.exitcode:
                raise RuntimeError(f"Process {rank} ended with status {process.exitcode}")
        return any(process.is_alive() for process in self._processes.values())

    def kill(self, rank: int) -> None:
        """Kill a chief within a round, a worker within an apply or after it, if caught there."""
        process, doing = self._processes[rank], random.choice(("applies", "waits for the step"))
        for pid in [process.pid or 0] * 200:
            os.kill(pid, signal.SIGSTOP)  # so that it is still at it when we have looked
            found = inspection.describe(self._name)
            at_it = [one.pid for one in found.processes if one.activity == doing]
            if pid in (*at_it, found.stats.round_pid):
                break
            os.kill(pid, signal.SIGCONT)
            time.sleep(random.uniform(0, 0.005))
        process.kill()
        process.join()
        self.killed += 1

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


def _attend(role: Callable[..., None], *job: Any) -> None:
    threading.Thread(target=_leave_with_parent, args=job[:2], daemon=True).start()
    role(*job)


def _leave_with_parent(*named: Any) -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    for one in named:  # the parent was killed, and could not do it
        one.unlink()
    os._exit(1)


def train_alone(plan: Plan, text: Arrays, show: Show) -> Arrays:
    """Do the work of all workers and the chief in this process, with NumPy alone."""
    batches, figures = Batches(text, plan), np.zeros((plan.steps, 2))
    now, then = (start(len(text["counts"]), plan) for _ in range(2))
    for step in range(plan.steps):
        sums = {table: np.zeros(now[table][0].shape) for table in TABLES}
        for rank in range(plan.workers):
            gradient = batches.gradient(now, step, rank)
            figures[step] += gradient["figures"]
            for table, total in sums.items():
                np.add.at(total, *gradient[table])
        means = {table: (slice(None), total / plan.workers) for table, total in sums.items()}
        update(now, then, means, step, plan)
        now, then = then, now
        show(plan, step + 1, {"figures": figures}, "in one process")
    return {**now, "figures": figures}
