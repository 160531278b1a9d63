"""Runs scripts in an interpreter of their own, from its start to its exit."""

import sys
import textwrap
from typing import Final

from helpers.support import run_to_end

_PREAMBLE: Final = """
    import atexit, os, sys, threading, time
    import numpy as np
    import shmacc
    def daemon(function):
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        return thread
    def until(condition):
        while not condition():
            time.sleep(0.0005)
"""

# Some scripts fork on purpose while another thread runs: ignore Python's warning about that.
FORKS: Final = "ignore:This process (pid:DeprecationWarning"


def run(script: str, *args: str, warnings: str = "error") -> tuple[int, str, str]:
    """Run a script, which must end in time; return its exit status, output and error output."""
    code = textwrap.dedent(_PREAMBLE) + textwrap.dedent(script)
    done = run_to_end(
        [sys.executable, "-P", "-W", warnings, "-W", FORKS, "-c", code, *args], status=None
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()
