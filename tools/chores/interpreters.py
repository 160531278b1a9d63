"""Prints the Pythons that can test this project: the newest of each minor version.

Looks on the PATH and beside the Python that runs this, which is where pyenv and its like keep them.

    python tools/chores/interpreters.py
"""

import json
import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

# This fails in pyenv's shim of a version that is not active, without venv or Python.h, and in
# free-threaded builds, which are not supported.
_ASK = """
import ensurepip, json, os, sys, sysconfig
os.stat(sysconfig.get_path("include") + "/Python.h")
assert sys.version_info >= (3, 11) and sys.implementation.name == "cpython"
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps([sys.version_info[:3], sys.executable]))
"""


def found() -> dict[tuple[int, ...], str]:
    """Return the Pythons' paths by minor version, (3, 11) for instance, oldest first."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += Path(sys.base_prefix).parent.glob("*/bin")
    pythons = [path for folder in folders for path in sorted(folder.glob("python3.[0-9]*[0-9]"))]
    commands = ([str(python), "-c", _ASK] for python in pythons)
    asked = [subprocess.run(command, capture_output=True, check=False) for command in commands]
    usable = [json.loads(answer.stdout) for answer in asked if answer.returncode == 0]
    # In the dict, later entries replace earlier ones: so the newest of each minor version stays,
    # and of equal versions the first that was found.
    usable.sort(key=itemgetter(0), reverse=True)
    return {tuple(version[:2]): python for version, python in reversed(usable)}


if __name__ == "__main__":
    print(*found().values(), sep="\n")
