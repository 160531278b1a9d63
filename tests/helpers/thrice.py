"""Runs a program three times: killed half way, undisturbed, and with a worker that raises.

The undisturbed run must give the program's result, whatever the killed run has left. A worker's
exception must end the program before its waits time out. An exception before the worker's first
gradient must be printed in this time, too; Ctrl-C then ends the program. No segments may be left.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shmacc import inspection, testing

_HOOK: Final = Path(__file__).parent / "disturbed"
_TYPO: Final = "ValueError: a typo"
# Python 3.15 gives this warning for a spawned process's main module while it prints a traceback.
_OF_TRACEBACKS: Final = "ignore:Module globals is missing a __spec__:DeprecationWarning"
# A program without a match has only private segments, and writes no files.
_WITH_NAMES: Final = re.compile(r"shmacc\.run\(|if_exists|shared_name|unlink|attach\(|save\(")
# The chief is killed at this call, in its fourth round. If it makes fewer calls: half way.
_KILLED_AT: Final = 7


@dataclass(frozen=True)
class Thrice:
    """A program, a folder for it, and the empty namespace that it runs in.

    Attributes:
        script: The program.
        folder: The folder in which the program runs, and in which its processes count calls.
        namespace: The namespace in this process's environment.
        seconds: The time that a run may take: less than the timeouts in the program.
        typos: For each number, a run in which a worker raises instead of making its apply of that
            number, counted from 1. (1 is special: no chief knows the worker yet.)
    """

    script: Path
    folder: Path
    namespace: str
    seconds: float = 110
    typos: tuple[int, ...] = (2,)

    @classmethod
    def of_text(cls, program: str, folder: Path, *given: Any, **more: Any) -> "Thrice":
        """Return the program as a reader would paste it into a file."""
        script = folder / "example.py"
        script.write_text(program)
        return cls(script, folder, *given, **more)

    def run(self) -> str:
        """Run the program three times; return what the undisturbed run printed."""
        text = self.script.read_text()
        printed, calls_it = None, re.search(r"\.(apply|round|take)\w*\(", text)
        if calls_it and _WITH_NAMES.search(text):  # else a killed run leaves nothing to find
            printed = self._killed_at(_KILLED_AT)
            if printed is not None and not self._goes_on:  # it made fewer calls
                calls = self._count(f"killed-{_KILLED_AT}", "calls")
                assert self._killed_at(calls // 2 + 1) is None
        again = self._undisturbed()
        assert printed is None or again == printed
        # Private segments of dead processes may be left: no run finds them; `clean` removes them.
        assert all(":private-" in name for name in testing.leaked_names(self.namespace))
        for leftover in inspection.leftovers(namespace=self.namespace):
            inspection.clean(leftover)
        if calls_it and ("multiprocessing" in text or self._goes_on):
            assert self._count("whole", "applied-1")
        for number in self.typos:
            if self._count("whole", f"applied-{number}"):
                self._raising_at(number)
                assert not testing.leaked_names(self.namespace)
        return again

    @property
    def _goes_on(self) -> bool:
        """Whether the program starts killed processes again."""
        return "shmacc.run(" in self.script.read_text()

    def _undisturbed(self) -> str:
        with self._start("whole") as process:
            out, err = self._end(process)
        assert (process.returncode, err) == (0, "")
        return out

    def _killed_at(self, call: int) -> str | None:
        """Kill the chief at this call, and its workers if they do not end when the chief dies.

        Return the program's output if it ended before that call, and otherwise None.
        """
        all_of_them = not re.search(r'\.steps\(.*on_death="raise"', self.script.read_text())
        how = {"killed_at": call, "kills_all": all_of_them, "once": self._goes_on}
        with self._start(f"killed-{call}", **how) as process:
            out, _ = self._end(process)
        assert process.returncode in {0, -signal.SIGKILL}
        return out if process.returncode == 0 else None

    def _raising_at(self, number: int) -> None:
        """Let one worker raise instead of making its apply of this number, counted from 1.

        If the program kills workers itself, let all workers raise: one could be killed first.
        """
        kills = ".kill()" in self.script.read_text()
        with self._start(f"raising-{number}", raises_at=number, all_raise=kills) as process:
            assert process.stderr is not None
            seen = ""
            # The chief goes on: it does not know the worker, or never asks about deaths.
            if number == 1 or "take_partial(" in self.script.read_text():
                for line in process.stderr:
                    seen += line
                    if _TYPO in line:
                        break
                process.send_signal(signal.SIGINT)
            seen += self._end(process)[1]
        assert _TYPO in seen
        assert process.returncode not in {0, None}

    @contextlib.contextmanager
    def _start(self, run: str, **disturbed: int) -> Iterator[subprocess.Popen[str]]:
        """Start the program; kill all of its processes at the end of the block."""
        counts = self.folder / run
        counts.mkdir()
        how = {f"DISTURBED_{name.upper()}": str(value) for name, value in disturbed.items()}
        with subprocess.Popen(
            [sys.executable, "-W", "error", "-W", _OF_TRACEBACKS, str(self.script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            start_new_session=True,  # kills must hit only the program
            env=os.environ
            | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(_HOOK)}
            | {"DISTURBED_FOLDER": str(counts)}
            | how,
        ) as process:
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _end(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Wait until all of the program's processes have ended: each keeps its stdout open."""
        try:
            return process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"it did not end:\n{out}\n{err}") from None

    def _count(self, run: str, what: str) -> int:
        """Return how many calls of this kind all processes of a run made."""
        counted = self.folder / run / what
        return counted.stat().st_size if counted.exists() else 0
