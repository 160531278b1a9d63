"""What pytest is told here so that one test takes no other along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

_TESTS: Final = Path(__file__).parents[1]

# A signal's handler may raise at an instruction that belongs to no line: at the end of the block.
_MODULE: Final = """
import contextlib, sys, types

def stand():
    with contextlib.suppress(OSError):
        return sys._getframe()

def test_ended_between_two_lines():
    frame = stand()
    lines = [position[0] for position in frame.f_code.co_positions()]
    nowhere = types.TracebackType(None, frame, 2 * lines.index(None), -1)
    assert nowhere.tb_lineno is None
    try:
        raise TimeoutError("too late").with_traceback(nowhere)
    except TimeoutError as error:
        raise KeyError("told by another") from error

def test_that_comes_after_it():
    pass
"""


def test_a_timeout_at_no_line_is_a_failure_like_others(tmp_path: Path) -> None:
    tmp_path.joinpath("test_it.py").write_text(_MODULE, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:randomly", "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(_TESTS), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
