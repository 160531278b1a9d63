"""Logs a warning if another chief makes rounds of the same training.

Rounds of two chiefs alternate. With optimizers of torch, each chief has its own moments, so the
result is wrong. With optimizers of `shmacc.optim` it is right, but the blocks and schedules of both
chiefs count. So a second chief may be intended, and is no error.
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
        """Warn if a living process has taken rounds: this chief itself has taken none yet.

        Args:
            shared_name: The training's name.
            living: Returns the known living processes that have taken rounds.
        """
        self._name, self._living = shared_name, living
        self._next: int | None = None  # updates at the next round, if no other chief makes any
        self._told = False
        if pids := self._living():
            self._warn(pids)

    def begins(self, updates: int) -> None:
        """Begin a round; warn if another chief has ended a round since this chief's last one.

        Args:
            updates: How many updates there are.
        """
        if self._next is not None and updates > self._next:
            self._warn(self._living())
        self._next = None  # if the round raises, its update may or may not be made

    def ends(self, updates: int) -> None:
        """Note that the last round's update is in the parameters, or was skipped."""
        self._next = updates

    def forget(self) -> None:
        """Accept any number of updates at the next round: this chief has just set the number."""
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
    """Return the living processes of this host that have taken rounds."""
    try:
        with closing(removal.view(names.segment_name(shared_name))) as view:
            found = view.participants()
    except ShmaccError:  # the names were removed meanwhile
        return []
    pids = {each["pid"] for each in found if each["alive"] and each["took_ns"]}
    return sorted("this process" if pid == os.getpid() else f"pid {pid}" for pid in pids)
