"""Each litmus test has results for its current text, and names code that exists."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_LITMUS = Path(__file__).parents[2] / "tools" / "model" / "litmus"
_TESTS: list[Any] = runpy.run_path(str(_LITMUS / "reading.py"))["read_all"]()
_MODELS = ("C11", "AArch64", "x86", "streaming")
_README = (_LITMUS / "README.md").read_text()

# | [test](path) | `function` ... | [file](path) |
_ROWS = re.findall(
    r"^\| \[(\w+)\]\(\w+\.litmus\) \| ([`\w ]+) \| \[[^]]*\]\(([^)]+)\) \|$", _README, re.MULTILINE
)


def _results(text: str) -> list[list[str]]:
    rows = [line.strip("|\n").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def _expected() -> list[list[str]]:
    """What herd7 must find, as the files say."""
    rows = []
    for test in _TESTS:
        models = ("streaming",) if test.streams else _MODELS[:3]
        possible = {
            model: " ".join(one.name for one in test.variants if model in one.models) or "never"
            for model in models
        }
        rows.append([test.name, test.digest, *(possible.get(model, "") for model in _MODELS)])
    return rows


def test_the_results_are_up_to_date_and_as_expected() -> None:
    assert _results((_LITMUS / "results.md").read_text()) == _expected()


@pytest.mark.skipif(shutil.which("herd7") is None, reason="herd7 is not installed")
def test_herd_finds_the_stored_results(tmp_path: Path) -> None:
    results = tmp_path / "results.md"
    ran = subprocess.run(
        [sys.executable, str(_LITMUS / "check.py"), "--results", str(results)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert _results(results.read_text()) == _expected()


def test_every_broken_variant_is_described_and_changes_something() -> None:
    for test in _TESTS:
        described = [variant.name for variant in test.variants if variant.name]
        assert len(described) == len(set(described)) > 0
        code = "\n".join(line for line in test.source.splitlines() if not line.startswith("//"))
        assert set(re.findall(r"[-+](BROKEN_\w+)", code)) == set(described)
        whole = list(test.programs(""))
        assert all(list(test.programs(name)) != whole for name in described)


def test_the_table_has_every_test() -> None:
    assert {test for test, _, _ in _ROWS} == {test.name for test in _TESTS}
    section = _README.partition("## Tests and code")[2].partition("\n## ")[0]
    assert len(_ROWS) == section.count("\n| ") - 2  # heading and rule


def test_the_functions_that_the_table_names_exist() -> None:
    for _, functions, file in _ROWS:
        code = re.sub(r"//.*", "", (_LITMUS / file).read_text())
        for function in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"\b{function}(?:<\w+>)?\(", code), f"{function} is not in {file}"
