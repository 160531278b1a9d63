"""`shmacc-inspect wait`: it returns when it has come about, and not before."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.inspect_tool import COMMAND, ask, path_of, run
from helpers.support import LONG, until

from shmacc import ConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = "0.2s"
_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}[platform.machine()]


@pytest.fixture
def bias() -> Iterator[ConditionalAccumulator]:
    """An accumulator that is gone after the test."""
    with ConditionalAccumulator(np.float64, [3], "bias") as acc:
        yield acc
        acc.unlink()


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, "wait", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_looked(process: subprocess.Popen[str]) -> None:
    """Return once it sleeps until its next look."""
    call = Path(f"/proc/{process.pid}/syscall")
    until(lambda: call.read_text(encoding="ascii").startswith(f"{_CLOCK_NANOSLEEP} "))


def ended(process: subprocess.Popen[str]) -> int:
    out, talk = process.communicate(timeout=LONG)
    assert (out, "Traceback" in talk) == ("", False)
    return process.returncode


def test_it_waits_for_a_step(bias: ConditionalAccumulator) -> None:
    process = started("bias", "--for", "step=2")
    for step in range(2):
        assert process.poll() is None
        bias.apply_grad([1, 2, 3], local_step=step)
        bias.take_grad(1)
    assert ended(process) == 0
    assert run("wait", "bias", "--for", "step=1").returncode == 0  # it is past that


@pytest.mark.usefixtures("bias")
def test_another_segment_of_the_name_is_not_the_one() -> None:
    process = started("bias", "--for", "gone")
    has_looked(process)
    assert run("wait", "bias", "--for", "gone", "--timeout", SHORT).returncode == 124
    with ConditionalAccumulator(np.float64, [3], "other") as other:
        path_of("other").replace(path_of("bias"))
        assert ended(process) == 0
        other.unlink()
        path_of("bias").unlink()
        for semaphore in path_of("bias").parent.glob(f"sem.{path_of('other').name}.*"):
            semaphore.unlink()
    for semaphore in path_of("bias").parent.glob(f"sem.{path_of('bias').name}.*"):
        semaphore.unlink()


def test_it_waits_for_the_end_which_is_no_step(bias: ConditionalAccumulator) -> None:
    gone, never = started("bias", "--for", "gone"), started("bias", "--for", "step=5")
    for process in (gone, never):
        has_looked(process)
    bias.unlink()
    assert (ended(gone), ended(never)) == (0, 3)


def test_it_waits_for_all_of_several(bias: ConditionalAccumulator) -> None:
    with ConditionalAccumulator(np.float64, [3], "brother") as other:
        process = started("b*", "--for", "count=1")
        bias.apply_grad([1, 2, 3])
        late = run("wait", "bias", "brother", "--for", "count=1", "--timeout", SHORT)
        assert late.returncode == 124
        assert "not so for 1 segment" in late.stderr
        assert process.poll() is None
        other.apply_grad([1, 2, 3])
        assert ended(process) == 0
        other.unlink()


def test_its_answer_in_json(bias: ConditionalAccumulator) -> None:
    assert ask("wait", "bias", "--for", "step=0")["reached"]
    late = run("wait", "bias", "--for", "step=1", "--timeout", SHORT, "--json")
    assert late.returncode == 124
    assert not json.loads(late.stdout)["reached"]
    assert json.loads(late.stdout)["waited_seconds"] >= 0.2
    assert bias.stats().attached == 1
