"""A run survives, or ends in order, whatever the machine and its users do to it."""

import os
import signal
from pathlib import Path

import pytest
from helpers.guest import Guests, every_start_method


@every_start_method
def test_a_child_of_a_program_without_output_prints_into_nothing(way: str, guest: Guests) -> None:
    """A C library may write to descriptor 1, so this must not be a file that the run has open."""
    program = guest(
        """
        def lead(): return [os.readlink(f"/proc/self/fd/{number}") for number in range(2)]
        """,
        "tell(streams=shmacc.run(lead, context=WAY))",
        way=way,
        launcher=lambda command: ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command],
    )
    assert program.ends()["streams"] == [os.devnull, os.devnull]


def test_a_variable_that_is_no_text_does_not_end_the_cleaner(guest: Guests) -> None:
    program = guest(
        """
        def lead():
            variables = {b"SHMACC_RUN": b"\\xff"}
            return subprocess.Popen(["sleep", "600"], env=variables, start_new_session=True).pid
        """,
        """
        pid = shmacc.run(lead, context=WAY)
        tell(lives=not gone(pid))
        os.kill(pid, signal.SIGKILL)
        """,
    )
    assert program.ends()["lives"]  # without the run's mark it is not ended


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_run_ends_as_usual_though_its_cleaner_was_killed(end: str, guest: Guests) -> None:
    program = guest(
        f"""
        def work(rank): mark("worker", os.getpid()), marked("killed")
        def lead():
            marked("killed")
            if {end!r} == "raises":
                raise ValueError("by the chief")
            return 1
        """,
        """
        try:
            tell(end=shmacc.run(lead, work, workers=1, context=WAY, restarts=1))
        except ValueError as error:
            tell(end=str(error))
        """,
    )
    worker = int(program.marked("worker"))
    (cleaner,) = [pid for pid in program.processes() if _is_cleaner(pid)]
    os.kill(cleaner, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)  # the cleaner is told of this death
    while program.marked("worker") == str(worker):
        pass
    os.kill(cleaner, signal.SIGKILL)
    program.mark("killed")
    assert program.ends()["end"] == (1 if end == "returns" else "by the chief")


def _is_cleaner(pid: int) -> bool:
    return b"cleaner.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
