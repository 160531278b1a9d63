"""A grant: hosts seal their segments, ship what they have, and report it for this number."""

from collections.abc import Iterable
from dataclasses import dataclass

from shmacc._multihost.hosts import Host
from shmacc._multihost.messages import Timing


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant that the owner has made.

    Attributes:
        number: Its number.
        since: When it was made.
        places: The host of each shard.
    """

    number: int
    since: float
    places: tuple[str, ...]

    def waits_for(self, hosts: Iterable[Host]) -> list[Host]:
        """Return the hosts that have not shipped for it.

        Those that have reported no gradient, or nothing yet, too: one may have been accepted since.
        """
        return [host for host in hosts if host.takes_part and host.batch(self.number) is None]

    def is_over(self, hosts: Iterable[Host], now: float, timing: Timing, *, enough: bool) -> bool:
        """Whether its batches are there, or late.

        Args:
            hosts: Those that get it.
            now: The time.
            timing: How long it waits.
            enough: Whether the batches that are there suffice.
        """
        waited_for, age = self.waits_for(hosts), now - self.since
        if not waited_for or age >= timing.expiry:
            return True
        nobody_ships = not any(host.has_answered(self.number) for host in waited_for)
        return enough and nobody_ships and age >= timing.grace

    def times(self, timing: Timing) -> list[float]:
        """Return when that may change by itself."""
        return [self.since + timing.grace, self.since + timing.expiry]
