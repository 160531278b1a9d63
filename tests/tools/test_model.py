"""Quick searches of the protocol's models end as expected, and the models name existing code."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.support import run_to_end

_ROOT = Path(__file__).parents[2]
_MODEL = _ROOT / "tools" / "model"
_CHECK = runpy.run_path(str(_MODEL / "check.py"))
_CASES: list[Any] = _CHECK["read_cases"]()
_SOURCES = {path.stem: path.read_text() for path in sorted(_MODEL.glob("*.pml"))}
_README = (_MODEL / "README.md").read_text()
_MODELS = _SOURCES.keys() - {"processes", "fate"}
_COMPILER = os.environ.get("CC", "cc")

# A row of the table in README: | model | `step` ... | `function` ... | [file](path) |
_ROWS = re.findall(
    r"^\| (\w+)[^|]* \| ([`\w ]+) \| ([`\w ]+) \| \[[^]]*\]\(([^)]+)\) \|$", _README, re.MULTILINE
)


def _words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def _steps(source: str) -> set[str]:
    return set(re.findall(r"^(?:inline|(?:active )?proctype) (\w+)\(", source, re.MULTILINE))


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed")
@pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"{_COMPILER} is not installed")
def test_quick_searches_find_the_expected_faults() -> None:
    ran = run_to_end([sys.executable, str(_MODEL / "check.py"), "--quick"], timeout=580)
    verdicts = [line.split()[:2] for line in ran.stdout.splitlines() if line.endswith("holds")]
    assert verdicts == [["lock", "no_slices"], ["line", "no_slices"]]
    searched = {line.split()[0] for line in ran.stdout.splitlines() if "  found: " in line}
    assert searched == _MODELS - {"line"}


def test_every_case_has_its_own_name_and_a_model() -> None:
    names = [(case.model, case.name) for case in _CASES]
    assert len(names) == len(set(names))
    assert {case.model for case in _CASES} == _MODELS
    assert {case.model for case in _CASES if case.quick} == _MODELS


def test_every_broken_variant_exists_and_is_searched() -> None:
    wanted = {(case.model, case.name) for case in _CASES if case.broken}
    assert all(case.name in case.flags.split() for case in _CASES if case.broken)
    there = {
        (model, flag) for model in _MODELS for flag in re.findall(r"\bBROKEN_\w+", _SOURCES[model])
    }
    assert there == wanted


def test_every_flag_of_a_case_is_used_by_its_model() -> None:
    for case in _CASES:
        code = _CHECK["code"](case.model)
        for name in re.findall(r"-D(\w+)", " ".join(_CHECK["defines"](case))):
            assert re.search(rf"\b{name}\b(?!=)", code), (case, name)


def test_the_results_are_up_to_date_and_as_expected() -> None:
    for case in _CASES:
        file, *_, verdict = case.found
        name = f"{case.model}/{case.name}"
        assert file == _CHECK["digest"](case.model), f"{name}: search it again"
        assert re.fullmatch("found: .+" if case.broken else "holds", verdict), name


def test_write_of_no_result_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = (_MODEL / "searches.md").read_text()
    written = tmp_path / "searches.md"
    written.write_text(there)
    monkeypatch.setitem(_CHECK["write"].__globals__, "SEARCHES", written)
    _CHECK["write"]([])
    assert written.read_text() == there


def test_every_step_of_a_model_has_a_function_or_is_listed_as_the_models_own() -> None:
    own = set(_words(_README.partition("Only the models have")[2].partition("\n\n")[0]))
    for model, source in _SOURCES.items():
        mapped = {
            step for _, steps, _, _ in _ROWS for step in _words(steps) if step in _steps(source)
        }
        assert _steps(source) - mapped == _steps(source) & own, model
    everywhere = set().union(*(_steps(source) for source in _SOURCES.values()))
    assert own <= everywhere
    for model, steps, _, _ in _ROWS:
        assert set(_words(steps)) <= _steps(_SOURCES[model]), (model, steps)


def test_the_functions_in_the_readmes_table_exist() -> None:
    for _, _, functions, file in _ROWS:
        code = re.sub(r"//.*", "", (_MODEL / file).read_text())
        for function in _words(functions):
            assert re.search(rf"\b{function}(?:<\w+>)?\(", code), f"{function} is not in {file}"


def test_every_row_of_the_readmes_table_is_parsed() -> None:
    section = _README.partition("## Model and code")[2].partition("\n## ")[0]
    assert len(_ROWS) == section.count("\n| ") - 2  # heading and rule
    assert {row[0] for row in _ROWS} == _MODELS
