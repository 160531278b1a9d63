"""A child or the parent is killed, or Ctrl-C comes: a run goes on, or ends and leaves nothing."""

import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import run_roles
from helpers.guest import Guest, Guests, every_start_method
from helpers.run_roles import WORKERS, is_gone
from helpers.support import run_to_end, until

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


def test_kills_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shmacc._run.children._PERIOD", 0.0)
    calls = str(tmp_path / "calls")
    assert (
        shmacc.run(
            run_roles.fail_until_third_time, args=(calls, "kill"), restarts=1, context="fork"
        )
        == 3
    )


# The first run of this program sleeps; the second ends at once.
NAMED: Final = """
    def stay(role):
        shmacc.ConditionalAccumulator("f4", (), role)
        if DEAF and role != "chief":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark(role, os.getpid())
        try:
            has_marked("second") or time.sleep(600)
        except KeyboardInterrupt:
            with open(os.environ["GUEST_FOLDER"] + f"/interrupts of {role}", "a") as file:
                file.write("x")
            raise
    def work(rank): stay(f"worker{rank}")
    def lead(): stay("chief")
"""
ROLES: Final = ("chief", "worker0", "worker1")


def _named(guest: Guests, way: str = "fork", *, deaf: bool = False) -> Guest:
    """Start a run with a name; wait until all its processes are there."""
    program = guest(
        f"\n    DEAF = {deaf}\n{NAMED}",
        """
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup
        try:
            shmacc.run(lead, work, workers=2, context=WAY, name="named", grace=30)
        except KeyboardInterrupt:
            sys.exit(130)
        """,
        way=way,
    )
    for role in ROLES:
        program.marked(role)
    return program


@pytest.fixture
def goes_on(guest: Guests, namespace: str) -> Iterator[None]:
    """After the test, call the run again: it must go on and end."""
    yield
    left = testing.leaked_names(namespace + ".named")
    stays = {name.rsplit(":", 1)[1] for name in left if name.startswith("shmacc")}
    assert stays == {*ROLES, "%run"}
    (guest.folder / "second").touch()
    _named(guest).ends()


@pytest.mark.usefixtures("goes_on")
@every_start_method
def test_children_end_with_a_killed_parent(way: str, guest: Guests) -> None:
    program = _named(guest, way)
    program.process.kill()
    program.ends(-signal.SIGKILL, names_stay=True)


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "kill"])
def test_ctrl_c_reaches_each_process_once(to_all: bool, guest: Guests) -> None:
    program = _named(guest, "spawn")
    (os.killpg if to_all else os.kill)(program.process.pid, signal.SIGINT)
    program.ends(130, names_stay=True)
    for role in ROLES:
        assert (guest.folder / f"interrupts of {role}").read_text() == "x"


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_children_and_then_the_parent(number: signal.Signals, guest: Guests) -> None:
    program = _named(guest, "spawn")
    program.process.send_signal(number)
    program.ends(-number, names_stay=True)


@pytest.mark.usefixtures("goes_on")
def test_a_second_ctrl_c_kills_workers_that_ignored_the_first(guest: Guests) -> None:
    program = _named(guest, deaf=True)
    chief, worker = (int(program.marked(role)) for role in ROLES[:2])
    program.process.send_signal(signal.SIGINT)
    until(lambda: is_gone(chief))  # the chief is not deaf, so the signal was passed on
    assert not is_gone(worker)
    program.process.send_signal(signal.SIGINT)
    program.ends(130, names_stay=True)


def test_a_signal_whose_handler_does_not_raise_ends_a_run_with_an_error() -> None:
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

    signal.signal(signal.SIGTERM, interrupt)  # comes when the other worker has failed
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
    ran = run_to_end(
        [command, "--workers", "3", program, tmp_path / "journal", "9", role],
        status=5,
        input="not for the children",
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    again, ended = ran.stderr.splitlines()
    assert again.startswith(f"shmacc-run: {role}")
    assert again.endswith("was killed by SIGKILL, and is started again (1 of 3)")
    assert ended.endswith("exited with status 5")
