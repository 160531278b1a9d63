"""Processes that a child has started end with it; other processes do not hold up a run."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest
from helpers.apart import needs_root
from helpers.guest import Guests, every_way
from helpers.support import SHM_DIRECTORY


@every_way
@pytest.mark.parametrize("end", ["returns", "raises", "is killed", "ignores signals"])
def test_what_a_worker_has_started_ends_with_the_run(end: str, way: str, guest: Guests) -> None:
    program = guest(
        f"""
        def work(rank):
            end = {end!r}
            if end == "ignores signals":
                for number in 1, 2, 15:
                    signal.signal(number, signal.SIG_IGN)
            start_two("worker")
            if end == "raises":
                raise ValueError("by the worker")
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "ignores signals":
                time.sleep(600)
        def lead():
            marked("worker ready")
            if {end!r} == "raises":
                time.sleep(600)
            return 1
        """,
        way=way,
        workers=1,
        grace=0.1,
    )
    program.ends(None)


STARTING_AGAIN: Final = """
    END = %r
    def work(rank):
        if once("begun"):
            start_two("worker")
            if END == "raises":
                raise ValueError("by the worker")
            if END == "returns":
                return
            os.kill(os.getpid(), signal.SIGKILL)
    def lead():
        until(lambda: gone(marked("worker group")))
        return "gone"
"""


@every_way
@pytest.mark.parametrize("end", ["returns", "is killed"])
def test_a_workers_process_group_ends_with_that_worker(end: str, way: str, guest: Guests) -> None:
    program = guest(STARTING_AGAIN % end, way=way, workers=1)
    assert program.ends()["result"] == "gone"


# For each case: the number of workers; what workers and chief do until "ready" is marked.
BEFORE_THE_KILL: Final = {
    # The chief has started processes, too, and so has a worker that has ended already.
    "have started others": (
        2,
        """
        def work(rank):
            start_two(f"worker{rank}")
            if rank == 0:
                time.sleep(600)
        def lead():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            start_two("chief")
            marked("worker0 ready"), marked("worker1 ready")
            mark("ready")
            time.sleep(600)
        """,
    ),
    "are stopped": (
        1,
        """
        def work(rank):
            start_two("worker")
            os.kill(0, signal.SIGSTOP)
        def lead():
            pid = marked("worker ready")
            until(lambda: "State:\\tT" in open(f"/proc/{pid}/status").read())
            mark("ready")
            time.sleep(600)
        """,
    ),
    # After a change of user the kernel no longer kills them with their parent.
    "have changed their user": (
        1,
        """
        def work(rank):
            start_two("worker")
            os.setgid(65534), os.setuid(65534)
            mark("worker changed")
            time.sleep(600)
        def lead():
            marked("worker changed")
            os.setgid(65534), os.setuid(65534)
            mark("ready")
            time.sleep(600)
        """,
    ),
}


@every_way
@pytest.mark.parametrize("they", [
    "have started others", "are stopped",
    pytest.param("have changed their user", marks=needs_root),
])  # fmt: skip
def test_all_processes_end_with_a_killed_program(they: str, way: str, guest: Guests) -> None:
    guest.folder.chmod(0o777)
    workers, functions = BEFORE_THE_KILL[they]
    program = guest(functions, way=way, workers=workers)
    program.marked("ready")
    program.process.kill()
    program.ends(-signal.SIGKILL)


@pytest.mark.parametrize("way", ["fork", "spawn"])
@pytest.mark.parametrize(
    "leave",
    # A thread replaces the program by another one: the pid stays, the run is gone.
    ['os.execvp("sh", ["sh", "-c", "exit 7"])', "os._exit(7)"],
    ids=["by exec", "by os._exit"],
)
def test_descendants_end_with_a_program_that_exits(leave: str, way: str, guest: Guests) -> None:
    program = guest(
        """
        def work(rank): start_two("worker"), time.sleep(600)
        def lead(): time.sleep(600)
        """,
        f"""
        threading.Thread(target=lambda: (marked("worker ready"), {leave}), name="own").start()
        start(lead, work)
        """,
        way=way,
        workers=1,
    )
    program.ends(7)


# Processes that hold the run's pipes


@every_way
@pytest.mark.parametrize("role", ["chief", "worker"])
def test_a_daemon_of_a_child_does_not_hold_up_a_run(role: str, way: str, guest: Guests) -> None:
    """The daemon inherits its parent's pipes, also the one into which children print."""
    program = guest(
        f"""
        def work(rank):
            if {role!r} == "worker":
                daemon({{}})
        def lead():
            if {role!r} == "chief":
                daemon({{}})
            marked("stray")
            return 1
        """,
        way=way,
        workers=1,
    )
    stray = int(program.marked("stray"))
    ended = program.ends(left={stray})
    assert ended["result"] == 1
    os.kill(stray, 0)


@every_way
def test_a_daemon_with_the_runs_namespace_ends_with_the_run(way: str, guest: Guests) -> None:
    program = guest(
        """
        def work(rank): daemon(dict(os.environ))
        def lead(): marked("stray")
        """,
        way=way,
        workers=1,
    )
    program.ends()


@pytest.mark.parametrize("end", ["ends", "is killed"])
def test_a_fork_of_the_program_does_not_hold_up_a_run(end: str, guest: Guests) -> None:
    """The fork has all descriptors of the program, but does not belong to the run."""
    program = guest(
        f"""
        def lead():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            mark("chief ready")
            marked("stray")
            if {end!r} == "ends":
                return 1
            time.sleep(600)
        """,
        """
        def split():
            marked("chief ready")
            if os.fork() == 0:
                os.setsid()
                mark("stray", os.getpid())
                time.sleep(600)
                os._exit(0)
        thread = threading.Thread(target=split, name="own")
        thread.start()
        result = shmacc.run(lead, context=WAY)
        tell(result=result)
        """,
    )
    stray = int(program.marked("stray"))
    if end == "is killed":
        program.process.kill()
    ended = program.ends(0 if end == "ends" else -signal.SIGKILL, left={stray})
    assert ended.all("result") == ([1] if end == "ends" else [])
    os.kill(stray, 0)


@pytest.mark.parametrize("way", ["fork", "forkserver"])
def test_a_killed_worker_leaves_nothing_of_its_pool(way: str, guest: Guests) -> None:
    program = guest(
        """
        import multiprocessing
        def nap(_): mark(f"napping {os.getpid()}"), time.sleep(600)
        def work(rank):
            if once("begun"):
                prefix = f"test-pool-{os.getpid()}"
                multiprocessing.current_process()._config["semprefix"] = f"/{prefix}"
                mark("prefix", prefix)
                pool = multiprocessing.get_context("spawn").Pool(2)
                pool.map_async(nap, range(2))
                until(lambda: len([n for n in os.listdir(os.environ["GUEST_FOLDER"])
                                   if n.startswith("napping")]) == 2)
                os.kill(os.getpid(), signal.SIGKILL)
        def lead():
            until(lambda: os.path.exists(os.path.join(os.environ["GUEST_FOLDER"], "begun")))
            for name in os.listdir(os.environ["GUEST_FOLDER"]):
                if name.startswith("napping"):
                    until(lambda: gone(name.split()[1]))
        """,
        way=way,
        workers=1,
        grace=30,
    )
    program.ends()
    # With the group, the kernel has killed the tracker that would have removed the pool's locks.
    for lock in Path(SHM_DIRECTORY).glob(f"sem.{program.marked('prefix')}*"):
        lock.unlink()
