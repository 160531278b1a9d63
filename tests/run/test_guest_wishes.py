"""Runs offer what users of torchrun ask for: threads, processors, logs and prefixes."""

import os
import re
from typing import Any, Final

import pytest
from helpers.guest import SHMACC_RUN, Guests, fork_and_command
from helpers.support import run_to_end

VARIABLES: Final = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
PROCESSORS: Final = len(os.sched_getaffinity(0))
three_ways: Final = pytest.mark.parametrize("way", ["fork", "spawn", "command"])

# Threads

THREADS: Final = f"""
    VARIABLES = {VARIABLES}
    def threads(role):
        # The environment at the start of the process, when NumPy reads it.
        executed = dict(each.split("=", 1) for each in
                        open("/proc/self/environ").read().split("\\0") if "=" in each)
        found = [executed.get(name) for name in VARIABLES]
        tell(**{{role: found, "same": found == [os.environ.get(name) for name in VARIABLES]}})
    def work(rank):
        threads(f"worker {{rank}}")
        mark(f"told {{rank}}")
    def lead():
        threads("chief")
        for rank in range(int(os.environ["SHMACC_WORKERS"])):
            marked(f"told {{rank}}")
"""


SHARE: Final = str(max(1, PROCESSORS // 2))


@pytest.mark.parametrize(("way", "threads", "found"), [
    ("spawn", {"threads": 3}, "3"), ("command", {"threads": 3}, "3"),
    ("spawn", {"threads": "share"}, SHARE), ("command", {"threads": "share"}, SHARE),
    ("spawn", {}, None), ("command", {}, SHARE), ("command", {"threads": "none"}, None),
])  # fmt: skip
def test_each_child_is_executed_with_its_number_of_threads(
    way: str, threads: dict[str, Any], found: str | None, guest: Guests
) -> None:
    """`run` sets no number unless asked to; the command shares the processors."""
    ended = guest(THREADS, way=way, grace=60, **threads).ends()
    assert all(ended.all("same"))
    for role in "chief", "worker 0", "worker 1":
        assert ended[role] == [found] * 4


def test_children_of_a_program_on_one_processor_have_one_thread(guest: Guests) -> None:
    os.sched_setaffinity(0, {min(before := os.sched_getaffinity(0))})
    try:
        ended = guest(THREADS, way="spawn", grace=60, threads="share").ends()
    finally:
        os.sched_setaffinity(0, before)
    assert ended["chief"] == ended["worker 1"] == ["1"] * 4


def test_a_chief_alone_may_use_all_processors(guest: Guests) -> None:
    ended = guest(THREADS, "start(lead)", way="spawn", threads="share").ends()
    assert ended["chief"] == [str(PROCESSORS)] * 4


@pytest.mark.parametrize(("threads", "found"), [(None, "7"), (3, "3")])
def test_omp_num_threads_counts_unless_an_option_sets_a_number(
    threads: int | None, found: str, guest: Guests
) -> None:
    ended = guest(
        THREADS, way="command", grace=60, threads=threads, env={"OMP_NUM_THREADS": "7"}
    ).ends()
    assert ended["chief"][0] == ended["worker 1"][0] == found


def test_a_worker_that_is_started_again_has_the_same_number_of_threads(guest: Guests) -> None:
    program = guest(
        THREADS.replace("threads(f", "once(f'k{rank}') and os.kill(os.getpid(), 9); threads(f"),
        way="spawn",
        grace=60,
        threads=5,
    )
    ended = program.ends()
    assert ended["worker 0"] == ["5"] * 4


# Processors

SPREAD: Final = """
    first = sorted(os.sched_getaffinity(0))  # when the program is read
    def work(rank):
        tell(**{f"worker {rank}": [first, sorted(os.sched_getaffinity(0))]})
        if once(f"killed {rank}"):
            os.kill(os.getpid(), 9)
        mark(f"told {rank}")
    def lead():
        tell(chief=sorted(os.sched_getaffinity(0)))
        for rank in range(int(os.environ["SHMACC_WORKERS"])):
            marked(f"told {rank}")
"""


@pytest.mark.skipif(PROCESSORS < 2, reason="needs two processors")
@three_ways
def test_workers_have_processors_of_their_own(way: str, guest: Guests) -> None:
    ended = guest(SPREAD, way=way, cpus="spread", grace=60).ends()
    own = []
    for rank in range(2):
        first, again = ended.all(f"worker {rank}")
        assert first == again, "also when it is started again"
        if way != "fork":
            assert first[0] == first[1], "before the program is read"
        own.append(set(first[1]))
    assert own[0] & own[1] == set()
    assert own[0] | own[1] <= os.sched_getaffinity(0)
    assert all(own)
    assert set(ended["chief"]) == os.sched_getaffinity(0)


def test_more_workers_than_processors_are_refused_with_spread(guest: Guests) -> None:
    ended = guest(SPREAD, cpus="spread", workers=PROCESSORS + 1).ends(1)
    assert ended["error"] == "InvalidArgumentError"
    assert f"{PROCESSORS + 1} workers" in ended["text"]


# Logs

LOGGED: Final = """
    def say(role):
        print("out of", role)
        sys.stdout.flush()
        os.write(2, f"err of {role}\\n".encode())
        subprocess.run(["echo", "program of " + role])
    def work(rank):
        say(f"worker {rank}")
        if rank == 1 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        mark(f"done {rank}")
    def lead():
        say("chief")
        marked("done 0"), marked("done 1")
"""


@three_ways
def test_each_role_has_log_files_of_its_own(way: str, guest: Guests) -> None:
    logs = guest.folder / "new" / "logs"
    ended = guest(LOGGED, way=way, log_dir=str(logs), grace=60).ends()
    assert {path.name for path in logs.iterdir()} == {
        f"{role}.{stream}"
        for role in ("chief", "worker-0", "worker-1")
        for stream in ("out", "err")
    }
    for role, times in (("chief", 1), ("worker 0", 1), ("worker 1", 2)):
        base = logs / role.replace(" ", "-")
        out = f"out of {role}\nprogram of {role}\n"
        assert base.with_suffix(".out").read_text() == out * times, "appended at each start"
        assert base.with_suffix(".err").read_text() == f"err of {role}\n" * times
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert "worker 1" in line
    assert "started again" in line


def test_logs_of_the_next_run_are_appended(guest: Guests) -> None:
    logs = guest.folder / "logs"
    program = guest(
        'def lead(): print("line")',
        "for _ in range(2): shmacc.run(lead, context=WAY, log_dir=LOGS)".replace(
            "LOGS", f"__import__('pathlib').Path({str(logs)!r})"
        ),
    )
    program.ends()
    assert (logs / "chief.out").read_text() == "line\n" * 2


def test_a_log_dir_that_cannot_be_made_is_an_error(guest: Guests) -> None:
    (guest.folder / "file").touch()
    program = guest("def lead(): pass", "start(lead)", log_dir=str(guest.folder / "file" / "logs"))
    assert "logs" in program.ends(1)["text"]


# Prefixes

TALKING: Final = r"""
    def work(rank):
        for number in range(100):
            print(f"{number} of", end=" ", flush=True)
            print(f"worker {rank}", flush=True)
        print("err", file=sys.stderr)
        os.write(1, b"bytes \xff\n" + b"x" * 100_000 + b"\nno end")
    def lead():
        print("the chief")
        print("err", file=sys.stderr)
"""


def test_the_command_writes_the_role_before_each_line(guest: Guests) -> None:
    ended = guest(TALKING, way="command", grace=60).ends()
    out = (guest.folder / "out").read_bytes()
    lines = out.splitlines()
    assert b"chief: the chief" in lines
    for rank in range(2):
        head = b"worker %d: " % rank
        own = [line.removeprefix(head) for line in lines if line.startswith(head)]
        assert own[:100] == [b"%d of worker %d" % (number, rank) for number in range(100)]
        assert own[100:] == [b"bytes \xff", b"x" * 100_000, b"no end"]
    assert len(lines) == 1 + 2 * 103
    assert sorted(ended.err.splitlines()) == ["chief: err", "worker 0: err", "worker 1: err"]
    assert "\x1b" not in ended.out + ended.err


def test_the_command_writes_no_prefix_if_asked(guest: Guests) -> None:
    path = guest.write("program.py", 'def work(rank): print("w")\ndef lead(): print("c")')
    ended = guest.command(
        [SHMACC_RUN, "--no-prefix", "--workers", "2", "--grace", "60", str(path)], way="command"
    ).ends()
    assert sorted(ended.out.splitlines()) == ["c", "w", "w"]


def test_the_command_writes_no_prefix_where_one_process_writes(guest: Guests) -> None:
    program = guest('def lead(): print("c")', "start(lead)", way="command", workers=0)
    assert program.ends().out == "c\n"


def test_a_line_that_a_kill_cuts_off_is_not_lost(guest: Guests) -> None:
    program = guest(
        """
        def work(rank):
            if once("killed"):
                os.write(1, b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            print("whole")
            mark("done")
        def lead(): marked("done")
        """,
        way="command",
        workers=1,
        grace=60,
    )
    assert program.ends().out == "worker 0: half\nworker 0: whole\n"


@pytest.mark.parametrize("stream", ["out", "err"])
def test_a_reader_that_leaves_does_not_hold_up_the_command(stream: str, guest: Guests) -> None:
    """For example `shmacc-run ... | head -1`: a writer gets an error, as without the command."""
    redirected = "2>&1 >/dev/null" if stream == "err" else "2>/dev/null"
    program = guest(
        f"""
        def work(rank):
            with suppress(BrokenPipeError):
                while True:
                    print("line", file=sys.std{stream}, flush=True)
        def lead(): work(0)
        """,
        way="command",
        launcher=lambda command: [
            *("sh", "-c", f'"$@" {redirected} | head -1; exit 0', "sh"),
            *command,
        ],
        grace=1,
    )
    program.ends()


@pytest.mark.parametrize("blocks", [True, False])
def test_a_slow_reader_gets_all_lines(blocks: bool, guest: Guests) -> None:
    """Another process that writes to the pipe, such as Node.js, may make it non-blocking."""
    setting = f"import os, sys; os.set_blocking(1, {blocks}); os.execvp(sys.argv[1], sys.argv[1:])"
    program = guest(
        """
        def work(rank): print("\\n".join(["line " * 20] * 5000))
        def lead(): work(0)
        """,
        way="command",
        launcher=lambda command: [
            *("sh", "-c", 'python3 -c "$0" "$@" | (sleep 1; wc -l)', setting, *command)
        ],
        grace=60,
    )
    assert program.ends().out.split() == ["15000"]


# What the command prints and logs


def test_the_verbose_command_prints_pids_and_roles_of_each_start(guest: Guests) -> None:
    path = guest.write(
        "program.py",
        """
        def say(role): mark(role, os.getpid())
        def work(rank):
            again = not once(f"killed {rank}")
            say(f"worker {rank}{' again' * again}")
            again or os.kill(os.getpid(), 9)
            mark(f"done {rank}")
        def lead(): say("chief"), marked("done 0"), marked("done 1")
        """,
    )
    program = guest.command(
        [SHMACC_RUN, "--verbose", "--workers", "2", "--grace", "60", str(path)], way="command"
    )
    ended = program.ends()
    for role in ("chief", "worker 0", "worker 1", "worker 0 again", "worker 1 again"):
        pid = (guest.folder / role).read_text()
        name = role.removesuffix(" again")
        told = [line for line in ended.err.splitlines() if re.search(rf"\b{pid}\b", line)]
        assert any(name in line and "killed" not in line for line in told), ended.err
    assert ended.out == ""


@fork_and_command
def test_starts_are_logged_only_if_asked(way: str, guest: Guests) -> None:
    program = guest("def work(rank): pass\ndef lead(): pass", way=way, grace=60)
    assert program.ends().err == ""


def test_the_logger_has_pids_and_roles_of_each_start(guest: Guests) -> None:
    program = guest(
        """
        def work(rank): mark(f"worker {rank}", os.getpid())
        def lead(): mark("chief", os.getpid()), marked("worker 0"), marked("worker 1")
        """,
        """
        import logging
        logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
        start(lead, work)
        """,
        grace=60,
    )
    lines = program.ends().err.splitlines()
    for role in "chief", "worker 0", "worker 1":
        pid = (guest.folder / role).read_text()
        assert any(
            line.startswith("shmacc INFO") and role in line and re.search(rf"\b{pid}\b", line)
            for line in lines
        ), lines


def test_the_command_names_an_option_whose_value_it_refuses() -> None:
    for arguments in (["--threads", "many"], ["--cpus", "all"], ["--threads", "0"]):
        ran = run_to_end([SHMACC_RUN, "--workers", "1", *arguments, "none.py"], status=None)
        assert ran.returncode != 0
        assert arguments[0].removeprefix("--") in ran.stderr
        assert "Traceback" not in ran.stderr
