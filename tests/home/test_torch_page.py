"""The page on torch and its example: programs run as a reader would paste them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

DOCS: Final = Path(__file__).parents[2] / "docs"
PROGRAMS: Final = re.findall(r"```python\n(.*?)```", (DOCS / "torch.md").read_text(), re.DOTALL)
EXAMPLE: Final = (DOCS / "examples" / "torch" / "digits.py").read_text()


@pytest.mark.parametrize(
    "program", [*PROGRAMS, EXAMPLE], ids=[*map(str, range(len(PROGRAMS))), "digits"]
)
def test_a_program_runs(program: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(program)
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=os.environ,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
