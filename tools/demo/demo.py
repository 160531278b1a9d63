"""The demo: trains word vectors in processes that share nothing but names. See ``--help``."""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Before NumPy's import: one thread in each process, because the processes run in parallel.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from shmacc_demo.model import TABLES, Arrays, Plan, read
from shmacc_demo.training import CHIEF, train, train_alone


def main(arguments: list[str] | None = None) -> int:
    """Learn word vectors from a text, in processes that share nothing but names."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, metavar="FILE", help="a text (default: Python's language reference)")
    add("--workers", type=int, default=Plan.workers, help="worker processes (default: %(default)s)")
    add("--backup", type=int, default=0, help="so many gradients of a step are not waited for")
    add("--steps", type=int, default=Plan.steps, help="steps of training (default: %(default)s)")
    add("--seed", type=int, default=Plan.seed, help="of all that is drawn at random")
    add("--kill", action="store_true", help="have workers killed now and then, within an apply")
    add("--kill-chief", action="store_true", help="have the chief killed now and then in a round")
    add("--check", action="store_true", help="repeat it in one process, and compare to the bit")
    add("--word", action="append", help="name its neighbours; may be given several times")
    asked = parser.parse_args(arguments)
    try:
        plan = Plan(asked.workers, asked.backup, asked.steps, asked.seed)
        words, text = read(asked.corpus)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if asked.check and asked.backup:
        parser.error("--check is impossible: with --backup the result depends on chance")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("shmacc").setLevel(logging.ERROR)  # the curve's line counts the killed ones
    print(f"{len(text['stream']):,} words of text, {len(words):,} different ones")
    victims = [*range(plan.workers)] * asked.kill + [CHIEF] * asked.kill_chief
    try:
        began = time.monotonic()
        found, report = train(plan, text, show, victims)
        print(f"\n{time.monotonic() - began:.1f} s: {curve(found['figures'])}")
        if asked.check:
            alone = train_alone(plan, text, show)
            if not all(np.array_equal(alone[table], found[table]) for table in TABLES):
                raise RuntimeError("One process comes to other vectors")
            print("One process comes to the same vectors, to the bit.")
    except KeyboardInterrupt:
        print("\nInterrupted: the processes are gone, and so are the names.")
        return 128 + signal.SIGINT
    print("\nNearest neighbours")
    for word in asked.word or words[50:350:30]:
        print(f"{word:>15}: {', '.join(neighbours(words, text, found['inputs'], word))}")
    print(f"{report}.\nThe books balance: each gradient was taken exactly once.")
    return 0


def show(plan: Plan, step: int, arrays: Arrays, more: str) -> None:
    """Show a run's progress in a line that is overwritten; only on a terminal."""
    if step > 0 and sys.stdout.isatty():
        line = f"{curve(arrays['figures'][:step])}, step {step:,}/{plan.steps:,}, {more}"
        print(f"\r{line} ", end="", flush=True)


def curve(figures: NDArray[Any]) -> str:
    """Return a drawing of the losses, and the last one as a number."""
    parts = np.array_split(figures[:, 0] / figures[:, 1], min(24, len(figures)))
    means = np.array([part.mean() for part in parts])
    levels = (means - means.min()) / max(float(np.ptp(means)), 1e-9)
    return "".join("▁▂▃▄▅▆▇█"[int(level * 7)] for level in levels) + f" loss {means[-1]:.3f}"


def neighbours(words: list[str], text: Arrays, table: NDArray[Any], word: str) -> list[str]:
    """Return the words whose vectors have the smallest angles to this word's vector."""
    if word not in words:
        return ["(not in the text, or too rare)"]
    known = np.flatnonzero(text["counts"] // 10)  # rarer words have poor vectors
    lengths = np.maximum(np.linalg.norm(table[known], axis=1), 1e-12)
    nearest = known[np.argsort(-(table[known] @ table[words.index(word)]) / lengths)]
    return [words[other] for other in nearest[:7] if words[other] != word][:6]


if __name__ == "__main__":
    sys.exit(main())
