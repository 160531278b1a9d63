"""Every Python example in the README runs, as a reader would paste it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_README = Path(__file__).parents[1] / "README.md"
_EXAMPLES = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)


def test_the_readme_has_examples() -> None:
    assert len(_EXAMPLES) >= 3


@pytest.mark.parametrize("number", range(len(_EXAMPLES)))
def test_an_example_of_the_readme_runs(number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(_EXAMPLES[number])
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=os.environ,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    if number == 0:
        assert "step 2: rows [0, 1, 2, 3, 7], row 7 has mean [2.0, 2.0]" in ran.stdout
