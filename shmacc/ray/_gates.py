"""Nodes that must learn of no step until they have the arrays that go with it.

While a node's gate is closed, the owner tells it nothing: so no step reaches its segment. A chief
may have rounds of several groups open, and publish in any of their blocks. So the gate is closed at
all of them, and at those that open a round later: whichever step comes next, it is not seen there.
"""

import contextlib
from collections.abc import Iterable

from shmacc.errors import FailedPreconditionError
from shmacc.ray._link import OPEN, Link


class Gates:
    """The gates that what publishes has had owners close. The caller has a lock.

    Args:
        by: Its name: each opens what it has closed.
    """

    def __init__(self, by: str) -> None:
        self._by = by
        self._links: dict[str, set[Link]] = {}  # to owners that have closed it, by node

    @property
    def nodes(self) -> set[str]:
        """Those whose gates are closed."""
        return set(self._links)

    def close(self, nodes: Iterable[str], until: float) -> None:
        """Have the owners of all open rounds close these nodes' gates.

        Raises:
            As `Link.call`.
        """
        asked = set(nodes)
        for link in OPEN.copy():
            if new := {node for node in asked if link not in self._links.get(node, ())}:
                link.gate(new, self._by, until, closed=True)
                for node in new:
                    self._links.setdefault(node, set()).add(link)

    def open(self, node: str, until: float) -> None:
        """Have a node's gate opened. After an error it can be tried again.

        Raises:
            DeadlineExceededError: An owner has not answered.
        """
        for link in self._links[node]:
            with contextlib.suppress(FailedPreconditionError):  # the group is closed, or no more
                link.gate({node}, self._by, until, closed=False)
        del self._links[node]
