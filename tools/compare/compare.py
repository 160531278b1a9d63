"""Compares what one chooses between, to train with several processes of one machine.

    make compare                         # every way, three times, and with kills; half an hour
    make compare COMPARE="--ways shmacc_synchronous hogwild --tasks words --turns 1"

Each way trains the same model on the same batches with the same optimizer, to the same loss, and
once more while a worker, and while the process that leads, is killed half-way; whoever is dead is
started again. Writes a table and a picture of the loss over time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from pathlib import Path
from typing import Final

from shmacc_compare import report
from shmacc_compare.crew import CHIEF
from shmacc_compare.frame import Run, train
from shmacc_compare.tasks import TASKS

WAYS: Final = (
    "shmacc_synchronous",
    "shmacc_asynchronous",
    "hogwild",
    "ddp",
    "queues",
    "ray_actor",
    "gensim_word2vec",
)
# What trains one task only; and it has no processes to be killed.
ONLY: Final = {"gensim_word2vec": "words"}
VICTIM: Final = 1


def main() -> int:
    """Compare."""
    arguments = _arguments()
    machine = f"{arguments.workers} workers, {_processor()}, Python {platform.python_version()}"
    rows = [report.Row(way, _runs(way, arguments)) for way in arguments.ways]
    print(table := report.table(rows, arguments.tasks))
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        page = report.page(table, machine, arguments.turns)
        (arguments.output / "README.md").write_text(page, encoding="utf-8")
        report.draw(rows, arguments.tasks, arguments.output / "loss.svg")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=tuple(TASKS), metavar="TASK")
    parser.add_argument("--turns", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=60, help="seconds without a word")
    parser.add_argument("--output", type=Path, help="folder for the page and the picture")
    return parser.parse_args()


def _runs(way: str, arguments: argparse.Namespace) -> report.Runs:
    """Train by this way, each task so often as was asked for, and the first task with deaths."""
    runs = report.Runs()
    tasks = [task for task in arguments.tasks if ONLY.get(way, task) == task]
    for task in tasks:
        turns = [_told(way, task, None, arguments) for _ in range(arguments.turns)]
        runs.whole[task] = sorted(turns, key=lambda run: run.seconds)[len(turns) // 2]
        runs.busy[task] = statistics.median(run.busy for run in turns)
    if way not in ONLY:
        runs.worker_killed = _told(way, tasks[0], VICTIM, arguments)
        runs.chief_killed = _told(way, tasks[0], CHIEF, arguments)
    return runs


def _told(way: str, task: str, victim: int | None, arguments: argparse.Namespace) -> Run:
    run = train(way, task, arguments.workers, victim=victim, patience=arguments.patience)
    whom = "" if victim is None else f", {'the chief' if victim == CHIEF else 'a worker'} killed"
    print(f"{way}, {task}{whom}: {report.outcome(run)}, {run.seconds:.1f} s", file=sys.stderr)
    return run


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} processors ({models[0] if models else platform.machine()})"


if __name__ == "__main__":
    raise SystemExit(main())
