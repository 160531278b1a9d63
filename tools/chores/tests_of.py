"""Prints the tests of files, by the map in tests/README.md: `tests_of.py shmacc/_attach.py`."""

from __future__ import annotations

import fnmatch
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
MAP: Final = ROOT / "tests" / "README.md"


def rows() -> Iterator[tuple[list[str], list[Path]]]:
    """Yield each row of the map: its patterns for files, and their tests."""
    for line in MAP.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            files, tests = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
            yield files, [path for test in tests for path in tests_named(test)]


def tests_named(pattern: str) -> list[Path]:
    """Return the test files that match a pattern.

    Raises:
        FileNotFoundError: No test file matches.
    """
    folder, _, name = pattern.partition("/")
    found = sorted((ROOT / "tests" / folder).glob(f"test_{name}.py"))
    if not found:
        raise FileNotFoundError(pattern)
    return found


def tests_of(file: Path) -> list[Path]:
    """Return the tests of the first row whose patterns match the file.

    Raises:
        LookupError: No row matches the file.
    """
    name = str(file.resolve().relative_to(ROOT / "shmacc"))
    for patterns, tests in rows():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            return tests
    raise LookupError(name)


if __name__ == "__main__":
    for test in dict.fromkeys(test for file in sys.argv[1:] for test in tests_of(Path(file))):
        print(test.relative_to(ROOT))
