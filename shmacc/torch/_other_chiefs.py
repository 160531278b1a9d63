"""Tells a chief of another one that makes rounds of the same training, by a warning in the log.

Rounds of two chiefs alternate. With optimizers of torch each has moments of its own, so the result
is that of neither; with those of `shmacc.optim` it is right, but blocks and schedules of both
count. So a second chief may be meant, and is no error.
"""

import logging
import os
from contextlib import closing

from shmacc._base import names
from shmacc._segment import removal
from shmacc.errors import ShmaccError

_logger = logging.getLogger("shmacc")


class OtherChiefs:
    """Counts the chief's own rounds, and so notices another chief's."""

    def __init__(self, shared_name: str) -> None:
        """Warn if a living process has taken rounds; the chief itself has none yet."""
        self._name = shared_name
        self._next: int | None = None  # the step of the chief's next round, if no other makes one
        self._told = False
        if pids := self._living():
            self._warn(pids)

    def begins(self, step: int) -> None:
        """Note that the chief has a round; warn if another chief has ended one since its last."""
        if self._next is not None and step > self._next:
            self._warn(self._living())
        self._next = step

    def ends(self) -> None:
        """Note that the round that began last is in the parameters, or was skipped."""
        if self._next is not None:
            self._next += 1

    def forget(self) -> None:
        """Note that the chief itself has set the step."""
        self._next = None

    def _living(self) -> list[str]:
        """Return who has taken rounds and lives."""
        try:
            with closing(removal.view(names.segment_name(self._name))) as view:
                found = view.participants()
        except ShmaccError:  # the names were removed meanwhile
            return []
        pids = {each["pid"] for each in found if each["alive"] and each["took"]}
        return sorted("this process" if pid == os.getpid() else f"pid {pid}" for pid in pids)

    def _warn(self, pids: list[str]) -> None:
        if self._told:
            return
        self._told = True
        _logger.warning(
            "%r has two chiefs: rounds were made by %s, and not by this chief alone. Their rounds "
            "alternate, each with an optimizer, a block and a schedule of its own. Start one at a "
            "time. To end one of them, kill it: its close() would end the training for both",
            self._name,
            " and ".join(pids) or "a process that is gone",
        )
