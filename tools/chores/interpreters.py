"""Prints the Pythons that can test this project: the newest of each minor version.

Looks on the PATH and beside the Python that runs this, which is where pyenv and its like keep them.

    python tools/chores/interpreters.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

_OLDEST = (3, 11)

# Fails in the shim of a version that is not switched on, and where there is no venv or no Python.h.
# Free-threaded builds are not supported.
_ASK = """
import ensurepip, json, os, sys, sysconfig
os.stat(sysconfig.get_path("include") + "/Python.h")
assert sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps([sys.version_info[:3], sys.executable]))
"""


def _candidates() -> list[Path]:
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += Path(sys.base_prefix).parent.glob("*/bin")
    return [path for folder in folders for path in sorted(folder.glob("python3.[0-9]*[0-9]"))]


def _ask(python: Path) -> tuple[tuple[int, ...], str]:
    """Return its version and its real path; an empty version if it is not usable."""
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, check=False)
    version, executable = ((), "") if asked.returncode else json.loads(asked.stdout)
    return tuple(version), executable


def found() -> dict[tuple[int, ...], str]:
    """Return their paths by minor version, (3, 11) for instance, oldest first."""
    newest: dict[tuple[int, ...], str] = {}
    for version, executable in sorted(map(_ask, _candidates()), key=itemgetter(0), reverse=True):
        newest.setdefault(version[:2], executable)
    return {minor: executable for minor, executable in sorted(newest.items()) if minor >= _OLDEST}


if __name__ == "__main__":
    print(*found().values(), sep="\n")
