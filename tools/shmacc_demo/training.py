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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shmacc
from shmacc_demo.model import STATE, Arrays, Batches, Corpus, Plan, mean, start, update

CHIEF = -1
Show = Callable[[NDArray[np.float64], shmacc.Stats | None, int], None]
_KILLINGS = 12  # in a run
_ATTEMPTS, _PAUSE = 200, 0.005  # to catch a process at its work; seconds between them, at most


def work(
    group: shmacc.AccumulatorGroup, shared: shmacc.SharedArrays, plan: Plan, rank: int
) -> None:
    """Be a worker. One that is started in place of a killed one gives the same gradient again."""
    batches = Batches(shared["counts"], shared["stream"], plan)
    step = group.global_step
    while step < plan.steps:
        gradient = batches.gradient(_state(shared, step), step, rank)
        shared["given"][step, rank] = group.apply(gradient, step, contributor=rank)
        step = group.wait_step(step)


def lead(group: shmacc.AccumulatorGroup, shared: shmacc.SharedArrays, plan: Plan) -> None:
    """Be the chief, the first one or one that is started in place of a killed one."""
    while (step := group.global_step) < plan.steps:
        with group.round(plan.workers - plan.backup) as taken:
            shared["begun"][step] += 1
            now, then = _state(shared, step), _state(shared, step + 1)
            shared["losses"][step] = update(now, then, taken, step, plan)
            shared["taken"][step, taken.contributors] = True


def _state(shared: shmacc.SharedArrays, step: int) -> Arrays:
    return {name: shared[name][step % 2] for name in STATE}


class Outcome(NamedTuple):
    """What came of a run; the books of several processes are none of one process's."""

    arrays: Arrays
    losses: NDArray[np.float64]
    stats: shmacc.Stats | None = None
    deaths: int = 0


def train(plan: Plan, corpus: Corpus, show: Show, victims: Sequence[int] = ()) -> Outcome:
    """Train in processes, and now and then kill one of the victims (`CHIEF`, or a worker)."""
    words, run = len(corpus.words), f"demo-{os.getpid()}"
    table, flags = (words, plan.width), shmacc.TensorSpec((plan.steps, plan.workers), "int8")
    members = {
        "inputs": shmacc.IndexedSlicesSpec(table, "float64"),
        "outputs": shmacc.IndexedSlicesSpec(table, "float64"),
        "bias": shmacc.IndexedSlicesSpec((words,), "float64"),
        "figures": shmacc.TensorSpec((2,), "float64", reduction_type="SUM"),
    }
    arrays = {name: np.stack([array] * 2) for name, array in start(words, plan).items()} | {
        "counts": corpus.counts,
        "stream": corpus.stream,
        "losses": shmacc.TensorSpec((plan.steps,), "float64"),
        "begun": shmacc.TensorSpec((plan.steps,), "int64"),  # how often a round was handed out
        "given": flags,  # the gradients that were accepted, as far as their workers know ...
        "taken": flags,  # ... and those that the chief took
    }
    ours: Any = {"if_exists": "replace", "unlink_on_close": True}  # the names
    with (
        shmacc.SharedArrays(arrays, f"{run}.arrays", **ours) as shared,
        shmacc.AccumulatorGroup(members, run, reduction_type="CMEAN", **ours) as group,
        contextlib.closing(Crew(group, shared, plan)) as crew,
    ):
        dice = random.Random(plan.seed)
        while crew.works():
            step = group.global_step
            if victims and crew.killed < step * min(_KILLINGS, plan.steps // 4) // plan.steps:
                crew.kill(dice.choice(victims))
            show(shared["losses"][:step], group.stats(), crew.killed)
            with contextlib.suppress(shmacc.errors.DeadlineExceededError):
                group.wait_step(step, timeout=0.05)
        kept = {name: shared[name].copy() for name in ("losses", "begun", "given", "taken")}
        kept |= {name: array.copy() for name, array in _state(shared, plan.steps).items()}
        return Outcome(kept, kept["losses"], group.stats(), crew.deaths)


class Crew:
    """The chief and the workers, a process each."""

    def __init__(self, *job: Any) -> None:
        self._job, self.killed, self.deaths = job, 0, 0
        self._processes = {rank: self._start(rank) for rank in range(CHIEF, job[-1].workers)}

    def _start(self, rank: int) -> SpawnProcess:
        process = SpawnProcess(target=_attend, args=(*self._job, rank), daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for us
        process.start()
        signal.signal(signal.SIGINT, handler)
        return process

    def works(self) -> bool:
        """Start others in place of the killed; return False when all have done their work."""
        for rank, process in self._processes.items():
            if process.exitcode == -signal.SIGKILL:
                self.deaths += 1
                self._processes[rank] = self._start(rank)
            elif process.exitcode:
                raise RuntimeError(f"process {rank} ended with status {process.exitcode}")
        return any(process.is_alive() for process in self._processes.values())

    def kill(self, rank: int) -> None:
        """Kill a process: a chief within a round, a worker within an apply, if it is caught there."""
        process, name = self._processes[rank], self._job[0].shared_name
        pid = process.pid or 0
        for _ in range(_ATTEMPTS):
            os.kill(pid, signal.SIGSTOP)  # so that after the look it is still at it
            found = shmacc.inspection.describe(name)
            applying = [one.pid for one in found.processes if one.activity == "applies"]
            if pid in (*applying, found.stats.round_pid):
                break
            os.kill(pid, signal.SIGCONT)
            time.sleep(random.uniform(0, _PAUSE))
        process.kill()
        self.killed += 1

    def close(self) -> None:
        """Kill all."""
        for process in self._processes.values():
            process.kill()
            process.join()


def _attend(group: Any, shared: Any, plan: Plan, rank: int) -> None:
    threading.Thread(target=_leave_with_parent, args=(group, shared), daemon=True).start()
    if rank == CHIEF:
        lead(group, shared, plan)
    else:
        work(group, shared, plan, rank)


def _leave_with_parent(group: shmacc.AccumulatorGroup, shared: shmacc.SharedArrays) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        group.unlink()  # the parent was killed, and could not do it
        shared.unlink()
        os._exit(1)


def train_alone(plan: Plan, corpus: Corpus, show: Show) -> Outcome:
    """Do the work of all workers and the chief in this process, with NumPy alone."""
    batches, losses = Batches(corpus.counts, corpus.stream, plan), np.zeros(plan.steps)
    now, then = (start(len(corpus.words), plan) for _ in range(2))
    for step in range(plan.steps):
        gradients = [batches.gradient(now, step, rank) for rank in range(plan.workers)]
        losses[step] = update(now, then, mean(gradients, now), step, plan)
        now, then = then, now
        show(losses[: step + 1], None, 0)
    return Outcome(now, losses)
