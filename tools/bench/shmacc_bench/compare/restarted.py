"""Starts the chief and workers of a run, and restarts those that die, like a service manager."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Final

import psutil

from shmacc_bench.processes import CONTEXT

CHIEF: Final = -1
_RESTARTS: Final = 3
_END: Final = 2.0  # seconds that processes have to end by themselves
_SET_CHILD_SUBREAPER: Final = 36


class Restarted:
    """Chief and workers, and the processes that they have started."""

    def __init__(
        self, roles: Iterable[int], play: Callable[..., None], *arguments: object, together: bool
    ) -> None:
        """Start a process for each role; it calls ``play(role, *arguments)``.

        With ``together``, the death of one process ends the others, and all are started again.
        """
        # If a killed chief had started processes (as Ray does), they become children of this
        # process, which can then end them.
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
        self._play, self._arguments, self._together = play, arguments, together
        self._restarts = 0
        self._processes = {role: self._started(role) for role in roles}

    def start_again(self) -> str | None:
        """Restart the processes that have ended; without restarts left, return what has ended."""
        for role, process in self._processes.items():
            if process.exitcode is None:
                continue
            if self._restarts == _RESTARTS:
                return f"{'the chief' if role == CHIEF else 'a worker'} ends ({process.exitcode})"
            self._restarts += 1
            if self._together:
                self._kill_all()
                self._processes = {each: self._started(each) for each in self._processes}
                return None
            self._processes[role] = self._started(role)
        return None

    def kill(self, victim: int) -> None:
        """Kill the process of the chief or of a worker, even a worker that the chief started."""
        if victim in self._processes:
            pid = self._processes[victim].pid or 0
        else:  # the chief has started the workers: take the one that computed most
            pid = max(psutil.Process().children(recursive=True), key=_seconds).pid
        os.kill(pid, signal.SIGKILL)

    def end(self, *, patient: bool) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.join(_END if patient else 0)
        self._kill_all()

    def _started(self, role: int) -> BaseProcess:
        process = CONTEXT.Process(target=self._play, args=(role, *self._arguments))
        process.start()
        return process

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may have ended
                # Spare multiprocessing's resource tracker: later runs need it.
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()


def _seconds(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:2]))  # user and system
    except psutil.Error:
        return 0.0
