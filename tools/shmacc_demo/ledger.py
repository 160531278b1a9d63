"""The accounts: gradients given by the workers, counted by the accumulators, taken by the chief."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Account:
    """One accumulator's gradients, from the first to the last."""

    part: str
    given: int
    """Accepted, as the workers noted themselves; one killed in between could not note its last."""
    accepted: int
    """Accepted, as the accumulator counted (what the chief only looked at and put back apart)."""
    refused: int
    """Came too late for their step."""
    handed_out: int
    """Handed out by takes, as the accumulator counted (likewise)."""
    taken: int
    """Taken, as the chief counted what it trained with."""
    left: int
    """Still in the accumulator, or dropped from it when the step went on."""
    recoveries: int
    """Applies cut short by a death and undone by the next one to come."""

    def balanced(self, deaths: int) -> bool:
        """Whether the three counts agree, up to one gradient for each worker that died."""
        return (
            self.accepted == self.handed_out + self.left
            and self.handed_out == self.taken
            and 0 <= self.accepted - self.given <= deaths
        )


@dataclass(frozen=True)
class Ledger:
    """The accounts of all three accumulators, and the workers' deaths."""

    accounts: tuple[Account, ...]
    deaths: int
    """Workers that died before their time, and were replaced."""
    redone: int
    """Parts of gradients that the dead had not given and their replacements gave."""
    spared: int
    """Parts of gradients that the dead had given and nobody had to give again."""
    quota: int | None
    """What must have been taken from each accumulator, where every worker is waited for."""

    @property
    def balanced(self) -> bool:
        """Whether everything adds up."""
        return all(
            account.balanced(self.deaths) and self.quota in {None, account.taken}
            for account in self.accounts
        )
