"""A replica without a rank takes the one of `shmacc.run` or ``shmacc-run``."""

import re
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT, run
from helpers.support import LONG
from torch import nn

from shmacc import errors
from shmacc.torch import AsyncReplicas, Replica


@pytest.mark.parametrize(("found", "text"), [
    (None, "is not set: this process is no worker"), ("-1", "is -1: this process is the chief"),
    ("", "is '', which is no rank"), ("one", "is 'one', which is no rank"),
    ("-2", "is '-2', which is no rank"),
])  # fmt: skip
def test_a_missing_rank_is_an_error_that_says_why(
    found: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHMACC_RANK", raising=False)
    if found is not None:
        monkeypatch.setenv("SHMACC_RANK", found)
    with pytest.raises(
        errors.InvalidArgumentError, match=f"rank must be given, since SHMACC_RANK {text}"
    ):
        Replica(nn.Linear(2, 1), "absent", timeout=0)


def test_a_replicas_rank_is_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMACC_RANK", "1")
    with AsyncReplicas(nn.Linear(2, 1), "ranks", total_num_replicas=2):
        for given, rank in ((None, 1), (0, 0)):
            with Replica(nn.Linear(2, 1), "ranks", given, timeout=LONG) as replica:
                assert replica.rank == rank
        monkeypatch.setenv("SHMACC_RANK", "2")  # more workers than replicas
        with pytest.raises(errors.InvalidArgumentError, match="rank must be 0 to 1, but was 2"):
            Replica(nn.Linear(2, 1), "ranks", timeout=LONG)


def test_the_pages_program_runs_with_the_command(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "torch.md").read_text()
    (program,) = re.findall(r"```python\n(# train\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    command = Path(sys.executable).with_name("shmacc-run")
    ran = run([command, "--workers", "3", tmp_path / "train.py"], tmp_path)
    assert (ran.stdout, ran.stderr) == ("chief: [[1.0, 1.0, 1.0]]\n", "")
