"""A run's record says what its processes do, and exists as long as the run's names."""

import operator
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.support import START_METHODS, until

import shmacc
from shmacc import errors, testing
from shmacc._base import names
from shmacc._run import cleaner, record
from shmacc._run.record import State
from shmacc._segment import run_records

SHORT: Final = 0.3  # seconds of many writes and reads


def read(namespace: str) -> run_records.Record:
    return run_records.read(names.of_run(namespace))


def remove(namespace: str, *, named: bool) -> None:
    cleaner.remove_names(cleaner.Job("", names.SHM_DIRECTORY, namespace, named), [])


@pytest.mark.parametrize("context", START_METHODS)
def test_the_record_says_what_each_process_does(context: str, namespace: str) -> None:
    before = time.time()
    found = shmacc.run(_lead, _work, workers=3, context=context, name="digits", restarts=2, grace=0)
    facts, chief, back, ended, due = found
    assert (facts.parent, facts.outer, facts.named, facts.restarts) == (
        *(os.getpid(), namespace),
        *(True, 2),
    )
    assert facts.roles == ("chief", "worker 0", "worker 1", "worker 2")
    assert before <= facts.started <= time.time()
    assert facts.folder == str(Path.cwd())
    assert facts.command.startswith(sys.executable)
    assert (chief.state, chief.ends, chief.restarts) == (State.RUNNING, 0, 0)
    assert (back.state, back.ends, back.restarts) == (State.RUNNING, 1, 1)
    assert chief.pid != back.pid != os.getpid()
    assert before <= back.ended <= time.time()
    assert (ended.state, ended.pid) == (State.FINISHED, 0)
    assert (due.state, due.ends, due.restarts) == (State.DUE, 2, 1)
    assert due.ended < due.at
    assert due.fourth_last_end == 0
    assert testing.leaked_names(namespace) == ()


def _lead() -> Any:
    own = os.environ["SHMACC_NAMESPACE"]

    def is_as_wanted() -> bool:
        _, back, finished, due = read(own).roles
        return (
            (back.state, back.restarts, due.ends) == (State.RUNNING, 1, 2)
            and due.state is State.DUE
            and finished.state is State.FINISHED
        )

    until(is_as_wanted)
    found = read(own)
    assert found.alive
    return found.facts, *found.roles


def _work(rank: int) -> None:
    own = read(os.environ["SHMACC_NAMESPACE"]).roles[rank + 1]
    if rank == 2 or (rank == 0 and not own.restarts):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        signal.pause()


def test_a_run_keeps_a_programs_own_names_that_look_like_its_own(namespace: str) -> None:
    for own in ("run.digits", "%run", "run"):
        with shmacc.ConditionalAccumulator("f4", (), own, reduction_type="SUM") as acc:
            acc.apply_grad(2.0)
            shmacc.run(_make, context="fork", name="digits")
            assert acc.take_grad(1, timeout=1) == 2.0
            acc.unlink()
    assert testing.leaked_names(namespace) == ()


def _make(name: str = "kept") -> None:
    with shmacc.ConditionalAccumulator("f4", (), name):
        pass


def _fail_inside() -> None:
    shmacc.run(_make_and_fail, context="fork", name="inner")


def _make_and_fail() -> None:
    _make()
    raise ValueError("inner")


def test_a_run_that_ends_removes_no_names_of_runs_with_similar_names(namespace: str) -> None:
    for name in ("digits.2", "digits.2.3", "digit"):
        with pytest.raises(ValueError, match="inner"):
            shmacc.run(_make_and_fail, context="fork", name=name)
    before = testing.leaked_names(namespace)
    with pytest.raises(ValueError, match="inner"):
        shmacc.run(_fail_inside, context="fork", name="digits")
    assert f"shmacc.{namespace}.digits.inner:kept" in testing.leaked_names(namespace)
    shmacc.run(_make, context="fork", name="digits")
    assert testing.leaked_names(namespace) == before
    remove(namespace, named=False)


def test_an_unreadable_record_affects_only_its_namespace(namespace: str) -> None:
    with pytest.raises(ValueError, match="inner"):
        shmacc.run(_make_and_fail, context="fork", name="digits.2")
    Path(names.of_run(f"{namespace}.digits.2").path).write_bytes(b"no record")
    for outer, inner in (("", ["digits.2"]), (".digits", ["digits.2"]), (".other", [])):
        found = run_records.started_in(partial(operator.eq, namespace + outer))
        assert found == [names.of_run(f"{namespace}.{each}") for each in inner]
    with pytest.raises(errors.DataLossError):
        read(f"{namespace}.digits.2")
    remove(namespace, named=False)


def test_a_reader_never_mixes_two_writes_of_a_row() -> None:
    with record.kept("digits", ["chief", "worker 0"], named=True, restarts=3) as kept:
        end = threading.Event()

        def write() -> None:
            number = 0
            while not end.is_set():
                number += 1
                kept.note(1, State.RUNNING, pid=number, ends=number)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            until_then, seen = time.monotonic() + SHORT, set[int]()
            while time.monotonic() < until_then or len(seen) < 2:
                _, worker = read("digits").roles
                assert worker.pid == worker.ends
                seen.add(worker.pid)
        finally:
            end.set()
            writer.join()
    remove("digits", named=True)
