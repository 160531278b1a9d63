"""A failed assertion of the extension raises InternalError; the segment stays sound."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import wrong_answers

pytestmark = [
    pytest.mark.beyond_asan,  # AddressSanitizer's library must be loaded first
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
AT = re.compile(r"Please report this: at shmacc/native/(\S+):(\d+) this is not true: ")


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "answers.c").write_text(wrong_answers.PRELOADED, encoding="ascii")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "answers.so", "answers.c"], cwd=folder, check=True
    )
    return folder / "answers.so"


@pytest.mark.parametrize("kind", wrong_answers.KINDS)
def test_a_failed_assertion_leaves_an_operation_done_or_undone(preloaded: Path, kind: str) -> None:
    ends = run(preloaded, kind)
    named = [AT.search(error) for error, _ in ends]
    places = {found.group(1, 2) for found in named if found}
    others = {error for (error, _), found in zip(ends, named, strict=True) if not found}
    assert others <= {wrong_answers.DIED, wrong_answers.RETURNED, wrong_answers.ALL_RIGHT}
    assert len(places) > 2, ends
    assert {done for _, done in ends} == {False, True}


def run(preloaded: Path, kind: str) -> list[tuple[str, bool]]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "helpers.wrong_answers", preloaded, kind],
        env={
            **os.environ,
            "LD_PRELOAD": str(preloaded),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [(error, done) for error, done in json.loads(done.stdout)]
