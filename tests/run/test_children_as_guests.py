"""A run sees how children end, and goes on, where they or the caller do what programs seldom do."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

import pytest
from helpers.guest import TESTS, Guests, every_way, fork_and_command, prefixed

_PTRACE_SEIZE: Final = 0x4206
_WALL: Final = 0x40000000  # wait for any child, and for what is traced


def beginning_with(code: str, guest: Guests) -> dict[str, str]:
    """Let each Python of a program begin with this code; return the environment for that."""
    (guest.folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{TESTS}:{guest.folder}"}


# Children that end in an unusual way

# A forkserver begins with it, too, and kills its first child right after the fork.
KILLED_EARLY: Final = """
import os
def kill_once():
    from helpers.guest_program import once
    if once("killed"):
        os.kill(os.getpid(), 9)
if os.environ["GUEST_WAY"] == "forkserver":
    os.register_at_fork(after_in_child=kill_once)
elif os.environ.get("SHMACC_ROLE") == "chief":
    kill_once()
"""


@pytest.mark.parametrize("action", ["SIG_IGN", "SIG_DFL"])
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_a_child_that_is_killed_before_it_reads_its_arguments_is_started_again(
    way: str, action: str, guest: Guests
) -> None:
    """Nobody reads the pipe any more, which is smaller than the arguments."""
    program = guest(
        "def lead(given): return len(given)",
        f"""
        signal.signal(signal.SIGPIPE, signal.{action})
        start(lead, args=(bytes(1_000_000),))
        """,
        way=way,
        env=beginning_with(KILLED_EARLY, guest),
    )
    ended = program.ends()
    assert ended["result"] == 1_000_000
    assert "was killed by SIGKILL, and is started again (1 of 3)" in ended.err


@pytest.mark.parametrize("end", ["return 'of the fork'", "raise LookupError('in the fork')"])
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_the_end_of_a_childs_fork_is_not_the_childs(way: str, end: str, guest: Guests) -> None:
    program = guest(
        f"""
        def lead():
            if once("begun"):
                if os.fork() == 0:
                    {end}
                os.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            return "started again"
        """,
        "start(lead)",
        way=way,
    )
    assert program.ends()["result"] == "started again"


@fork_and_command
def test_a_run_gets_the_status_of_a_child_that_is_traced(way: str, guest: Guests) -> None:
    """Its debugger waits for its end a moment later than the run sees the end."""
    program = guest(
        """
        def work(rank):
            assert once("begun"), "it was started again"
            mark("worker", os.getpid())
            marked("traced")
            os._exit(0)
        def lead():
            marked("seen by the tracer")
        """,
        way=way,
        workers=1,
    )
    pid = int(program.marked("worker"))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None) != 0:
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    program.mark("traced")
    while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.002)
    time.sleep(0.3)  # by then the run has seen the end, and was given no status
    os.waitpid(pid, _WALL)
    program.mark("seen by the tracer")
    assert program.ends().err == ""


@every_way
def test_status_255_is_no_kill(way: str, guest: Guests) -> None:
    program = guest(
        """
        def work(rank):
            assert once("begun"), "it was started again"
            sys.exit(-1)
        def lead():
            time.sleep(600)
        """,
        way=way,
        workers=1,
        grace=0.1,
    )
    ended = program.ends(255 if way == "command" else 1)
    assert "exited with status 255" in ended.err


# Limits of the kernel


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_run_starts_children_beside_a_descriptor_above_the_limit(way: str, guest: Guests) -> None:
    """The descriptor is a lock's, for example, and the limit was lowered when it was there."""
    script = 'exec 200>lock; ulimit -n 128; exec "$@"'
    program = guest(
        "def lead(): return 1",
        "start(lead)",
        way=way,
        launcher=prefixed("bash", "-c", script, "bash"),
    )
    assert program.ends()["result"] == 1


def test_a_worker_that_may_write_no_files_has_finished_when_it_returns(guest: Guests) -> None:
    program = guest(
        """
        import resource
        def work(rank):
            mark("worker", os.getpid())
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        def lead():
            until(lambda: gone(marked("worker")))
            return 1
        """,
        workers=1,
    )
    ended = program.ends()
    assert (ended["result"], ended.err) == (1, "")


def test_processors_are_given_to_a_child_whose_threads_end_meanwhile(guest: Guests) -> None:
    program = guest(
        """
        def work(rank): mark("processors", sorted(os.sched_getaffinity(0)))
        def lead(): return marked("processors")
        """,
        """
        listed = os.listdir
        def with_ended(path="."):
            return listed(path) + (["1073741824"] if path == "/proc/self/task" else [])
        os.listdir = with_ended
        start(lead, work)
        """,
        workers=1,
        cpus="spread",
    )
    assert program.ends()["result"] == str(sorted(os.sched_getaffinity(0)))


# Signals of the caller


def test_sigusr_goes_to_a_child_whose_name_is_not_ascii(guest: Guests) -> None:
    program = guest(
        r"""
        def lead():
            signal.signal(signal.SIGUSR1, lambda *_: mark("came"))
            with open("/proc/self/comm", "wb") as file:
                file.write(b"donn\xc3\xa9es")
            os.kill(os.getppid(), signal.SIGUSR1)
            marked("came")
            return 1
        """,
        """
        signal.signal(signal.SIGUSR1, lambda *_: tell(came=True))
        start(lead)
        """,
    )
    ended = program.ends()
    assert (ended["result"], ended["came"]) == (1, True)


@pytest.mark.parametrize("raises", [False, True], ids=["", "the first raises"])
def test_two_signals_that_end_a_run_reach_both_handlers(raises: bool, guest: Guests) -> None:
    program = guest(
        """
        def lead():
            signal.signal(signal.SIGHUP, lambda *_: mark("passed on"))
            mark("ready")
            time.sleep(600)
        """,
        f"""
        def handle(number, _):
            tell(came=number)
            if {raises} and number == signal.SIGHUP:
                raise LookupError("by the handler")
        for number in signal.SIGHUP, signal.SIGTERM:
            signal.signal(number, handle)
        with suppress(LookupError, shmacc.errors.CancelledError):
            start(lead)
        """,
        grace=30,
    )
    program.marked("ready")
    program.process.send_signal(signal.SIGHUP)
    program.marked("passed on")
    program.process.send_signal(signal.SIGTERM)
    ended = program.ends()
    assert ended.all("came") == [signal.SIGHUP, signal.SIGTERM]
    assert ended["error"] == ("LookupError" if raises else "CancelledError")


def test_a_handler_that_is_called_during_a_run_gets_a_frame(guest: Guests) -> None:
    program = guest(
        """
        def lead():
            os.kill(os.getppid(), signal.SIGUSR1)
            marked("came")
        """,
        """
        signal.signal(signal.SIGUSR1, lambda _, frame: mark("came", frame.f_lineno))
        start(lead)
        """,
    )
    program.ends()


# A forkserver that ends

KILLING_ITS_SERVER: Final = """
    def kill_server():
        server = os.getppid()
        os.kill(server, signal.SIGKILL)
        until(lambda: os.getppid() != server)

    def killed():
        if once("killed"):
            kill_server()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    def work(rank):
        mark(f"{rank} ready")
        marked("killed")
    def lead():
        marked("0 ready"), marked("1 ready")
        kill_server()
        mark("killed")
        return "done"
"""


@pytest.mark.parametrize("reaper", ["the kernel", "a thread"])
def test_a_forkserver_that_ended_is_started_again_though_others_reaped_it(
    reaper: str, guest: Guests
) -> None:
    program = guest(
        KILLING_ITS_SERVER,
        f"""
        from multiprocessing import forkserver
        if {reaper!r} == "the kernel":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        def reap():
            while True:
                with suppress(ChildProcessError, TypeError):  # it has no pid now
                    os.waitid(os.P_PID, forkserver._forkserver._forkserver_pid, os.WEXITED)
                time.sleep(0.01)
        forkserver.ensure_running()
        if {reaper!r} == "a thread":
            threading.Thread(target=reap, name="own", daemon=True).start()
        assert start(killed) == "done"
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{{server}}"))
        assert start(killed) == "done"
        """,
        way="forkserver",
    )
    program.ends()


def test_a_child_that_left_its_group_is_signalled_beside_what_has_stayed_in_it(
    guest: Guests,
) -> None:
    program = guest(
        """
        def lead():
            subprocess.Popen(["sleep", "600"])
            signal.signal(signal.SIGTERM, lambda *_: (mark("saved"), os._exit(0)))
            os.setpgid(0, os.getpgid(os.getppid()))
            mark("ready")
            time.sleep(600)
        """,
        "start(lead)",
        grace=30,
    )
    program.marked("ready")
    program.process.send_signal(signal.SIGTERM)
    program.ends(-signal.SIGTERM)
    assert (guest.folder / "saved").exists()


def test_children_go_on_when_their_forkserver_ends(guest: Guests) -> None:
    program = guest(
        KILLING_ITS_SERVER,
        "tell(result=shmacc.run(lead, work, workers=2, context=WAY))",
        way="forkserver",
    )
    ended = program.ends()
    assert (ended["result"], ended.err) == ("done", "")


def test_a_signal_to_the_callers_group_leaves_a_forkservers_children_the_time_to_save(
    guest: Guests,
) -> None:
    """A shell, make or timeout(1) signal the group, to which the forkserver belongs."""
    program = guest(
        """
        def save_at_end(role):
            came = []
            signal.signal(signal.SIGTERM, lambda *_: came.append(1))
            mark(f"{role} ready")
            until(lambda: came)
            time.sleep(0.3)  # it saves
            mark(f"{role} saved", len(came))
        def work(rank): save_at_end(rank)
        def lead(): save_at_end("chief")
        """,
        way="forkserver",
    )
    for role in "chief", "0", "1":
        program.marked(f"{role} ready")
    os.killpg(program.process.pid, signal.SIGTERM)
    program.ends(-signal.SIGTERM)
    for role in "chief", "0", "1":
        assert (guest.folder / f"{role} saved").exists()


TELLING_ITS_MASK: Final = """
import os, signal
if "SHMACC_ROLE" in os.environ:
    from helpers.guest_program import tell
    tell(blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_all_spawned_children_are_executed_with_the_ending_signals_blocked(guest: Guests) -> None:
    """The first one starts the tracker of multiprocessing, which unblocks two of them."""
    program = guest(
        """
        def work(rank): pass
        def lead(): pass
        """,
        way="spawn",
        env=beginning_with(TELLING_ITS_MASK, guest),
    )
    all_blocked = program.ends().all("blocked")
    assert len(all_blocked) == 3
    for blocked in all_blocked:
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= set(blocked)


def test_a_handler_that_sets_itself_again_is_heard_again(guest: Guests) -> None:
    """Programs that handle SIGTSTP do so. Only a run that hears the signal stops its children."""
    program = guest(
        """
        def lead():
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            mark("ready", os.getpid())
            marked("2")
            return "done"
        """,
        """
        came = []
        def stopped(): return "State:\\tT" in open(f"/proc/{marked('ready')}/status").read()
        def handle(number, _):
            signal.signal(number, handle)
            until(stopped, 5)
            came.append(number)
            mark(str(len(came)))
        signal.signal(signal.SIGTSTP, handle)
        start(lead)
        """,
    )
    program.marked("ready")
    for event in "1", "2":
        program.process.send_signal(signal.SIGTSTP)
        program.marked(event)
    assert program.ends()["result"] == "done"


def test_what_unpickling_a_result_starts_has_the_programs_signal_mask(guest: Guests) -> None:
    program = guest(
        """
        def started():
            text = subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)
            return text.split()[1]
        class Result:
            def __reduce__(self): return started, ()
        def lead(): return Result()
        """,
        """
        tell(own=started())
        start(lead)
        """,
    )
    ended = program.ends()
    assert ended["result"] == ended["own"]
