"""A role or the parent is killed, or Ctrl-C comes: a run goes on, or ends and leaves nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import run_roles
from helpers.run_roles import WORKERS, is_gone
from helpers.support import LONG, START_METHODS, until

import shmacc
from shmacc import errors, testing

STEPS: Final = 60
KILLS: Final = {"fork": 200, "spawn": 12}


def _restarts(caplog: pytest.LogCaptureFixture, role: str) -> int:
    return sum(record.getMessage().startswith(role) for record in caplog.records)


@pytest.mark.parametrize(("context", "kills"), KILLS.items())
def test_each_gradient_counts_once_whichever_process_is_killed(
    context: Any,
    kills: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmacc._run.children._PAUSES", (0.0,))
    journal, over = tmp_path / "journal", threading.Event()
    journal.touch()
    killer = threading.Thread(target=run_roles.kill_at_random, args=(journal, kills, over))
    killer.start()
    try:
        while killer.is_alive():
            rows = shmacc.run(
                run_roles.lead,
                run_roles.work,
                workers=WORKERS,
                args=(str(journal), STEPS),
                restarts=10_000,
                context=context,
            )
            assert np.array_equal(rows, np.ones(STEPS * WORKERS))
    finally:
        over.set()
        killer.join()
    assert _restarts(caplog, "chief") > 0
    assert _restarts(caplog, "worker") > 0


@pytest.mark.parametrize("role", ["chief", "worker 1"])
def test_too_many_kills_end_the_run(role: str, caplog: pytest.LogCaptureFixture) -> None:
    calls: Any = (
        (run_roles.fail_in_chief, run_roles.sleep)
        if role == "chief"
        else (run_roles.sleep, run_roles.fail_in_worker)
    )
    with pytest.raises(
        errors.WorkerDiedError,
        match=rf"{role} \(pid \d+\) was killed by SIGKILL; it has ended 3 times within 60 s",
    ):
        shmacc.run(*calls, workers=2, args=("kill",), restarts=2, context="fork")
    assert _restarts(caplog, role) == 2


def test_old_kills_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shmacc._run.children._PERIOD", 0.0)
    calls = str(tmp_path / "calls")
    assert (
        shmacc.run(
            run_roles.fail_until_third_time, args=(calls, "kill"), restarts=1, context="fork"
        )
        == 3
    )


def test_workers_that_do_not_end_are_ended_after_the_grace(tmp_path: Path) -> None:
    assert shmacc.run(
        run_roles.collected,
        _note_and_stay,
        workers=WORKERS,
        args=(str(tmp_path),),
        context="fork",
        grace=0.2,
    ).keys() == {"0", "1", "2"}
    for path in tmp_path.glob("[0-9]"):
        assert is_gone(int(path.read_text()))


def _note_and_stay(rank: int, folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_roles.note(rank, folder, str(os.getpid()))
    run_roles.sleep()


_PROGRAM: Final = """
    import os, signal, sys
    from pathlib import Path
    import shmacc
    from helpers import run_roles

    folder = Path(sys.argv[1])

    def note(role):
        shmacc.ConditionalAccumulator("f4", (), role)
        (folder / f".{role}").write_text(str(os.getpid()))
        os.replace(folder / f".{role}", folder / role)

    def work(rank):
        note(f"worker{rank}")
        if (folder / "second").exists():
            return
        if "deaf" in sys.argv:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / f"deaf{rank}").touch()
        try:
            run_roles.sleep()
        except KeyboardInterrupt:
            with (folder / f"interrupts{rank}").open("a") as file:
                file.write("x")
            raise

    def lead():
        note("chief")
        if (folder / "second").exists():
            return
        run_roles.sleep()

    if __name__ == "__main__":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup
        try:
            name = None if "unnamed" in sys.argv else "named"
            shmacc.run(lead, work, workers=2, context=sys.argv[2], name=name, grace=30)
        except KeyboardInterrupt:
            sys.exit(130)
"""
ROLES: Final = ("chief", "worker0", "worker1")


class _Started:
    """The program, and the pids that its children wrote down."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        path = folder / "program.py"
        path.write_text(textwrap.dedent(_PROGRAM))
        tests = str(Path(__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(path), str(folder), *arguments],
            env=os.environ | {"PYTHONPATH": tests},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(lambda: all((folder / role).exists() for role in ROLES))
        self.pids = [int((folder / role).read_text()) for role in ROLES]

    def has_ended(self, status: int) -> None:
        assert self.process.wait(LONG) == status
        for pid in self.pids:
            until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]


@pytest.fixture
def folder(tmp_path: Path, namespace: str) -> Iterator[Path]:
    """A folder for the program, which at the end is run again, and must go on and end."""
    yield tmp_path
    left = testing.leaked_names(namespace + ".named")
    assert {name.rsplit(":", 1)[1] for name in left if name.startswith("shmacc")} == set(ROLES)
    (tmp_path / "second").touch()
    _Started(tmp_path, "fork").has_ended(0)
    assert testing.leaked_names(namespace + ".named") == ()


@pytest.mark.parametrize("context", START_METHODS)
def test_children_end_with_a_killed_parent(context: str, folder: Path) -> None:
    started = _Started(folder, context)
    started.process.kill()
    started.has_ended(-signal.SIGKILL)


@pytest.mark.parametrize("context", START_METHODS)
def test_names_of_an_unnamed_run_go_with_its_parent(
    context: str, tmp_path: Path, namespace: str
) -> None:
    started = _Started(tmp_path, context, "unnamed")
    assert f".{namespace}.run-{started.process.pid}-" in "".join(testing.leaked_names())
    started.process.kill()
    started.has_ended(-signal.SIGKILL)
    until(lambda: f".{namespace}.run-" not in "".join(testing.leaked_names()))


@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "kill"])
def test_ctrl_c_reaches_each_process_once(to_all: bool, folder: Path) -> None:
    started = _Started(folder, "spawn")
    (os.killpg if to_all else os.kill)(started.process.pid, signal.SIGINT)
    started.has_ended(130)
    for rank in range(2):
        assert (folder / f"interrupts{rank}").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_children_and_then_the_parent(
    number: signal.Signals, folder: Path
) -> None:
    started = _Started(folder, "spawn")
    started.process.send_signal(number)
    started.has_ended(-number)


def test_a_second_ctrl_c_kills(folder: Path) -> None:
    started = _Started(folder, "fork", "deaf")
    until(lambda: all((folder / f"deaf{rank}").exists() for rank in range(2)))
    started.process.send_signal(signal.SIGINT)
    until(lambda: is_gone(started.pids[0]))  # the chief is not deaf, so the signal was passed on
    assert not is_gone(started.pids[1])
    started.process.send_signal(signal.SIGINT)
    started.has_ended(130)


def test_a_handler_that_does_not_raise_is_followed_by_an_error() -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        with pytest.raises(errors.CancelledError, match="ended by SIGTERM"):
            shmacc.run(_terminate_parent, context="fork", grace=0)
        assert came == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_is_not_lost_beside_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as interrupted:
        shmacc.run(run_roles.sleep, _fail, workers=2, args=(tmp_path / "ready",), context="fork")
    assert isinstance(interrupted.value.__context__, ValueError)


def _fail(rank: int, ready: Path) -> None:
    if rank:
        until(ready.exists)
        raise ValueError("end")

    def interrupt(*_: Any) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        os._exit(0)

    signal.signal(signal.SIGTERM, interrupt)  # SIGTERM comes when the other one has failed
    ready.touch()
    run_roles.sleep()


def _terminate_parent() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    run_roles.sleep()


@pytest.mark.parametrize("role", ["chief", "worker"])
def test_the_command_starts_a_killed_file_again(role: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from helpers import run_roles
            role, rank = os.environ["SHMACC_ROLE"], int(os.environ["SHMACC_RANK"])
            assert os.environ["SHMACC_WORKERS"] == "3"
            assert sys.stdin.read() == ""  # a terminal would stop it
            journal, steps, killed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
            if role == killed and rank < 1 and not os.path.exists(journal + "killed"):
                open(journal + "killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if role == "chief":
                assert (run_roles.lead(journal, steps) == 1).all()
                sys.exit(5)
            run_roles.work(rank, journal, steps)
            """
        )
    )
    command = Path(sys.executable).with_name("shmacc-run")
    ran = subprocess.run(
        [command, "--workers", "3", program, tmp_path / "journal", "9", role],
        input="not for the children",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert ran.returncode == 5
    again, ended = ran.stderr.splitlines()
    assert again.startswith(f"shmacc-run: {role}")
    assert again.endswith("was killed by SIGKILL, and is started again (1 of 3)")
    assert ended.endswith("exited with status 5")
