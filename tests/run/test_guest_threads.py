"""A program's threads may reap children, call `run` at the same time, or wait for signals."""

import signal

import pytest
from helpers.denied_calls import needs_denials
from helpers.guest import KILLED_ONCE, Guests

# Ways in which a program takes its children's exit statuses. Each ends when `over` is set.
REAPERS = {
    "SIGCHLD ignored": """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        over = threading.Event()
        """,
    "a handler of SIGCHLD": """
        def reap(*_):
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        signal.signal(signal.SIGCHLD, reap)
        over = threading.Event()
        """,
    "a thread in os.wait": """
        over = threading.Event()
        def reap():
            while not over.is_set():
                try:
                    os.wait()
                except ChildProcessError:
                    time.sleep(0.0005)
        threading.Thread(target=reap, name="own reaper", daemon=True).start()
        """,
    "a thread that polls": """
        over = threading.Event()
        def reap():
            while not over.is_set():
                with suppress(ChildProcessError):
                    os.waitpid(-1, os.WNOHANG)
                time.sleep(0.0005)
        threading.Thread(target=reap, name="own reaper", daemon=True).start()
        """,
}
ENDS = "start(lead, work); over.set()"
every_reaper = pytest.mark.parametrize("reaper", REAPERS.values(), ids=REAPERS)


@every_reaper
def test_a_run_beside_a_reaper_goes_on_after_kills(reaper: str, guest: Guests) -> None:
    assert guest(KILLED_ONCE, reaper, ENDS).ends()["result"] == 1.5


@pytest.mark.parametrize("reaper", ["SIGCHLD ignored", "a thread in os.wait"])
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_each_start_method_beside_a_reaper_goes_on_after_kills(
    reaper: str, way: str, guest: Guests
) -> None:
    assert guest(KILLED_ONCE, REAPERS[reaper], ENDS, way=way).ends()["result"] == 1.5


@every_reaper
def test_a_run_beside_a_reaper_raises_the_chiefs_exception(reaper: str, guest: Guests) -> None:
    program = guest(
        """
        def work(rank): time.sleep(600)
        def lead(): raise ValueError("by the chief")
        """,
        reaper,
        "start(lead, work)",
    )
    ended = program.ends(1)
    assert (ended["error"], ended["text"]) == ("ValueError", "by the chief")


@every_reaper
def test_a_run_beside_a_reaper_counts_kills(reaper: str, guest: Guests) -> None:
    """A reaper may take the exit status; a child without an answer then counts as killed."""
    program = guest(
        """
        def work(rank): os.kill(os.getpid(), signal.SIGKILL)
        def lead(): time.sleep(600)
        """,
        reaper,
        "start(lead, work)",
        restarts=2,
    )
    ended = program.ends(1)
    assert ended["error"] == "WorkerDiedError"
    assert "3 times" in ended["text"]
    again = [line for line in ended.err.splitlines() if line.endswith("started again (2 of 2)")]
    assert any(line.startswith(ended["text"].partition(" (pid")[0]) for line in again)


@needs_denials
@pytest.mark.parametrize(("reaper", "way"), [
    *((reaper, "fork") for reaper in ("none", "SIGCHLD ignored", "a thread in os.wait")),
    *(("none", way) for way in ("spawn", "forkserver")),
])  # fmt: skip
def test_a_run_works_on_a_kernel_without_pidfd(reaper: str, way: str, guest: Guests) -> None:
    """The kernel is older than 5.3, or a filter of system calls refuses pidfd."""
    deny = """
        import errno
        from helpers.denied_calls import deny
        for call in ("pidfd_open", "pidfd_send_signal"):
            deny(call, errno.ENOSYS)
        """
    begins = REAPERS.get(reaper, "over = threading.Event()")
    assert guest(KILLED_ONCE, deny, begins, ENDS, way=way).ends()["result"] == 1.5


def test_a_run_leaves_the_program_the_exit_statuses_of_its_own_children(guest: Guests) -> None:
    main = """
        statuses = []
        def own():
            while not over.is_set():
                statuses.append(subprocess.Popen(["sh", "-c", "exit 7"]).wait())
        over = threading.Event()
        thread = threading.Thread(target=own, name="own")
        thread.start()
        shmacc.run(lead, work, workers=2, context=WAY)
        over.set()
        thread.join()
        tell(statuses=sorted(set(statuses)))
        """
    assert guest(KILLED_ONCE, main).ends()["statuses"] == [7]


def test_a_run_does_not_change_the_programs_environment(guest: Guests) -> None:
    main = """
        wrong, before = [], dict(os.environ)
        def look():
            while not over.is_set():
                if os.environ != before:
                    wrong.append({key: os.environ.get(key) for key in os.environ
                                  if os.environ.get(key) != before.get(key)})
        over = threading.Event()
        thread = threading.Thread(target=look, name="own")
        thread.start()
        start(lead, work)
        over.set()
        thread.join()
        tell(wrong=wrong[:3])
        """
    assert guest(KILLED_ONCE, main).ends()["wrong"] == []


# Several runs at once

THREADS = """
    def in_threads(number, main=None):
        results = {}
        def call(name):
            try:
                results[name] = shmacc.run(lead, work, workers=2, context=WAY)
            except BaseException as error:
                results[name] = repr(error)
        threads = [threading.Thread(target=call, args=(f"side {n}",)) for n in range(number)]
        for thread in threads:
            thread.start()
        if main:
            call("main")
        for thread in threads:
            thread.join()
        return sorted(results.values(), key=str)
"""


@pytest.mark.parametrize(
    ("way", "side", "main"),
    [("fork", 2, False), ("fork", 1, True), ("spawn", 1, True), ("forkserver", 2, False)],
)
def test_concurrent_runs_have_their_results(way: str, side: int, main: bool, guest: Guests) -> None:
    program = guest(
        KILLED_ONCE.replace("{os.getppid()}", "{os.environ['SHMACC_NAMESPACE']}") + THREADS,
        f"with unchanged():\n    tell(results=in_threads({side}, {main}))",
        way=way,
    )
    assert program.ends()["results"] == [1.5, 1.5]


DEAF = """
    def work(rank): pass
    def lead(): return 1
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_program_after_three_runs(number: signal.Signals, guest: Guests) -> None:
    program = guest(
        DEAF + THREADS,
        f"""
        for _ in range(3):
            with unchanged():
                tell(results=in_threads(2, True))
        os.kill(os.getpid(), {int(number)})
        time.sleep(600)
        """,
    )
    ended = program.ends(None)
    assert ended.all("results") == [[1, 1, 1]] * 3
    assert ended.status == -number


@pytest.mark.parametrize("first", ["main", "side"])
def test_runs_at_once_may_end_in_any_order(first: str, guest: Guests) -> None:
    """Each run restores only what it has set. The main thread's run may end first or last."""
    program = guest(
        """
        def lead(name):
            mark(f"{name} began")
            marked(f"{name} may end")
            return name
        """,
        f"""
        first = {first!r}
        def beside():
            tell(side=shmacc.run(lead, args=("side",), context=WAY))
            mark("main may end")
        def let_it():
            marked("side began"), marked("main began")
            mark(f"{{first}} may end")
        came = []
        signal.signal(signal.SIGTERM, lambda *_: came.append(1))
        thread = threading.Thread(target=beside, name="own")
        thread.start()
        other = threading.Thread(target=let_it, name="own")
        other.start()
        tell(main=shmacc.run(lead, args=("main",), context=WAY))
        mark("side may end")
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        tell(came=came)
        """,
    )
    ended = program.ends()
    assert (ended["side"], ended["main"], ended["came"]) == ("side", "main", [1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_program_with_runs_in_threads(number: signal.Signals, guest: Guests) -> None:
    program = guest(
        """
        def lead(name):
            shmacc.ConditionalAccumulator("f4", (), "kept")
            mark(name), time.sleep(600)
        """,
        """
        for name in "one", "two":
            threading.Thread(
                target=shmacc.run, args=(lead,),
                kwargs=dict(context=WAY, args=(name,)), daemon=True).start()
        time.sleep(600)
        """,
    )
    program.marked("one"), program.marked("two")
    program.process.send_signal(number)
    assert program.ends(None).status in {-number, 1, 130}


def test_a_run_in_a_coroutines_thread_leaves_the_event_loops_handlers(guest: Guests) -> None:
    program = guest(
        KILLED_ONCE,
        """
        import asyncio
        async def main():
            came = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, came.set)
            with unchanged():
                one, two = await asyncio.gather(
                    asyncio.to_thread(shmacc.run, lead, work, workers=2, context=WAY),
                    asyncio.create_subprocess_exec("sh", "-c", "exit 7"))
                tell(status=await two.wait(), result=one)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(came.wait(), 60)
            tell(came=True)
        asyncio.run(main())
        """,
    )
    ended = program.ends()
    assert (ended["status"], ended["result"], ended["came"]) == (7, 1.5, True)


# A thread that waits for signals

SIGWAIT = """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    def wait():
        signal.sigwait({signal.SIGTERM})
        mark("terminated")
    threading.Thread(target=wait, name="own waiter", daemon=True).start()
"""
TERMINATED = """
    os.kill(os.getpid(), signal.SIGTERM)
    marked("terminated")
"""
ENDS_OF_RUNS = {
    "returns": "start(lead, work)",
    "raises": """
    with suppress(ValueError):
        start(fail, work)""",
    "is refused": """
    with suppress(shmacc.errors.InvalidArgumentError):
        start(lead, None, workers=3)""",
    "cannot start": """
    import resource
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, shmacc.errors.ShmaccError):
        with unchanged():
            resource.setrlimit(resource.RLIMIT_NOFILE, (4, limit[1]))
            try:
                shmacc.run(lead, work, workers=2, context=WAY)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)""",
}


@pytest.mark.parametrize(
    ("end", "way"),
    [*((end, "fork") for end in ENDS_OF_RUNS), ("returns", "spawn"), ("returns", "forkserver")],
)
def test_a_blocked_signal_stays_blocked_after_a_run(end: str, way: str, guest: Guests) -> None:
    functions = KILLED_ONCE + "\n    def fail(): raise ValueError('end')\n"
    guest(functions, SIGWAIT, ENDS_OF_RUNS[end], TERMINATED, way=way).ends()


def test_workers_of_a_program_that_blocks_sigterm_end_at_once(guest: Guests) -> None:
    """Workers do not inherit the blocked signal, so SIGTERM ends them, not SIGKILL."""
    program = guest(
        """
        def work(rank):
            signal.signal(signal.SIGTERM, lambda *_: (mark(f"ended{rank}"), os._exit(0)))
            mark(f"ready{rank}")
            time.sleep(600)
        def lead():
            marked("ready0"), marked("ready1")
        """,
        SIGWAIT,
        "start(lead, work, grace=1)",
        TERMINATED,
    )
    program.ends()
    assert {path.name for path in guest.folder.glob("ended*")} == {"ended0", "ended1"}


def test_an_event_loop_gets_only_its_own_signals(guest: Guests) -> None:
    """A forked child has inherited the descriptor that wakes the loop."""
    program = guest(
        """
        import asyncio
        def lead():
            os.kill(os.getppid(), signal.SIGUSR1)
            marked("passed on")
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: tell(came=True))
            before = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *_: mark("passed on"))
            shmacc.run(lead, context="fork")
            signal.signal(signal.SIGUSR1, before)
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
        """,
        "asyncio.run(main())",
    )
    assert program.ends().all("came") == [True]
