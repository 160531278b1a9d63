"""Contributors that two hosts have accepted in one step; which host comes first in the next."""

from collections.abc import Callable
from dataclasses import dataclass

from shmacc._multihost.messages import Fence


@dataclass(slots=True)
class Stagger:
    """A host that is let in after another one.

    Attributes:
        contributors: From contributor to the host at which it comes first.
        until: After then the host is let in all the same.
        fence: The fence that it must keep until then.
        step: The step of that.
    """

    contributors: dict[int, str]
    until: float
    fence: Fence
    step: int


class Contested:
    """Which hosts are let in later than others, because of which contributors.

    Of two hosts it is the one whose name sorts last. In that order no hosts wait for each other in
    a circle, however many contributors and hosts there are. If the contributor lives only at the
    later host, it is let in after `stagger`, and the rule is forgotten.
    """

    def __init__(self, stagger: float) -> None:
        self._stagger = stagger
        self._later: dict[str, Stagger] = {}

    def void(self, contributor: int, hosts: tuple[str, str]) -> None:
        """Note that a step is void because these hosts have both accepted the contributor."""
        first, later = sorted(hosts)
        found = self._later.setdefault(later, Stagger({}, 0.0, Fence(0, 0), 0))
        found.contributors[contributor] = first

    def moved(self, fence: Fence, step: int, now: float) -> None:
        """Hold the later hosts back at the fence and the step that have just been left."""
        for stagger in self._later.values():
            stagger.fence, stagger.step, stagger.until = fence, step, now + self._stagger

    def held_back(self, host: str) -> Stagger | None:
        """Return what a host has to wait for, if it is held back."""
        stagger = self._later.get(host)
        return stagger if stagger is not None and stagger.until > 0 else None

    def listed(self, host: str) -> frozenset[int]:
        """Return the contributors that have come at another host, when this one is let in."""
        stagger = self._later.get(host)
        return frozenset(stagger.contributors) if stagger is not None else frozenset()

    def watched(self, host: str) -> frozenset[int]:
        """Return the contributors that are waited for at this host."""
        return frozenset(
            contributor
            for stagger in self._later.values()
            if stagger.until > 0
            for contributor, first in stagger.contributors.items()
            if first == host
        )

    def forget(self, host: str) -> None:
        """Drop the rules that have to do with a host that was lost."""
        self._later.pop(host, None)
        for later, stagger in list(self._later.items()):
            rest = {c: first for c, first in stagger.contributors.items() if first != host}
            stagger.contributors = rest
            if not rest:
                del self._later[later]

    def let_in(self, present: Callable[[str, int], bool], now: float) -> bool:
        """Let hosts in whose wait has ended; whether there was one.

        Args:
            present: Whether a contributor has come at a host.
            now: The time.
        """
        changed = False
        for later, stagger in list(self._later.items()):
            if stagger.until == 0:
                continue
            there = {c: first for c, first in stagger.contributors.items() if present(first, c)}
            if len(there) < len(stagger.contributors) and now < stagger.until:
                continue
            stagger.contributors, stagger.until = there, 0.0
            if not there:
                del self._later[later]
            changed = True
        return changed

    def next_time(self) -> float | None:
        """Return when the next wait ends by itself."""
        return min((s.until for s in self._later.values() if s.until > 0), default=None)
