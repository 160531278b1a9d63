"""The examples in docs/examples: each runs as a reader would run it, and asserts its own result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

DOCS: Final = Path(__file__).parents[1] / "docs"
EXAMPLES: Final = sorted((DOCS / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_comes_to_its_result(example: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "assert" in example.read_text()


def test_the_training_loop_has_thirty_lines() -> None:
    assert len((DOCS / "examples" / "training_loop.py").read_text().splitlines()) <= 30


def test_the_page_on_training_links_every_example() -> None:
    page = (DOCS / "training.md").read_text()
    linked = re.findall(r"\(examples/(\w+\.py)\)", page)
    assert set(linked) == {example.name for example in EXAMPLES}
