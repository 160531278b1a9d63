"""The report at the end of a run: the loss curve, the neighbours, the accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from shmacc_demo.model import neighbours

if TYPE_CHECKING:
    from rich.console import Console

    from shmacc_demo.corpus import Corpus
    from shmacc_demo.ledger import Ledger
    from shmacc_demo.model import Parameters

PROBES = (
    "class",
    "except",
    "float",
    "import",
    "yield",
    "tuple",
    "left",
    "raise",
    "bytes",
    "async",
)
"""Words of the default text whose company is easy to judge."""

_WIDTH, _HEIGHT = 60, 8
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:-=+*%#"
_KNOWN = 10
"""Of words that occur less often too little is known to name them as neighbours."""


def tell_curve(console: Console, losses: list[float]) -> None:
    """Draw the loss of every step."""
    pieces = np.array_split(np.array(losses), min(_WIDTH, len(losses)))
    means = np.array([piece.mean() for piece in pieces])
    low, high = float(means.min()), float(means.max())
    blocks = _BLOCKS if console.encoding.startswith("utf") else _PLAIN
    steps = len(blocks) - 1
    levels = np.rint((means - low) / max(high - low, 1e-9) * (_HEIGHT * steps - 1)).astype(int) + 1
    console.print("\nLoss of a pair, from the first step to the last")
    for row in reversed(range(_HEIGHT)):
        line = "".join(blocks[min(max(level - row * steps, 0), steps)] for level in levels)
        edge = {_HEIGHT - 1: f"{high:.3f}", 0: f"{low:.3f}"}.get(row, "")
        console.print(Text(f"{edge:>8} {line}", style="cyan"))


def tell_neighbours(
    console: Console, corpus: Corpus, parameters: Parameters, words: list[str]
) -> None:
    """Name the nearest words of each of these; say so where a word is not known."""
    (candidates,) = np.nonzero(corpus.counts >= _KNOWN)
    table = Table(title="\nNearest neighbours", title_justify="left", box=None)
    table.add_column("word", style="bold")
    table.add_column("words that keep the same company")
    for word in words:
        number = corpus.number(word)
        if number is None:
            table.add_row(word, Text("not in the text, or too rare", style="dim"))
            continue
        found = neighbours(parameters, number, candidates, 6)
        table.add_row(word, ", ".join(corpus.words[other] for other, _ in found))
    console.print(table)


def choose_words(corpus: Corpus, wanted: int = 10) -> list[str]:
    """Choose words of any text: neither so common nor so rare that they tell nothing."""
    known = int((corpus.counts >= _KNOWN).sum())
    shortest = 4
    apt = [word for word in corpus.words[min(50, known // 4) : known] if len(word) >= shortest]
    return sorted(apt[:: max(1, len(apt) // 2 // wanted)][:wanted])


def tell_books(console: Console, ledger: Ledger) -> None:
    """Show what was accepted, dropped and taken, and whether it adds up."""
    table = Table(title="\nGradients, by the accumulators' own counters", title_justify="left")
    table.add_column("accumulator")
    for name in ("accepted", "dropped", "taken", "left", "undone"):
        table.add_column(name, justify="right")
    for account in ledger.accounts:
        table.add_row(
            account.part,
            *(
                f"{number:,}"
                for number in (
                    account.accepted,
                    account.refused,
                    account.handed_out,
                    account.left,
                    account.recoveries,
                )
            ),
        )
    console.print(table)
    if ledger.deaths:
        undone = sum(account.recoveries for account in ledger.accounts)
        console.print(
            f"{ledger.deaths} workers were killed at their work and replaced; {undone} of them "
            "left an apply half done, which the next process to come undid. Of their "
            f"{ledger.redone + ledger.spared} parts of gradients in those steps {ledger.spared} "
            f"were in and stayed in; {ledger.redone} were not, and were computed again."
        )
    if ledger.balanced:
        console.print(
            "The books balance: all that was accepted was taken, each gradient exactly once."
        )
    else:
        console.print("The books do not balance.", style="bold red")
        console.print(ledger)
