"""A model of ids that come in a stream and are gone some steps later; its chief is killed twice.

Each event has five ids, and its score is the sum of a number for each. A table learns the numbers.
Nobody knows the ids beforehand, nor how many there are; every ten steps the chief removes those
that no event has had for a while. A killed process is started again, and what is learnt is the
same as without a kill, to the bit.
"""

import multiprocessing as mp
import signal
import time

import numpy as np
import shmacc

WORKERS, STEPS = 2, 200
EVERY, KEPT = 10, 30  # every so many steps, ids go that were not updated for so many
CHIEF = WORKERS  # ranks 0 and 1 are workers
TABLE = shmacc.TableSpec((), "float64")  # a row is a number, 0 at first
OURS = {"if_exists": "replace", "unlink_on_close": True}  # a run finds nothing, and leaves nothing


def events(step, rank):
    """Return what the stream has for this step and worker: 64 events of five ids."""
    random = np.random.default_rng((step, rank))
    visitors = 20 * step + random.integers(400, size=(64, 5))  # each comes in twenty steps
    hashes = visitors.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # 64 bits
    return hashes >> np.uint64(1)  # ids are below 2**63


def gradient(step, rank, params):
    ids = events(step, rank)
    scores = np.sin(ids % 1000).sum(axis=1)  # the truth
    error = params["number"][ids].sum(axis=1) - scores
    return {"number": (ids.reshape(-1), np.repeat(error, 5) / 5), "loss": np.square(error).mean()}


def work(rank, group, params):
    for step in group.steps(timeout=60):
        group.apply(gradient(step, rank, params), step, contributor=rank)


def update(taken, params):
    forget = {"number": KEPT} if taken.step % EVERY == 0 else {}
    params.update(taken, {"loss": taken["loss"].value}, forget=forget)


def lead(group, params):
    while group.global_step < STEPS:
        with group.round(WORKERS, timeout=60) as taken:
            update(taken, params)
            time.sleep(0.01)  # so that it is killed in here
    group.finish()


def make(*names):
    contents = {"number": TABLE, "loss": shmacc.TensorSpec((), "float64")}
    optimizer = {"number": shmacc.optim.Adagrad(0.5)}
    params = shmacc.Parameters(contents, *names[:1], optimizer=optimizer, **OURS)
    return params, shmacc.AccumulatorGroup(params.member_specs(), *names[1:], **OURS)


def without_a_kill():
    params, group = make()
    with params, group:
        for step in range(STEPS):
            for rank in range(WORKERS):
                group.apply(gradient(step, rank, params), step)
            with group.round(WORKERS) as taken:
                update(taken, params)
        return params.state()


def be(rank):
    with (
        shmacc.Parameters.attach("stream.params") as params,
        shmacc.AccumulatorGroup.attach("stream") as group,
    ):
        lead(group, params) if rank == CHIEF else work(rank, group, params)


def start(rank):
    process = mp.get_context("spawn").Process(target=be, args=(rank,))
    process.start()
    return process


if __name__ == "__main__":
    params, group = make("stream.params", "stream")
    with params, group:
        processes = {rank: start(rank) for rank in [*range(WORKERS), CHIEF]}
        kills = [STEPS // 3, STEPS // 2]  # at these steps
        while group.running:
            time.sleep(0.005)
            for rank, process in processes.items():
                code = process.exitcode  # read once: it may die at any time
                if code == -signal.SIGKILL:
                    processes[rank] = start(rank)
                elif code:  # an exception, which it has printed
                    raise SystemExit(f"process {rank} has failed")
            if kills and group.global_step >= kills[0]:
                processes[CHIEF].kill()
                kills.pop(0)
        for process in processes.values():
            process.join()
        every = [events(step, rank) for step in range(STEPS) for rank in range(WORKERS)]
        state, table = params.state(), params["number"]
        print(f"{np.unique(every).size} ids came, {len(table)} are there")
        assert params["loss"] < 0.7  # 2.5 at first
        for key, expected in without_a_kill().items():
            assert np.array_equal(state[key], expected), key
