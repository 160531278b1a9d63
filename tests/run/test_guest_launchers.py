"""Whatever has launched a program: its run restarts, returns the right result, and leaves nothing.

A launcher may pass on ignored or blocked signals, no terminal, closed descriptors, limits.
"""

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Final

import pytest
from helpers.guest import (
    AS_PID_1,
    KILLED_ONCE,
    Guests,
    Launcher,
    every_way,
    fork_and_command,
    needs_pid_1,
    prefixed,
)
from helpers.pages import ROOT
from helpers.support import until


def _shell(script: str) -> Launcher:
    return lambda command: ["sh", "-c", script, "sh", *command]


def _python(setting: str) -> Launcher:
    text = f"import os, resource, signal, sys; {setting}; os.execv(sys.argv[1], sys.argv[1:])"
    return lambda command: [sys.executable, "-c", text, *command]


def _make(command: list[str]) -> list[str]:
    """Return a command that runs this one in a recipe of `make`, which starts a shell for it."""
    recipe = shlex.join(command).replace("$", "$$")
    return ["make", "--silent", f"--eval=go: ; @{recipe}", "go"]


SIGCHLD_IGNORED: Final = _shell("trap '' CHLD; exec \"$@\"")
LAUNCHERS: Final[dict[str, Launcher]] = {
    "nohup": prefixed("nohup"), "setsid": prefixed("setsid", "--wait"),
    "timeout": prefixed("timeout", "600"), "xargs": _shell('echo go | xargs -I {} "$@"'),
    "make": _make, "background": _shell('"$@" & wait $!'), "pipe": _shell('"$@" 2>&1 | cat'),
    "no descriptors": _shell('exec "$@" <&- >&- 2>&-'),
    "signals blocked": _python("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"),
    "signals ignored": _python(
        "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 10, 12, 13, 15, 17, 20)]"),
    "a child of its own": _python("os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '0.2')"),
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_under_a_launcher_goes_on_after_a_kill(launcher: str, guest: Guests) -> None:
    assert guest(KILLED_ONCE, launcher=LAUNCHERS[launcher]).ends()["result"] == 1.5


@pytest.mark.parametrize("launcher", ["pipe", "no descriptors", "signals ignored", "background"])
def test_the_command_under_a_launcher_goes_on_after_a_kill(launcher: str, guest: Guests) -> None:
    program = guest(KILLED_ONCE, way="command", launcher=LAUNCHERS[launcher])
    assert program.ends()["result"] == 1.5


PRINTS: Final = """
    work = None

    def lead():
        for number in (1, 2):
            for _ in range(3000):
                os.write(number, b"a warning of a library in C\\nremove\\n")
        with open(os.devnull) as file:
            return file.fileno()
"""


@every_way
@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_what_a_chief_prints_to_closed_streams_goes_nowhere(
    way: str, closed: str, guest: Guests
) -> None:
    program = guest(PRINTS, way=way, launcher=_shell(f'exec "$@" {closed}'))
    assert program.ends()["result"] > 2, "a file that it opens is a standard stream"


@every_way
def test_a_run_whose_launcher_ignores_sigchld_goes_on_after_a_kill(way: str, guest: Guests) -> None:
    assert guest(KILLED_ONCE, way=way, launcher=SIGCHLD_IGNORED).ends()["result"] == 1.5


@needs_pid_1
@every_way
def test_a_run_as_pid_1_goes_on_after_a_kill(way: str, guest: Guests) -> None:
    assert guest(KILLED_ONCE, way=way, launcher=AS_PID_1).ends()["result"] == 1.5


# Signals that end a run

STAYING: Final = """
    def work(rank):
        mark(f"worker{rank}")
        time.sleep(600)

    def lead():
        shmacc.ConditionalAccumulator("f4", (), "kept")
        mark("caller", os.getppid())
        time.sleep(600)
"""


@pytest.mark.parametrize("launcher", [list, SIGCHLD_IGNORED], ids=["none", "SIGCHLD ignored"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@fork_and_command
def test_a_signal_ends_a_run(
    number: signal.Signals, launcher: Launcher, way: str, guest: Guests
) -> None:
    program = guest(STAYING, way=way, launcher=launcher)
    for role in ("worker0", "worker1", "caller"):
        program.marked(role)
    program.process.send_signal(number)
    interrupted = {-number} if number != signal.SIGINT else {-number, 130}
    assert program.ends(None).status in interrupted


@pytest.mark.parametrize(("launcher", "number"), [
    (LAUNCHERS["nohup"], signal.SIGHUP),
    (_python("signal.signal(signal.SIGINT, signal.SIG_IGN)"), signal.SIGINT),
], ids=["nohup", "background"])  # fmt: skip
@fork_and_command
def test_a_signal_that_the_launcher_ignores_does_not_end_a_run(
    launcher: Launcher, number: signal.Signals, way: str, guest: Guests
) -> None:
    program = guest(
        """
        def lead():
            mark("ready")
            marked("sent")
            time.sleep(0.2)  # an end would come in this time
            return "done"
        """,
        "start(lead)",
        way=way,
        launcher=launcher,
        workers=0,
    )
    program.marked("ready")
    program.process.send_signal(number)
    program.mark("sent")
    assert program.ends()["result"] == "done"


@needs_pid_1
@fork_and_command
def test_sigterm_ends_a_run_that_is_pid_1(way: str, guest: Guests) -> None:
    program = guest(STAYING, way=way, launcher=AS_PID_1)
    for role in ("worker0", "worker1", "caller"):
        program.marked(role)
    os.kill(_child_of(program.process.pid), signal.SIGTERM)
    assert program.ends(None).status != 0


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@needs_pid_1
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_run_as_pid_1_leaves_no_zombies(way: str, guest: Guests) -> None:
    """Each killed worker has started processes, which pid 1, the caller of `run`, inherits."""
    program = guest(
        """
        from pathlib import Path

        def zombies():
            found = []
            for path in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):
                    if path.read_text().rpartition(")")[2].split()[:2] == ["Z", "1"]:
                        found.append(path.parent.name)
            return set(found) - {marked("own")}

        def work(rank):
            for _ in range(2):
                subprocess.Popen(["sleep", "600"])
            with open(os.path.join(os.environ["GUEST_FOLDER"], "kills"), "a+") as file:
                file.write("x")
                file.seek(0)
                kills = len(file.read())
            if kills < 4:
                os.kill(os.getpid(), signal.SIGKILL)
            mark("killed")
            time.sleep(600)

        def lead():
            marked("killed")
            until(lambda: not zombies(), 20)
        """,
        """
        own = subprocess.Popen(["sh", "-c", "exit 7"])
        mark("own", own.pid)
        shmacc.run(lead, work, workers=1, restarts=9, grace=0, context=WAY)
        tell(status=own.wait(), result="no zombies")
        """,
        way=way,
        launcher=AS_PID_1,
    )
    ended = program.ends()
    assert ended["result"] == "no zombies"
    assert ended["status"] == 7, "the program's own child is reaped by the program"


# README's program

NO_TERMINAL: Final = prefixed("setsid", "--wait")


def _readmes_program(folder: Path, steps: int) -> str:
    text = (ROOT / "docs" / "examples" / "first" / "train.py").read_text(encoding="utf-8")
    assert text.count("params.step < 300") == 1
    program = folder / "train.py"
    program.write_text(text.replace("params.step < 300", f"params.step < {steps}"))
    return str(program)


@pytest.mark.parametrize(
    "launcher",
    [LAUNCHERS["nohup"], LAUNCHERS["timeout"], NO_TERMINAL, LAUNCHERS["xargs"], _make],
    ids=["nohup", "timeout", "no terminal", "xargs", "make"],
)
def test_readmes_program_ends_under_each_launcher(launcher: Launcher, guest: Guests) -> None:
    program = _readmes_program(guest.folder, 5)
    ended = guest.command(launcher([sys.executable, program])).ends()
    assert ended.out.endswith("of the table is learnt\n")
    assert ended.err.count("has started") == 5
    assert "Traceback" not in ended.err


@needs_pid_1
def test_sigterm_ends_readmes_program_as_pid_1(guest: Guests) -> None:
    program = _readmes_program(guest.folder, 1_000_000)
    started = guest.command(AS_PID_1([sys.executable, program]))
    until(lambda: any(name.endswith(":model") for name in started.names()))
    os.kill(_child_of(started.process.pid), signal.SIGTERM)
    assert started.ends(None).status != 0
