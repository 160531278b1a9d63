"""The plan of a run, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmacc_demo.batches import Recipe

if TYPE_CHECKING:
    from shmacc_demo.ledger import Ledger
    from shmacc_demo.model import Parameters


@dataclass(frozen=True)
class Plan:
    """A run: with these numbers and a text, all is settled but the order of additions."""

    workers: int = 3
    backup: int = 0
    steps: int = 1000
    seed: int = 1
    kill: bool = False
    width: int = 64
    rate: float = 0.15
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        if self.workers < 1:
            raise ValueError(f"there must be at least one worker, not {self.workers}")
        if self.steps < 1:
            raise ValueError(f"there must be at least one step, not {self.steps}")
        if not 0 <= self.backup < self.workers:
            raise ValueError(
                f"of {self.workers} workers at least none and at most {self.workers - 1} can be "
                f"backups, not {self.backup}"
            )


@dataclass(frozen=True)
class Progress:
    """How things stand after a step."""

    step: int
    loss: float
    words: float
    """Words of text learnt from, since the start."""
    applied: int = 0
    """Gradients that the accumulators accepted, all three together."""
    dropped: int = 0
    """Gradients that they refused as stale."""
    alive: int = 0
    killed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    parameters: Parameters
    ledger: Ledger | None
    """The books of the accumulators, where there were any."""
