"""`shmacc-run` says its version, completes its options, and needs no PATH."""

import shutil
import sys
from pathlib import Path
from typing import Final

import pytest
from helpers import segment_layout
from helpers.support import run_to_end

import shmacc

BIN: Final = Path(sys.executable).parent
VERSIONS: Final = f"{shmacc.__version__}, layout version {segment_layout.VERSION}\n"


def _printed(*command: str) -> str:
    return run_to_end(command, cwd="/").stdout


@pytest.mark.parametrize(
    ("module", "command"), [("shmacc._run", "shmacc-run"), ("shmacc_inspect", "shmacc-inspect")]
)
def test_python_m_prints_the_same_version_as_the_command(module: str, command: str) -> None:
    assert _printed(str(BIN / command), "--version") == f"{command} {VERSIONS}"
    assert _printed(sys.executable, "-m", module, "--version") == f"{command} {VERSIONS}"


def test_bash_completes_options() -> None:
    script = _printed(str(BIN / "shmacc-run"), "--completion", "bash")
    rules = "complete -p shmacc-run | sed 's/complete -o default//; s/ shmacc-run$//'"
    completed = _printed("bash", "-c", f'{script}\neval "compgen $({rules}) -- --re"')
    assert completed.split() == ["--restarts", "--restart-on"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_accepts_the_completion_script() -> None:
    script = _printed(str(BIN / "shmacc-run"), "--completion", "zsh")
    started = "autoload -Uz compinit; compinit -D -u"
    shown = f"{started}\n{script}\nprint $_comps[shmacc-run]"
    assert _printed("zsh", "-fc", shown) == "_shmacc_run\n"


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_options_and_their_values() -> None:
    script = _printed(str(BIN / "shmacc-run"), "--completion", "fish")
    for line, completed in (
        ("--work", "--workers\thow many workers"),
        ("--restart-on k", "killed\tfailure: also after another exit status than 0"),
    ):
        asked = f"{script}\ncomplete -C 'shmacc-run {line}'"
        assert completed in _printed("fish", "--no-config", "--command", asked).splitlines()
