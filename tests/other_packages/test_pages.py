"""The pages' programs and examples that use other packages, run as a reader would run them."""

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from helpers import pages
from helpers.thrice import Thrice

import shmacc

# Several processes import and compile for seconds each, longer on a busy machine.
SECONDS: Final = 90
pytestmark = pytest.mark.timeout(5 * SECONDS)

PROGRAMS: Final = pages.programs(with_others=True)
EXAMPLES: Final = pages.examples(with_others=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_page_programs_survive_kills_and_errors(name: str, tmp_path: Path, namespace: str) -> None:
    Thrice.of_text(PROGRAMS[name], tmp_path, namespace, SECONDS).run()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_survive_kills_and_errors(example: Path, tmp_path: Path, namespace: str) -> None:
    assert "assert" in example.read_text()
    link = f"({example.relative_to(pages.ROOT / 'docs')})"
    assert any(link in page.read_text() for page in pages.PAGES)
    Thrice(example, tmp_path, namespace, SECONDS).run()


def test_torchs_first_program_survives_a_killed_chief_and_a_failed_replica(tmp_path: Path) -> None:
    """The program's processes are started one by one, so `Thrice` cannot run it."""
    page = (pages.ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(import sys\n.*?)```", page, re.DOTALL)
    program = program.replace("time.sleep(0.01)  # so that there is time to kill it", "pass")
    program = program.replace("UPDATES = 3, 2000", "UPDATES = 3, 600")
    with_a_typo = program.replace("replica.step()", "raise ValueError('a typo')")
    assert with_a_typo != program

    def start(role: str, text: str = program) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", text, role]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        return stack.enter_context(process)

    with ExitStack() as stack:
        failing = start("2", with_a_typo)
        chief, *replicas = [start(role) for role in ("chief", "0", "1")]
        assert "ValueError: a typo" in failing.communicate(timeout=SECONDS)[1]
        assert failing.returncode == 1
        replicas.append(start("2"))
        with shmacc.AccumulatorGroup.attach("xor", timeout=SECONDS) as group:
            assert group.wait_step(5, timeout=SECONDS) > 5
            chief.kill()
            assert chief.communicate(timeout=SECONDS)[0] == "starts at step 0\n"
            assert chief.returncode == -signal.SIGKILL
            killed_at = group.global_step
        started, result = start("chief").communicate(timeout=2 * SECONDS)[0].splitlines()
        # The new chief starts at the next step if the update had begun.
        assert started in {f"starts at step {step}" for step in (killed_at, killed_at + 1)}
        assert result == "[0.0, 1.0, 1.0, 0.0]"
        assert [replica.wait(SECONDS) for replica in replicas] == [0, 0, 0]
