"""coverage measures a program and its workers."""

import sys
from pathlib import Path
from typing import Final

from helpers.support import run_to_end

SETTINGS: Final = """
[run]
source = .
parallel = true
concurrency = multiprocessing
sigterm = true
"""
PROGRAM: Final = """\
import multiprocessing

import numpy as np
import shmacc


def work(acc, rank):
    acc.apply_grad([rank], np.ones((1, 2)), local_step=0, contributor=rank)
    acc.wait_step(0, timeout=60)


if __name__ == "__main__":
    with shmacc.SparseConditionalAccumulator("f4", (None, 2)) as acc:
        context = multiprocessing.get_context("spawn")
        crew = [context.Process(target=work, args=(acc, rank)) for rank in range(2)]
        for process in crew:
            process.start()
        with acc.round(2, timeout=60) as taken:
            print(taken.indices.tolist())
        for process in crew:
            process.join()
"""


def test_lines_of_workers_are_covered(tmp_path: Path) -> None:
    (tmp_path / ".coveragerc").write_text(SETTINGS)
    (tmp_path / "program.py").write_text(PROGRAM)

    def coverage(*arguments: str) -> str:
        ran = run_to_end([sys.executable, "-m", "coverage", *arguments], timeout=100, cwd=tmp_path)
        return ran.stdout

    assert "[0, 1]" in coverage("run", "program.py")
    coverage("combine")
    assert coverage("report", "--format=total").strip() == "100"
