"""Workers and takers killed at random for a while; ``make soak`` does it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.beyond_asan

SECONDS: Final = 4
_SOAK: Final = Path(__file__).parents[2] / "tools" / "soak" / "soak.py"


@pytest.mark.parametrize("only", [[], ["--training"]], ids=["all kinds", "training"])
def test_a_slice(only: list[str]) -> None:
    """It judges itself; what it says is shown if it finds anything."""
    command = [sys.executable, "-P", str(_SOAK), f"--seconds={SECONDS}", f"--each={SECONDS}", *only]
    # -P keeps the tree's shmacc out of the way of the installed one, and the tools out of its path.
    environment = os.environ | {"PYTHONPATH": str(_SOAK.parent)}
    soak = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert soak.returncode == 0, f"{soak.stdout}\n{soak.stderr}"
