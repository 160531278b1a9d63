"""The table in tests/README.md names the tests of each file of the library, and every test."""

import fnmatch
from pathlib import Path
from typing import Final

import tests_of

LIBRARY: Final = tests_of.ROOT / "shmacc"
TESTS: Final = tests_of.ROOT / "tests"
# These tests are about tools and pages, not about the library.
OTHERS: Final = {TESTS / "hazards" / "test_documented_hazards.py", *TESTS.glob("tools/test_*.py")}


def test_each_library_file_has_a_row_and_each_pattern_matches_a_file() -> None:
    files = [
        path for path in LIBRARY.rglob("*.*") if path.suffix in {".py", ".pyi", ".hpp", ".cpp"}
    ]
    assert all(map(tests_of.tests_of, files))
    names = [str(path.relative_to(LIBRARY)) for path in files]
    patterns = {pattern for of_row, _ in tests_of.rows() for pattern in of_row}
    assert not {pattern for pattern in patterns if not fnmatch.filter(names, pattern)}


def test_every_test_file_is_in_a_row() -> None:
    named = {test for _, tests in tests_of.rows() for test in tests}
    assert not set(TESTS.rglob("test_*.py")) - named - OTHERS


def test_a_files_tests_are_those_of_its_first_row() -> None:
    found: list[Path] = tests_of.tests_of(LIBRARY / "native" / "python" / "write_guard.hpp")
    assert TESTS / "hazards" / "test_writes_to_read_only_arrays.py" in found
    assert all(path.exists() for path in found)
