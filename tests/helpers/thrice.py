"""Runs a program half way until it is killed, then to its end, then with a worker that raises.

The run after the killed one comes to the program's result, whatever is left under its names. A
worker's exception ends the program before its waits time out. An exception before the worker's
first gradient is only printed, as soon; then the user presses Ctrl-C. Nothing is left afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shmacc import inspection, testing

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOOK: Final = Path(__file__).parent / "disturbed"
_TYPO: Final = "ValueError: a typo"
# Python 3.15 gives this warning for a spawned process's main module while it prints a traceback.
_OF_TRACEBACKS: Final = "ignore:Module globals is missing a __spec__:DeprecationWarning"
# In programs without any, segments are private, and files are none.
_WITH_NAMES: Final = re.compile(r"if_exists|shared_name|unlink|attach\(|save\(")
# The chief's call at which it is killed: in its fourth round. Programs of fewer calls: half way.
_KILLED_AT: Final = 7


@dataclass(frozen=True)
class Thrice:
    """A program, a folder for it, and the empty namespace that it runs in.

    Attributes:
        script: The program.
        folder: Where it runs, and its processes count their calls.
        namespace: That of this process's environment.
        seconds: How long a run may take: less than the timeouts in the program.
        typos: The applies, counted from 1, before which a worker raises, each in a run of its own.
            (Before its first apply no chief knows a worker: few programs need both.)
    """

    script: Path
    folder: Path
    namespace: str
    seconds: float = 110
    typos: tuple[int, ...] = (2,)

    @classmethod
    def of_text(cls, program: str, folder: Path, *given: Any, **more: Any) -> Thrice:
        """Return the program as a reader would paste it into a file."""
        script = folder / "example.py"
        script.write_text(program)
        return cls(script, folder, *given, **more)

    def run(self) -> str:
        """Run it three times; return what it printed when nothing disturbed it."""
        text = self.script.read_text()
        printed, calls_it = None, re.search(r"\.(apply|round|take)\w*\(", text)
        if calls_it and _WITH_NAMES.search(text):  # else a run finds nothing of an earlier one
            printed = self._killed_at(_KILLED_AT)
            if printed is not None:  # it ended before
                calls = self._count(f"killed-{_KILLED_AT}", "calls")
                assert self._killed_at(calls // 2 + 1) is None
        again = self._undisturbed()
        assert printed is None or again == printed
        # Private segments of dead processes may be left: no run finds them; `clean` removes them.
        assert all(":private-" in name for name in testing.leaked_names(self.namespace))
        for leftover in inspection.leftovers(namespace=self.namespace):
            inspection.clean(leftover)
        if calls_it and "multiprocessing" in text:
            assert self._count("whole", "applied-1")
        for number in self.typos:
            if self._count("whole", f"applied-{number}"):
                self._raising_at(number)
                assert not testing.leaked_names(self.namespace)
        return again

    def _undisturbed(self) -> str:
        with self._start("whole") as process:
            out, err = self._end(process)
        assert (process.returncode, err) == (0, "")
        return out

    def _killed_at(self, call: int) -> str | None:
        """Kill the chief, and workers that would not end by themselves when told of its death.

        What it printed, if it ended before that call.
        """
        all_of_them = not re.search(r'\.steps\(.*on_death="raise"', self.script.read_text())
        with self._start(f"killed-{call}", killed_at=call, kills_all=all_of_them) as process:
            out, _ = self._end(process)
        assert process.returncode in {0, -signal.SIGKILL}
        return out if process.returncode == 0 else None

    def _raising_at(self, number: int) -> None:
        """Let one worker raise in place of its apply of this number, counted from 1.

        If the program kills workers itself, each raises: one could be killed while it ends.
        """
        kills = ".kill()" in self.script.read_text()
        with self._start(f"raising-{number}", raises_at=number, all_raise=kills) as process:
            assert process.stderr is not None
            seen = ""
            # A worker is unknown before its first gradient; `take_partial` raises for none.
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
        """Start the program; in the end none of its processes is left, whatever has happened."""
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
        """Wait for the end of all of its processes: they have its stdout."""
        try:
            return process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"it did not end:\n{out}\n{err}") from None

    def _count(self, run: str, what: str) -> int:
        """Return how often all processes of a run made such a call."""
        counted = self.folder / run / what
        return counted.stat().st_size if counted.exists() else 0
