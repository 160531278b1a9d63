"""The queue of chiefs that wait at the owner: first come, first served, each ticket once."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from shmacc._multihost.messages import Conflict, Loss

_REMEMBERED = 1024


@dataclass(slots=True)
class Ticket:
    """The entry of a chief that waits for a round, or has one."""

    name: str  # unique for ever
    required: int  # how many gradients it waits for
    host: str  # the chief's; "": not known
    heard: float  # when it asked last
    tell: bool = False  # whether it wants to know of lost hosts, and of workers that have died
    lost: list[Loss] = field(default_factory=list)  # losses to report to it
    conflict: Conflict | None = None  # a conflict to report to it instead of a round


class WaitQueue:
    """Tickets in order of arrival, and the results of tickets that have left.

    The queue remembers tickets that have left: so a late or repeated message does not queue a
    ticket again, and a chief that missed the answer to its last message can ask again. The last
    1,024 tickets are enough: earlier chiefs have long stopped sending.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Ticket] = OrderedDict()
        self._left: OrderedDict[str, bool] = OrderedDict()
        self._untold: list[Loss] = []

    def first(self, hosts: Collection[str] | None = None) -> Ticket | None:
        """Return the first ticket whose chief is on one of these hosts (None: on any host)."""
        waiting = self._waiting.values()
        return next((each for each in waiting if hosts is None or each.host in hosts), None)

    def find(self, name: str) -> Ticket | None:
        """Return the ticket, if it is in the queue."""
        return self._waiting.get(name)

    def ask(self, name: str, required: int, host: str, now: float, *, tell: bool) -> None:
        """Keep the ticket alive, and put it in the queue if it is new.

        `required` may be lower than before: at its deadline a chief may accept fewer gradients.
        """
        ticket = self._waiting.get(name)
        if ticket is not None:
            ticket.heard, ticket.required = now, required
        elif name not in self._left:
            self._waiting[name] = ticket = Ticket(name, required, host, now, tell)
            if tell:
                ticket.lost, self._untold = self._untold, []

    def leave(self, name: str, *, served: bool, told: int = 0) -> None:
        """Take the ticket out of the queue, and remember its first result.

        If it was not served, its losses go to another ticket, except for the first `told`, which
        the chief knows: it may have timed out, or died, before it was told of the others.
        """
        ticket = self._waiting.pop(name, None)
        if ticket is not None and not served:
            for loss in ticket.lost[told:]:
                self.lost(loss)
        self._left.setdefault(name, served)
        while len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget that a ticket has left, so that it can be queued again."""
        self._left.pop(name, None)

    def served(self, name: str) -> bool | None:
        """Return whether a ticket that has left was served; None: it is not known."""
        return self._left.get(name)

    def tickets(self) -> list[str]:
        return list(self._waiting)

    def silent(self, since: float) -> list[str]:
        """Return the tickets that were last heard of before `since`."""
        return [ticket.name for ticket in self._waiting.values() if ticket.heard < since]

    def lost(self, loss: Loss) -> None:
        """Keep a loss for the first ticket that wants losses, or else for the next that comes."""
        tickets = [ticket for ticket in self._waiting.values() if ticket.tell]
        (tickets[0].lost if tickets else self._untold).append(loss)

    def consumed(self) -> None:
        """Note that a round was consumed: earlier losses do not matter any more."""
        self._untold.clear()
