"""The command line of the soak."""

from __future__ import annotations

import random
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shmacc import testing
from shmacc_soak.audit import Findings
from shmacc_soak.campaign import Campaign, Effort
from shmacc_soak.plans import plans

app = typer.Typer(add_completion=False)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long, in all.")] = 600.0,
    each: Annotated[float, typer.Option(min=0.1, help="How long a campaign is, at most.")] = 10.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that apply.")] = 3,
    takers: Annotated[int, typer.Option(min=1, help="Processes that take.")] = 2,
    pause: Annotated[
        float, typer.Option(min=1e-4, help="Seconds between kills, on average.")
    ] = 4e-3,
    patience: Annotated[float, typer.Option(help="The longest wait of a living process.")] = 2.0,
    seed: Annotated[int | None, typer.Option(help="Of whom is killed when.")] = None,
) -> None:
    """Kill workers and takers at random, replace them, and keep the books.

    Campaign follows upon campaign, each with another kind of accumulator. Ends with status 1 if a
    gradient was torn, lost or doubled, if the library's counters disagree with the books, or if a
    living process waited for longer than --patience.
    """
    console = Console(stderr=True)
    seed = random.randrange(2**32) if seed is None else seed
    random.seed(seed)
    effort = Effort(workers, takers, pause)
    kinds = plans(workers)
    rounds = max(1, round(seconds / each / len(kinds)))
    total = Findings()
    with testing.isolated_namespace() as namespace:
        start = time.monotonic()
        for number in range(rounds * len(kinds)):
            left = start + seconds - time.monotonic()
            plan = kinds[number % len(kinds)]
            found = Campaign(plan, effort).run(max(left / (rounds * len(kinds) - number), 0.1))
            console.print(f"{plan.title}: {_in_words(found)}", highlight=False)
            total += found
        leaked = testing.leaked_names(namespace)
    Console().print(_table(total, seed, time.monotonic() - start))
    if leaked:
        console.print(f"left in /dev/shm: {leaked}")
    if total.faults or total.longest > patience or leaked:
        raise typer.Exit(1)


def _in_words(found: Findings) -> str:
    return (
        f"{found.kills} kills, {found.applies} applies, {found.takes} takes, "
        f"{found.faults} faults, longest wait {found.longest * 1e3:.0f} ms"
    )


def _table(found: Findings, seed: int, seconds: float) -> Table:
    table = Table(title=f"{seconds:.0f} s, seed {seed}", show_header=False)
    for what, number in [
        ("processes killed", found.kills),
        ("  in an apply", found.in_applies),
        ("  in the block of a round", found.in_blocks),
        ("processes stopped for a while", found.stops),
        ("gradients accepted", found.applies),
        ("gradients refused as stale", found.refused),
        ("contributors applied again", found.again),
        ("gradients in whose worker never learned it", found.unanswered_in),
        ("takes and rounds", found.takes),
        ("  that died with their taker", found.takes_died),
        ("rounds given up", found.given_up),
        ("snapshots looked at", found.snapshots),
        ("states restored", found.restores),
        ("torn", found.torn),
        ("lost", found.lost),
        ("doubled", found.doubled),
        ("contributors twice in a round", found.repeated),
        ("in a round of another step", found.misplaced),
        ("counters that disagree", found.miscounted),
        ("processes that failed", found.failed),
    ]:
        table.add_row(what, f"{number:,}")
    for what, longest in [
        ("longest wait to attach", found.longest_attach),
        ("longest wait to apply", found.longest_apply),
        ("longest wait to take (gradients included)", found.longest_take),
    ]:
        table.add_row(what, f"{longest * 1e3:,.0f} ms")
    return table
