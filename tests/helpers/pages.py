"""Tests copy and run the programs in README and the documentation as a reader would."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from helpers.support import run_to_end

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "tools" / "model" / "README.md",
]
# The programs of each of these two pages belong together. Other tests run them.
README: Final = ROOT / "README.md"
TUTORIAL: Final = ROOT / "docs" / "tutorial.md"
FIRST: Final = ROOT / "docs" / "examples" / "first"
"""The folder of README's programs."""
# Packages that `make test` does not install; programs that import them are run by `make test-home`.
_OTHERS: Final = re.compile(
    r"^\s*(?:import|from) (?:anyio|jax|joblib|optax|pandas|polars|scipy|sklearn|torch|uvloop)\b",
    re.MULTILINE,
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def programs(*, with_others: bool) -> dict[str, str]:
    """Return the pages' Python blocks with (or without) imports of `_OTHERS`, by page and number.

    Blocks that need a Ray cluster are left out: `make test-ray` runs them.
    """
    return {
        f"{page_id(page)}-{number}": program
        for page in PAGES
        if page not in {README, TUTORIAL}
        for number, program in enumerate(
            re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        )
        if (_OTHERS.search(program) is not None) == with_others
        and not re.search(r"sys.argv|shmacc-run|import shmacc\.ray", program)
    }


def examples(*, with_others: bool) -> list[Path]:
    """Return the programs in docs/examples with (or without) imports of `_OTHERS`.

    README's programs have tests of their own. `make test-ray` runs programs for a Ray cluster.
    """
    found = sorted((ROOT / "docs" / "examples").rglob("*.py"))
    found = [path for path in found if path.parent.name not in {"first", "ray"}]
    return [path for path in found if (_OTHERS.search(path.read_text()) is not None) == with_others]


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return a page's blocks in order: programs, or commands and their output."""
    return re.findall(r"```(python|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def tutorial() -> list[tuple[str, str]]:
    return blocks_of(TUTORIAL)


def name_of(program: str) -> str:
    """Return the file name under which a program is to be saved."""
    named = re.match(r"# (\w+\.py)\n", program)
    assert named, program
    return named[1]


def run(
    command: Sequence[str | Path], folder: Path, *, status: int = 0
) -> subprocess.CompletedProcess[str]:
    return run_to_end(command, status=status, timeout=None, cwd=folder)


def run_page(page: Path, folder: Path, environment: Path) -> None:
    """Save a page's programs in a folder, and run its commands there."""
    blocks = blocks_of(page)
    assert {kind for kind, _ in blocks} == {"python", "console"}
    for kind, block in blocks:
        if kind == "python":
            (folder / name_of(block)).write_text(block)
        else:
            run_commands(block, folder, environment)


def as_printed(printed: str) -> str:
    return printed


def run_commands(
    block: str, folder: Path, environment: Path, compared: Callable[[str], object] = as_printed
) -> None:
    """Run the commands of a block in a folder and a virtual environment.

    Check that they print what the block shows, after `compared` has simplified both texts.
    """
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
        ran = run_to_end(
            shlex.split(command), timeout=100, cwd=folder, env=os.environ | {"PATH": path}
        )
        assert compared(ran.stdout) == compared(shown), command
