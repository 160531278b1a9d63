"""The programs of the pages use "spawn". Each also runs with the other start methods."""

import os
import sys
from pathlib import Path
from typing import Final

import pytest
from helpers import pages
from helpers.interpreter import FORKS
from helpers.support import run_to_end

_SAID: Final = 'get_context("spawn")'
_PROGRAMS: Final = {
    name: program
    for name, program in (
        pages.programs(with_others=False)
        | {path.stem: path.read_text() for path in pages.examples(with_others=False)}
    ).items()
    if _SAID in program and "sys.argv" not in program
}
assert {"training_loop", "word_count"} <= _PROGRAMS.keys()


@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_runs_under_another_start_method(name: str, method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAMS[name].replace(_SAID, f'get_context("{method}")'))
    done = run_to_end(
        [sys.executable, "-W", "error", "-W", FORKS, program],
        cwd=tmp_path,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.stderr == ""
