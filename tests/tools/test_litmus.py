"""The litmus tests are the ones that herd7 has checked, and name functions that exist."""

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.support import run_to_end

_LITMUS = Path(__file__).parents[2] / "tools" / "model" / "litmus"
_READING = runpy.run_path(str(_LITMUS / "reading.py"))
_TESTS: list[Any] = _READING["read_all"]()
_README = (_LITMUS / "README.md").read_text()

# A row of the table in README: | test | `function` ... | [file](path) |
_ROWS = re.findall(r"^\| (\w+) \| ([`\w ]+) \| \[[^]]*\]\(([^)]+)\) \|$", _README, re.MULTILINE)


def test_the_litmus_tests_are_unchanged_since_herd_checked_them() -> None:
    assert re.findall(r"Checked with herd7 .*: `(\w+)`", _README) == [_READING["digest"]()]


@pytest.mark.skipif(shutil.which("herd7") is None, reason="herd7 is not installed")
def test_herd_finds_the_outcomes_that_the_litmus_tests_declare() -> None:
    run_to_end([sys.executable, str(_LITMUS / "check.py")], timeout=110)


def test_every_broken_variant_is_described_and_changes_something() -> None:
    for test in _TESTS:
        described = [variant.name for variant in test.variants if variant.name]
        assert len(described) == len(set(described)) > 0
        code = "\n".join(line for line in test.source.splitlines() if not line.startswith("//"))
        assert set(re.findall(r"[-+](BROKEN_\w+)", code)) == set(described)
        whole = list(test.programs(""))
        assert all(list(test.programs(name)) != whole for name in described)


def test_the_readmes_table_has_every_litmus_test() -> None:
    assert {test for test, _, _ in _ROWS} == {test.name for test in _TESTS}
    section = _README.partition("## Tests and code")[2].partition("\n## ")[0]
    assert len(_ROWS) == section.count("\n| ") - 2  # heading and rule


def test_the_functions_in_the_readmes_table_exist() -> None:
    for _, functions, file in _ROWS:
        code = re.sub(r"//.*", "", (_LITMUS / file).read_text())
        for function in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"\b{function}(?:<\w+>)?\(", code), f"{function} is not in {file}"
