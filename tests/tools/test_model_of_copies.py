"""The model of parameters over many hosts: its quick slice holds, and each rule is needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_CHECK = Path(__file__).parents[2] / "tools" / "model" / "copies" / "check.py"


@pytest.mark.timeout(900)
def test_the_quick_slice_holds_and_each_rule_is_needed() -> None:
    ran = subprocess.run(
        [sys.executable, str(_CHECK), "--quick"],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rules = set(
        re.findall(r'^    "(\w+)": "', (_CHECK.parent / "states.py").read_text(), re.MULTILINE)
    )
    found = set(re.findall(r"without '(\w+)': .* found: ", ran.stdout))
    assert found == rules - {"held"}
