"""The demo's command line."""

from __future__ import annotations

import signal
import time
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated, NoReturn

import numpy as np
import typer
from rich.console import Console

import shmacc
from shmacc_demo import corpus as text
from shmacc_demo import plot, report
from shmacc_demo.chief import Chief
from shmacc_demo.crew import WorkerFailedError
from shmacc_demo.display import Display
from shmacc_demo.plan import Plan
from shmacc_demo.sequential import Sequential
from shmacc_demo.signed import ExactnessError

if TYPE_CHECKING:
    from types import FrameType

    from shmacc_demo.corpus import Corpus
    from shmacc_demo.plan import Outcome

INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def demo(
    *,
    corpus: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            readable=True,
            help="A text file to learn from. [default: the Python language reference]",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = Plan.workers,
    backup: Annotated[
        int,
        typer.Option(
            min=0,
            help="The chief goes on when all but this many workers' gradients have come; those "
            "that come later are dropped as stale.",
        ),
    ] = Plan.backup,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = Plan.steps,
    kill: Annotated[
        bool,
        typer.Option(
            "--kill",
            help="Kill a worker in the middle of an apply now and then, and start another.",
        ),
    ] = False,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Do the same in one process, without accumulators. With --backup 0 the result of "
            "the processes is this one's, but for rounding.",
        ),
    ] = False,
    plot_to: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the loss curve (needs matplotlib)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn at random.")] = Plan.seed,
    word: Annotated[
        list[str] | None,
        typer.Option(help="Tell the neighbours of this word; may be given several times."),
    ] = None,
) -> None:
    """Learn word vectors from a text, in processes that share nothing but names.

    Skip-gram with negative sampling, in NumPy. The workers' gradients meet in two sparse
    accumulators, for the two tables of vectors, and a dense one for the rest.
    """
    if sequential and (kill or backup):
        raise typer.BadParameter("--sequential has no workers for --kill and --backup")
    try:
        plan = Plan(workers=workers, backup=backup, steps=steps, seed=seed, kill=kill)
        if plot_to is not None:
            plot.check(plot_to)
        found = text.read(corpus)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    _turn_signals_into_interrupts()
    console = Console()
    try:
        outcome, losses = _train(console, plan, found, sequential=sequential)
    except KeyboardInterrupt:
        console.print("\nInterrupted: the workers are gone, and so are the names.")
        raise typer.Exit(INTERRUPTED) from None
    except (shmacc.errors.ShmaccError, WorkerFailedError, ExactnessError) as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(1) from None

    report.tell_curve(console, losses)
    words = word or ([*report.PROBES] if corpus is None else report.choose_words(found))
    report.tell_neighbours(console, found, outcome.parameters, words)
    if outcome.ledger is not None:
        report.tell_books(console, outcome.ledger)
    if plot_to is not None:
        plot.draw(plot_to, losses, f"{steps:,} steps, {workers} workers, {backup} backups")
        console.print(f"The loss curve is in {plot_to}.")
    if outcome.ledger is not None and not outcome.ledger.balanced:
        raise typer.Exit(1)


def _train(
    console: Console, plan: Plan, found: Corpus, *, sequential: bool
) -> tuple[Outcome, list[float]]:
    console.print(
        f"{len(found.stream):,} words of text, {len(found.words):,} different ones; "
        f"{plan.workers} workers"
        + (" (in one process)" if sequential else f", {plan.backup} of them backups")
    )
    since = time.perf_counter()
    losses = []
    kind = Sequential if sequential else Chief
    with kind(plan, found) as run, Display(console, plan, processes=not sequential) as display:
        for progress in run.train():
            losses.append(progress.loss)
            display.show(progress)
        outcome = run.outcome()
    tables = (outcome.parameters.inputs, outcome.parameters.outputs)
    norms = " and ".join(f"{np.linalg.norm(table):.3f}" for table in tables)
    console.print(
        f"Trained in {time.perf_counter() - since:.1f} s; the tables' norms are {norms}.",
        highlight=False,
    )
    return outcome, losses


def _turn_signals_into_interrupts() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        # Once only: the cleanup must not be interrupted too.
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in signals:
        signal.signal(one, interrupt)
