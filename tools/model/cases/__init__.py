"""What is checked: the cases of each model."""

from cases import commit, departures, line, lock, opening, presence, rounds, tables, updates
from cases.case import Case

__all__ = ["CASES", "Case"]

CASES = (
    *lock.CASES,
    *commit.CASES,
    *rounds.CASES,
    *opening.CASES,
    *presence.CASES,
    *departures.CASES,
    *line.CASES,
    *updates.CASES,
    *tables.CASES,
)
