"""Grants that came to nothing: whose gradients were refused for one waits for the next step."""

from collections.abc import Iterable

from shmacc._multihost.hosts import Host
from shmacc._multihost.messages import NO_GRANT, Fence


class Withdrawn:
    """The grants of the present fence that came to nothing; those of an owner before this one, too.

    Args:
        patience: How long nothing may come before a host that does not know whether it has refused
            gradients is taken for one that has.
        first: Whether there was no owner before this one.
    """

    def __init__(self, patience: float, *, first: bool) -> None:
        self._patience = patience
        self._grants: set[int] = set() if first else {NO_GRANT}
        self._first_grant = 1  # of this fence
        self._count, self._since = 0, 0.0  # how many gradients there were, and since when

    def add(self, grant: int) -> None:
        """Note a grant that came to nothing."""
        self._grants.add(grant)

    def add_all(self, last: int) -> None:
        """Note all of this fence, until the last one: a batch was lost that was shipped for one."""
        self._grants.update(range(self._first_grant, last + 1))

    def moved(self, last: int) -> None:
        """Forget them: a new fence. `last` is the last grant there was."""
        self._grants.clear()
        self._first_grant = last + 1

    def counted(self, count: int, now: float) -> None:
        """Note how many gradients there are."""
        if count != self._count:
            self._count, self._since = count, now

    def keep_workers_waiting(self, hosts: Iterable[Host], fence: Fence, now: float) -> bool:
        """Whether workers may wait for the next step, with nothing in this one."""
        stalled = now - self._since >= self._patience
        return any(host.lets_workers_wait(self._grants, fence, stalled=stalled) for host in hosts)
