"""Writes new pins into constraints/, from the bounds in pyproject.toml, with uv.

newest.txt        what `make` installs and builds with: the newest versions on the day of writing
home.txt          what `test-home`, `test-ray` and `bench` also need: packages that users have
lowest.txt        what `make test-lowest` installs: the lowest versions that the bounds
                  allow, and the tests' own tools as in newest.txt
lowest-build.txt  the lowest versions of the tools with which CI builds the wheel of 3.12

Each file is for all Pythons that the project supports; a line for only some of them has a marker.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PINS = _ROOT / "constraints"


def _write(file_name: str, requirements: list[str], *arguments: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--upgrade"]
    command += ["--python-version", "3.11", "--no-annotate"]
    command += ["--custom-compile-command", "make pins"]
    command += ["--output-file", str(_PINS / file_name), *arguments, "-"]
    subprocess.run(command, cwd=_ROOT, check=True, text=True, input="\n".join(requirements))


def _name(requirement: str) -> str:
    return re.split("[^a-z0-9-]", requirement.lower().replace("_", "-"))[0]


def main() -> None:
    """Write all four files."""
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    groups = settings["dependency-groups"]
    home = groups.pop("home") + groups.pop("bench") + groups.pop("ray")
    build = settings["build-system"]["requires"]
    tools = {_name(part) for part in groups["test"]} - {"prometheus-client"}
    own = ("pyproject.toml", "--extra", "metrics")
    lowest = ("--resolution", "lowest-direct")
    _write("newest.txt", build + [part for group in groups.values() for part in group], *own)
    newest = (_PINS / "newest.txt").read_text().splitlines()
    _write("lowest.txt", [line for line in newest if _name(line) in tools], *own, *lowest)
    _write("lowest-build.txt", build, *lowest)
    _write("home.txt", home, "pyproject.toml", "--constraints", str(_PINS / "newest.txt"))
    # Leave out what newest.txt has, and packages for GPUs: torch itself requires the right ones.
    named = {_name(line) for line in newest} - {""}
    lines = (_PINS / "home.txt").read_text().splitlines(keepends=True)
    lines = [line for line in lines if not re.match("cuda|nvidia|triton", line)]
    (_PINS / "home.txt").write_text("".join(line for line in lines if _name(line) not in named))


if __name__ == "__main__":
    main()
