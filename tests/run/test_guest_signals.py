"""Exceptions of a program's handlers end a run in order; signals reach whom they are for."""

import os
import signal
from typing import Any, Final

import pytest
from helpers.guest import Guests, every_start_method, fork_and_command

# A handler that raises at each moment of a run

SWEEP: Final = """
    class Alarm(BaseException):
        pass
    class OrderlyAlarm(Exception):
        pass

    def call():
        return run(lead, work, workers=2, context=WAY, grace=0.05)

    def raises(kind):
        def handle(*_):
            frame = sys._getframe()
            while frame is not None:
                if frame.f_code is call.__code__:
                    raise kind
                frame = frame.f_back
        return handle

    def sweep(moments, seconds, repeat=0.0):
        # Runs, interrupted at so many moments from their begin to the given seconds.
        global run
        import numpy  # which stands no interruption
        run = shmacc.run
        ends = {"raised": 0, "returned": 0}
        for moment in range(moments):
            kind = (Alarm, OrderlyAlarm)[moment % 2]
            with unchanged():
                signal.signal(signal.SIGALRM, raises(kind))
                signal.setitimer(signal.ITIMER_REAL, (moment + 1) * seconds / moments, repeat)
                try:
                    result = call()
                except kind:
                    ends["raised"] += 1
                else:
                    assert result == 1, result
                    ends["returned"] += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
        tell(**ends)
"""
QUICK: Final = """
    def work(rank):
        pass
    def lead():
        shmacc.ConditionalAccumulator("f4", (), "kept")
        return 1
"""
# This worker does not end by SIGTERM, so it is killed after the grace.
SLOW_TO_END: Final = """
    def work(rank):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark(f"{os.getppid()} {os.environ['SHMACC_NAMESPACE']} {rank}")
        time.sleep(600)
    def lead():
        for rank in 0, 1:
            marked(f"{os.getppid()} {os.environ['SHMACC_NAMESPACE']} {rank}")
        return 1
"""


@pytest.mark.parametrize("repeat", [0.0, 0.004], ids=["once", "again and again"])
@pytest.mark.parametrize(
    ("roles", "seconds"), [(QUICK, 0.06), (SLOW_TO_END, 0.15)], ids=["quick", "slow to end"]
)
def test_an_exception_in_a_handler_at_any_moment_ends_a_run_in_order(
    roles: str, seconds: float, repeat: float, guest: Guests
) -> None:
    ended = guest(roles + SWEEP, f"sweep(20, {seconds}, {repeat})").ends()
    assert ended["raised"] > 0


@pytest.mark.parametrize(("way", "seconds"), [("spawn", 0.6), ("forkserver", 0.3)])
def test_a_handlers_exception_ends_a_run_with_each_start_method(
    way: str, seconds: float, guest: Guests
) -> None:
    assert guest(QUICK + SWEEP, f"sweep(4, {seconds})", way=way).ends()["raised"] > 0


def test_a_handlers_error_is_raised_though_a_child_fails_meanwhile(guest: Guests) -> None:
    program = guest(
        """
        def work(rank):
            signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), os._exit(0)))
            if rank == 1:
                marked("sent")
                raise ValueError("by the worker")
            time.sleep(600)
        def lead():
            os.kill(os.getppid(), signal.SIGALRM)
            mark("sent")
            time.sleep(600)
        """,
        """
        def handle(*_):
            raise LookupError("by the handler")
        signal.signal(signal.SIGALRM, handle)
        start(lead, work)
        """,
    )
    assert program.ends(1)["error"] == "LookupError"


# SIGUSR1 and SIGUSR2

LISTENING: Final = """
    def listen(role):
        came = []
        for number in signal.SIGUSR1, signal.SIGUSR2:
            signal.signal(number, lambda number, _: came.append(number))
        mark(f"{role} ready", os.getppid())
        until(lambda: came)
        time.sleep(0.05)
        mark(f"{role} got", came)

    def work(rank):
        listen(rank) if rank == 0 else (mark("1 ready"), time.sleep(600))

    def lead():
        listen("chief")
        marked("0 got")
        return "done"
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@every_start_method
def test_sigusr_goes_to_children_that_handle_it_then_to_the_program(
    number: signal.Signals, way: str, guest: Guests
) -> None:
    program = guest(
        LISTENING,
        """
        came = []
        for number in signal.SIGUSR1, signal.SIGUSR2:
            signal.signal(number, lambda number, _: came.append(number))
        start(lead, work)
        tell(came=came)
        """,
        way=way,
        grace=0,
    )
    _send_when_ready(program, number)
    ended = program.ends()
    assert ended["result"] == "done"
    assert ended["came"] == [number]
    assert ended.err == "", "no child was killed, and started again"
    for role in "chief", "0":
        assert (guest.folder / f"{role} got").read_text() == str([int(number)])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_command_passes_sigusr_on_and_goes_on(number: signal.Signals, guest: Guests) -> None:
    """A batch system sends such a signal before a job's time is over: the job saves and goes on."""
    program = guest(LISTENING, way="command", grace=0)
    _send_when_ready(program, number)
    assert program.ends()["result"] == "done"


def _send_when_ready(program: Any, number: signal.Signals) -> None:
    for role in "chief", "0", "1":
        program.marked(f"{role} ready")
    program.process.send_signal(number)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_sigusr_kills_no_child_that_is_still_starting(way: str, guest: Guests) -> None:
    program = guest(
        """
        def work(rank): pass
        def lead(): return "done"
        """,
        """
        came, over = [], threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
        def send():
            while not over.is_set():
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.002)
        thread = threading.Thread(target=send, name="own")
        thread.start()
        start(lead, work)
        over.set()
        thread.join()
        tell(came=len(came))
        """,
        way=way,
    )
    ended = program.ends()
    assert (ended["result"], ended.err) == ("done", "")
    assert ended["came"] > 0


# Signals that end a run

SAVING: Final = """
    def save_at_end(role):
        came = []
        signal.signal(signal.SIGTERM, lambda *_: came.append(1))
        signal.signal(signal.SIGINT, lambda *_: came.append(1))
        mark(f"{role} ready", os.getpid())
        until(lambda: came)
        time.sleep(0.5)  # it saves
        mark(f"{role} saved")

    def work(rank): save_at_end(rank)
    def lead(): save_at_end("chief")
"""
ROLES: Final = ("chief", "0", "1")


@pytest.mark.parametrize("way", ["fork", "spawn", "command"])
def test_a_signal_to_all_at_once_leaves_children_the_time_to_save(way: str, guest: Guests) -> None:
    """`systemctl stop` sends the signal to each process of the unit."""
    program = guest(SAVING, way=way)
    pids = [int(program.marked(f"{role} ready")) for role in ROLES]
    for pid in (program.process.pid, *pids):
        os.kill(pid, signal.SIGTERM)
    assert program.ends(None).status != 0
    for role in ROLES:
        assert (guest.folder / f"{role} saved").exists()


def test_a_handler_that_exits_decides_the_programs_status(guest: Guests) -> None:
    program = guest(
        """
        def lead():
            mark("ready")
            time.sleep(600)
        """,
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        start(lead)
        """,
    )
    program.marked("ready")
    program.process.send_signal(signal.SIGTERM)
    program.ends(9)


def test_a_handler_that_the_program_sets_during_a_run_stays(guest: Guests) -> None:
    program = guest(
        """
        def lead():
            os.kill(os.getppid(), signal.SIGALRM)
            marked("set")
            return 1
        """,
        """
        def other(*_): tell(came=True)
        def handle(*_):
            signal.signal(signal.SIGTERM, other)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            mark("set")
        signal.signal(signal.SIGALRM, handle)
        shmacc.run(lead, context=WAY)
        tell(handlers=[signal.getsignal(signal.SIGTERM) is other,
                       signal.getsignal(signal.SIGHUP) is signal.SIG_IGN])
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    ended = program.ends()
    assert ended["handlers"] == [True, True]
    assert ended["came"]


@fork_and_command
def test_a_stopped_worker_is_ended_within_the_grace(way: str, guest: Guests) -> None:
    """The worker must be continued, so that it sees its SIGTERM."""
    program = guest(
        """
        def work(rank):
            signal.signal(signal.SIGTERM, lambda *_: (mark("ended"), os._exit(0)))
            mark("ready", os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        def lead():
            pid = marked("ready")
            until(lambda: "State:\\tT" in open(f"/proc/{pid}/status").read())
        """,
        way=way,
        workers=1,
        grace=0.5,
    )
    program.ends()
    assert (guest.folder / "ended").exists()


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_run_within_a_run_ends_with_it(way: str, guest: Guests) -> None:
    program = guest(
        """
        def inner_work(rank): mark(f"inner{rank}"), time.sleep(600)
        def inner(): time.sleep(600)
        def lead(): shmacc.run(inner, inner_work, workers=2, context=WAY)
        """,
        "start(lead)",
        way=way,
    )
    program.marked("inner0"), program.marked("inner1")
    program.process.send_signal(signal.SIGTERM)
    program.ends(-signal.SIGTERM)


# Handlers of C libraries, and processes that handlers start


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_handler_of_a_library_is_called_during_a_run_and_stays(way: str, guest: Guests) -> None:
    program = guest(
        """
        import faulthandler
        def lead():
            for number in signal.SIGUSR1, signal.SIGUSR2:
                signal.signal(number, signal.SIG_IGN)
                os.kill(os.getppid(), number)
            marked("handled")
        """,
        """
        signal.signal(signal.SIGUSR2, lambda *_: mark("handled"))
        first, second = open("first", "w"), open("second", "w")
        faulthandler.register(signal.SIGUSR1, first)
        faulthandler.register(signal.SIGUSR2, second, chain=True)
        with unchanged():
            shmacc.run(lead, context=WAY)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        """,
        way=way,
    )
    program.ends()
    assert (guest.folder / "first").read_text().count("(most recent call first)") == 2
    assert (guest.folder / "second").read_text().count("(most recent call first)") == 1


def test_a_process_that_a_handler_starts_has_the_programs_signal_mask(guest: Guests) -> None:
    program = guest(
        """
        def blocked(): return open("/proc/thread-self/status").read().split("SigBlk:")[1].split()[0]
        def lead():
            os.kill(os.getppid(), signal.SIGALRM)
            marked("handled")
        """,
        """
        def handle(*_):
            pid = os.fork()
            if not pid:
                tell(forked=blocked())
                os._exit(0)
            os.waitpid(pid, 0)
            text = subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)
            tell(executed=text.split()[1])
            mark("handled")
        signal.signal(signal.SIGALRM, handle)
        tell(own=blocked())
        shmacc.run(lead, context=WAY)
        """,
    )
    ended = program.ends()
    assert ended["forked"] == ended["executed"] == ended["own"]


def test_a_forkserver_that_a_run_has_started_has_the_programs_signal_mask(guest: Guests) -> None:
    program = guest(
        """
        import multiprocessing
        from multiprocessing import resource_tracker
        def blocked(): return open("/proc/thread-self/status").read().split("SigBlk:")[1].split()[0]
        def lead(): return 1
        def other(): tell(others=blocked())
        """,
        """
        resource_tracker.ensure_running()
        tell(own=blocked())
        shmacc.run(lead, context="forkserver")
        process = multiprocessing.get_context("forkserver").Process(target=other)
        process.start()
        process.join()
        """,
        way="forkserver",
    )
    ended = program.ends()
    assert ended["others"] == ended["own"]
