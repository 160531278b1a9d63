"""Keeps steps from nodes that do not have the arrays of these steps yet.

While a node's gate is closed, the owner tells it nothing: so no step reaches its segment. A chief
may have rounds of several groups open, and publish in any of their blocks. So the gate is closed at
the owners of all these groups, and of groups that open a round later: the node sees no
next step of any of them.

A node that joins may have arrays of an earlier step, too, if Ray was started again there and
/dev/shm stayed. So owners keep their steps from nodes that join, until they hear that these are
fed, or the publisher is gone: nobody else would feed them.
"""

import contextlib
from collections.abc import Iterable

from shmacc.errors import FailedPreconditionError
from shmacc.ray._link import Link, open_links


class Gates:
    """The gates that owners have closed for a publisher. The caller holds a lock.

    Args:
        by: The publisher's name: each publisher opens only what it has closed.
        hosts: The nodes that the publisher feeds; None: all.
    """

    def __init__(self, by: str, hosts: frozenset[str] | None) -> None:
        self._by, self._hosts = by, hosts
        self._links: dict[str, set[Link]] = {}  # by node: links to owners that closed its gate
        self._unsure: dict[Link, set[str]] = {}  # nodes whose gates may not be closed there yet
        self._told: frozenset[Link] = frozenset()  # links to owners that know which nodes are fed

    @property
    def nodes(self) -> set[str]:
        """The nodes whose gates are closed."""
        return set(self._links)

    def close(self, nodes: Iterable[str], until: float) -> None:
        """Have the owners of all open rounds close these nodes' gates."""
        asked = set(nodes)
        for link in open_links():
            known = {node for node in asked if link in self._links.get(node, ())}
            if new := asked - (known - self._unsure.get(link, set())):
                # Note them before the call: an owner that answers too late has closed them.
                for node in new:
                    self._links.setdefault(node, set()).add(link)
                self._unsure.setdefault(link, set()).update(new)
                link.gate(new, self._by, until, closed=True)
                if left := self._unsure.pop(link) - new:
                    self._unsure[link] = left

    def tell_new_owners(self, fed: frozenset[str], until: float) -> None:
        """Tell owners of open rounds which nodes are fed, unless they know it already.

        Raises:
            As `Link.call`.
        """
        for link in open_links() - self._told:
            link.call("do", "publishes", self._by, self._hosts, fed, until=until)
            link.gate(fed, self._by, until, closed=False)  # an earlier chief may have closed them
            self._told = frozenset(each for each in {*self._told, link} if not each.closed)

    def tell_again(self, fed: frozenset[str]) -> None:
        """Tell known owners again: they forget silent publishers. Needs no lock, does not wait."""
        for link in self._told:
            if not link.closed:
                link.tell("do", "publishes", self._by, self._hosts, fed)

    def open(self, node: str, until: float) -> None:
        """Have a node's gate opened. After an error it can be tried again.

        `PublishedArrays.close` calls this without the lock, perhaps while its feeder calls it.
        """
        for link in tuple(self._links.get(node, ())):
            with contextlib.suppress(FailedPreconditionError):  # the group is closed, or gone
                link.gate({node}, self._by, until, closed=False)
        self._links.pop(node, None)
