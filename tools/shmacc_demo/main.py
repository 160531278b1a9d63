"""The demo's command line, and what it shows."""

import argparse
import signal
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live

import shmacc
from shmacc_demo.model import TABLES, Corpus, Plan, neighbours, read
from shmacc_demo.training import CHIEF, Outcome, Show, train, train_alone


def main(arguments: list[str] | None = None) -> int:
    """Learn word vectors from a text, in processes that share nothing but names."""
    parser = argparse.ArgumentParser(prog="demo.py", description=main.__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, metavar="FILE", help="a text (default: Python's language reference)")
    add("--workers", type=int, default=Plan.workers, help="worker processes (default: %(default)s)")
    add("--backup", type=int, default=0, help="so many gradients of a step are not waited for")
    add("--steps", type=int, default=Plan.steps, help="steps of training (default: %(default)s)")
    add("--seed", type=int, default=Plan.seed, help="of all that is drawn at random")
    add("--kill", action="store_true", help="kill a worker now and then, within an apply")
    add("--kill-chief", action="store_true", help="kill the chief now and then, within a round")
    add("--check", action="store_true", help="repeat it in one process, and compare to the bit")
    add("--plot", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)")
    add("--word", action="append", help="name its neighbours; may be given several times")
    asked = parser.parse_args(arguments)
    try:
        plan = Plan(asked.workers, asked.backup, asked.steps, asked.seed)
        corpus = read(asked.corpus)
        if asked.plot:  # a picture that cannot be drawn is an error before the run
            plot(asked.plot, np.ones(1))
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(corpus.stream):,} words of text, {len(corpus.words):,} different ones")
    victims = [*range(plan.workers)] * asked.kill + [CHIEF] * asked.kill_chief
    try:
        with Live(console=console, auto_refresh=False) as live:
            outcome = train(plan, corpus, display(live, plan), victims)
        print_neighbours(console, corpus, outcome, asked.word or corpus.words[60:360:30])
        right = print_books(console, plan, outcome)
        if asked.plot:
            plot(asked.plot, outcome.losses)
        if asked.check:
            with Live(console=console, auto_refresh=False) as live:
                alone = train_alone(plan, corpus, display(live, plan))
            same = all((alone.arrays[name] == outcome.arrays[name]).all() for name in TABLES)
            console.print(f"One process alone comes to {'the same' if same else 'other'} vectors.")
            right = right and (same or plan.backup > 0)
    except KeyboardInterrupt:
        console.print("\nInterrupted: the processes are gone, and so are the names.")
        return 128 + signal.SIGINT
    return 0 if right else 1


def display(live: Live, plan: Plan) -> Show:
    """Return what shows a run: a live picture, or a line a second where there is no terminal."""
    began, due, shown = time.monotonic(), 0.0, 0

    def show(losses: NDArray[np.float64], stats: shmacc.Stats | None, killed: int) -> None:
        nonlocal due, shown
        step, now = len(losses), time.monotonic()
        if step == shown or (now < due and step < plan.steps):
            return
        due, shown = now + (0.1 if live.console.is_terminal else 1.0), step
        rate = step * plan.workers * plan.spans * plan.span / (now - began)
        line = f"step {step:,}/{plan.steps:,}  loss {losses[-50:].mean():.3f}  words/s {rate:,.0f}"
        if stats is not None:
            line += f"  applied {stats.applied:,}  dropped {stats.dropped:,}  killed {killed}"
        live.update(f"{curve(losses)}\n{line}", refresh=True)
        if not live.console.is_terminal:
            live.console.print(line)

    return show


def curve(losses: NDArray[np.float64], width: int = 72, height: int = 6) -> str:
    """Draw the losses from the first step to the last."""
    means = np.array([part.mean() for part in np.array_split(losses, min(width, len(losses)))])
    levels = (means - means.min()) / max(np.ptp(means), 1e-9) * (8 * height - 1) + 1
    eighths = (np.clip(levels - 8 * row, 0, 8).astype(int) for row in reversed(range(height)))
    return "\n".join("".join(" ▁▂▃▄▅▆▇█"[eighth] for eighth in row) for row in eighths)


def plot(path: Path, losses: NDArray[np.float64]) -> None:
    """Draw the losses into a file."""
    from matplotlib.figure import Figure  # slow, and not always there

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    span = max(1, len(losses) // 50)
    axes = figure.add_subplot(xlabel="step", ylabel="loss of a pair")
    axes.plot(losses, alpha=0.3, linewidth=0.8)
    axes.plot(
        np.arange(span - 1, len(losses)), np.convolve(losses, np.full(span, 1 / span), "valid")
    )
    figure.savefig(path, dpi=120)


def print_neighbours(console: Console, corpus: Corpus, outcome: Outcome, words: list[str]) -> None:
    """Print the nearest words of each of these."""
    (known,) = np.nonzero(corpus.counts >= 10)
    console.print("\nNearest neighbours")
    for word in words:
        near = ["(not in the text, or too rare)"]
        if word in corpus.words:
            numbers = neighbours(outcome.arrays["inputs"], corpus.words.index(word), known)
            near = [corpus.words[number] for number in numbers]
        console.print(f"{word:>15}  {', '.join(near)}", markup=False)


def print_books(console: Console, plan: Plan, outcome: Outcome) -> bool:
    """Print what became of the gradients, and of whom; return whether it adds up."""
    books, deaths = outcome.arrays, outcome.deaths
    given, taken, again = books["given"], books["taken"], int((books["begun"] > 1).sum())
    if (stats := outcome.stats) is None:
        return True
    right = (
        stats.applied == stats.taken == taken.sum()
        and (plan.backup > 0 or bool(taken.all()))
        and 0 <= (taken - given).min()
        and (taken - given).sum() <= deaths
    )
    return right
