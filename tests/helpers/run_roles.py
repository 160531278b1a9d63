"""Chiefs and workers for tests of `shmacc.run`, and a function that kills them."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

import shmacc

WORKERS: Final = 3


def nothing(*_: Any) -> None:
    """Return at once."""


def surroundings(*_: Any) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SHMACC_")}


def note_surroundings(rank: int, folder: str) -> None:
    own = surroundings()
    note(rank, folder, f"{own['SHMACC_ROLE']} {own['SHMACC_RANK']}")


def note(rank: int, folder: str, text: str) -> None:
    Path(folder, f".{rank}").write_text(text)
    Path(folder, f".{rank}").replace(Path(folder, str(rank)))


def collected(folder: str) -> dict[str, str]:
    """Wait for all workers' notes; return them by rank. A file gets its name when complete."""
    while len(found := sorted(Path(folder).glob("[0-9]"))) < WORKERS:
        time.sleep(0.01)
    return {path.name: path.read_text() for path in found}


def large(*_: Any) -> bytes:
    return bytes(10_000_000)


def fail(what: str) -> NoReturn:
    """Fail in one of several ways."""
    if what == "status":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(what)


def fail_in_worker(rank: int, what: str) -> None:
    if rank == 1:
        fail(what)
    time.sleep(600)


def sleep(*_: Any) -> None:
    time.sleep(600)


def fail_until_third_time(path: str, what: str) -> int:
    """Fail twice; in the third call, return the number of calls."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    times = len(Path(path).read_text().splitlines())
    if times < 3:
        fail(what)
    return times


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


# A training in which each gradient has a row of its own, so that the parameters show which
# gradients are in them, and how often.


def parameters(steps: int) -> shmacc.Parameters:
    rows = {"rows": np.zeros(WORKERS * steps, np.float32)}
    return shmacc.Parameters(rows, "params", optimizer=shmacc.optim.SGD(1.0))


def lead(journal: str, steps: int) -> Any:
    """Train until this step; return the parameters' rows."""
    _note("chief", journal)
    with (
        parameters(steps) as params,
        shmacc.AccumulatorGroup(
            params.member_specs(sparse=["rows"]), "group", reduction_type="SUM"
        ) as group,
    ):
        while params.step < steps:
            with group.round(WORKERS, timeout=60) as taken:
                params.update(taken)
        group.finish()
        return params["rows"].copy()


def work(rank: int, journal: str, steps: int) -> None:
    _note(f"worker {rank}", journal)
    with (
        shmacc.Parameters.attach("params", timeout=60),
        shmacc.AccumulatorGroup.attach("group", timeout=60) as group,
    ):
        for step in group.steps(timeout=60):
            if step < steps:
                group.apply({"rows": ([step * WORKERS + rank], [-1.0])}, step, contributor=rank)


def _note(role: str, journal: str) -> None:
    with Path(journal).open("a") as file:
        file.write(f"{role} {os.getpid()}\n")


def kill_at_random(journal: Path, kills: int, over: threading.Event) -> None:
    """Kill a random role's latest process, `kills` times, but no process twice."""
    chosen, killed = random.Random(7), set[str]()
    while len(killed) < kills and not over.wait(chosen.random() * 0.02):
        latest = dict(line.rsplit(" ", 1) for line in journal.read_text().splitlines())
        pid = latest[chosen.choice(list(latest))] if latest else ""
        with suppress(OSError):
            if pid not in killed and f"PPid:\t{os.getpid()}\n" in Path(
                f"/proc/{pid}/status"
            ).read_text(encoding="ascii"):
                os.kill(int(pid), signal.SIGKILL)
                killed.add(pid)
