"""The summary of `.ci/run` names each failed test, and the first line of its error."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

CI: Final = Path(__file__).parents[2] / ".ci" / "run"
TESTS: Final = """
import pytest

def test_wrong():
    assert 1 == 2, "one is not two"

@pytest.mark.parametrize("what", ["a - b"])
def test_raises(what):
    raise ValueError("first\\nsecond")

@pytest.fixture
def broken():
    yield
    raise KeyError("left")

def test_wrong_at_the_end(broken):
    pass
"""


def summary_of(log: Path) -> list[str]:
    function = re.search(r"^failures\(\) \{\n.*?^\}\n", CI.read_text(), re.MULTILINE | re.DOTALL)
    assert function is not None
    command = ["bash", "-c", f'{function[0]}\nfailures "$1"', "bash", str(log)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def test_a_failed_test_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "test_x.py"]
    log = tmp_path / "log"
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with log.open("w") as file:
        subprocess.run(command, cwd=tmp_path, env=alone, stdout=file, stderr=file, check=False)
    assert sorted(summary_of(log)) == [
        "    ERROR test_x.py::test_wrong_at_the_end: KeyError: 'left'",
        "    FAILED test_x.py::test_raises[a - b]: ValueError: first",
        "    FAILED test_x.py::test_wrong: AssertionError: one is not two",
    ]


def test_a_command_that_failed_without_a_test_is_shown_by_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("compiling\nmake: *** [all] Error 1\n")
    assert summary_of(log) == ["    make: *** [all] Error 1"]
