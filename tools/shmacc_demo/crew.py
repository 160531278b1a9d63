"""The worker processes, as the chief sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""The processes are the parallelism; each one's NumPy keeps to one thread."""


class WorkerFailedError(RuntimeError):
    """A worker ended by itself, before the end of the run."""


@dataclass(frozen=True)
class Member:
    """One process."""

    process: subprocess.Popen[bytes]
    complaints: IO[bytes]


class Crew:
    """At most one process for each worker's number, restarted after it was killed."""

    def __init__(self, run: str, board: str) -> None:
        self._run = run
        self._board = board
        self._members: dict[int, Member] = {}

    def start(self, worker: int, step: int, parts: tuple[str, ...]) -> None:
        """Start a worker, of whose work at that step these parts are wanted."""
        tools = str(Path(__file__).parent.parent)
        path = os.pathsep.join(filter(None, (tools, os.environ.get("PYTHONPATH"))))
        if worker in self._members:
            self._members[worker].complaints.close()
        complaints = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the member
        process = subprocess.Popen(
            # -P: modules are not searched for in the current folder.
            [
                *(sys.executable, "-P", "-m", "shmacc_demo.worker"),
                *(self._run, self._board, str(worker), str(step), ",".join(parts)),
            ],
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            # A group of its own: Ctrl-C is for the chief, which ends the workers.
            process_group=0,
        )
        self._members[worker] = Member(process, complaints)

    def fallen(self) -> list[int]:
        """List the workers that were killed and not started again.

        Raises:
            WorkerFailedError: One has ended in another way.
        """
        found = []
        for worker, member in self._members.items():
            status = member.process.poll()
            if status in {-signal.SIGKILL, -signal.SIGTERM}:
                found.append(worker)
            elif status is not None:
                raise WorkerFailedError(
                    f"worker {worker} ended with status {status}: {_text(member.complaints)}"
                )
        return found

    def alive(self) -> int:
        """Count those that live."""
        return sum(member.process.poll() is None for member in self._members.values())

    def kill(self, worker: int) -> None:
        """Kill a worker, and wait until it is dead."""
        process = self._members[worker].process
        process.kill()
        process.wait()

    def finish(self, timeout: float) -> None:
        """Wait for all to end by themselves, as they do after the last step.

        Raises:
            WorkerFailedError: One failed in its last moments, or did not end.
        """
        for worker, member in self._members.items():
            try:
                status = member.process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise WorkerFailedError(f"worker {worker} did not end with the run") from None
            if status not in {0, -signal.SIGKILL, -signal.SIGTERM}:
                raise WorkerFailedError(
                    f"worker {worker} ended with status {status}: {_text(member.complaints)}"
                )

    def dismiss(self) -> None:
        """End all remaining workers; a SIGKILL does no harm to the accumulators."""
        for worker, member in self._members.items():
            self.kill(worker)
            member.complaints.close()
        self._members.clear()


def _text(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    return complaints.read().decode(errors="replace").strip() or "it said nothing"
