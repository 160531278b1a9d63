"""Tells a chief of another one that makes rounds of the same training, by a warning in the log.

Rounds of two chiefs alternate. With optimizers of torch each has moments of its own, so the result
is that of neither; with those of `shmacc.optim` it is right, but blocks and schedules of both
count. So a second chief may be meant, and is no error.
"""

import logging
import os
from collections.abc import Callable
from contextlib import closing

from shmacc._base import names
from shmacc._segment import removal
from shmacc.errors import ShmaccError

_logger = logging.getLogger("shmacc")


class OtherChiefs:
    """Counts the chief's own rounds, and so detects rounds of another chief."""

    def __init__(self, shared_name: str, living: Callable[[], list[str]]) -> None:
        """Warn if a living process has taken rounds; the chief itself has none yet.

        Args:
            shared_name: The training's.
            living: Returns who has taken rounds and lives, as far as that is known.
        """
        self._name, self._living = shared_name, living
        self._next: int | None = None  # how many updates there are, if no other chief makes one
        self._told = False
        if pids := self._living():
            self._warn(pids)

    def begins(self, updates: int) -> None:
        """Note that the chief has a round; warn if another chief has ended one since its last.

        Args:
            updates: How many updates there are.
        """
        if self._next is not None and updates > self._next:
            self._warn(self._living())
        self._next = None  # whether this round is in the parameters is not known if it raises

    def ends(self, updates: int) -> None:
        """Note that the last round's update is in the parameters, or was skipped."""
        self._next = updates

    def forget(self) -> None:
        """Expect no number of updates at the next round: this chief has set it itself."""
        self._next = None

    def _warn(self, pids: list[str]) -> None:
        if self._told:
            return
        self._told = True
        _logger.warning(
            "%r has two chiefs: rounds were made by %s, and not by this chief alone. Their rounds "
            "alternate, each with an optimizer, a block and a schedule of its own. Start one at a "
            "time. To end one of them, kill it: its close() would end the training for both",
            self._name,
            " and ".join(pids) or "another process",
        )


def living(shared_name: str) -> list[str]:
    """Return which processes of this host have taken rounds and live."""
    try:
        with closing(removal.view(names.segment_name(shared_name))) as view:
            found = view.participants()
    except ShmaccError:  # the names were removed meanwhile
        return []
    pids = {each["pid"] for each in found if each["alive"] and each["took_ns"]}
    return sorted("this process" if pid == os.getpid() else f"pid {pid}" for pid in pids)
