"""What processes do in other segments: a process may be idle in one segment and wait in another."""

import contextlib
import os
from typing import Any

from shmacc._base import layout, names
from shmacc._base.layout import Activity
from shmacc._segment import removal
from shmacc.errors import ShmaccError
from shmacc.inspection._observation import identity
from shmacc.inspection._processes import Look

_Identity = tuple[int, int, int]  # of a process, whatever its pid is here


class Elsewhere:
    """The calls that processes are in, in all readable segments. They are read once, when needed.

    Attributes:
        facts: What `_stall_facts` has found out about segments during this look, by system name.
    """

    def __init__(self) -> None:
        """Read the segments only when a call is first asked for."""
        self._calls: dict[_Identity, dict[str, str]] | None = None  # by process, then segment
        self.facts: dict[str, Any] = {}

    @classmethod
    def of(cls, look: Look) -> "Elsewhere":
        """Return the `Elsewhere` that all segments of this look share."""
        if look.elsewhere is None:
            look.elsewhere = cls()
        assert isinstance(look.elsewhere, cls)  # noqa: S101
        return look.elsewhere

    def call(self, here: str, process: _Identity) -> tuple[str, str] | None:
        """Return a call of the process in a segment other than `here`: system name and activity.

        If there are several calls, one that waits is preferred. None: there is no other call.
        """
        if self._calls is None:
            self._calls = self._all()
        calls = [call for call in self._calls.get(process, {}).items() if call[0] != here]
        return min(calls, key=lambda call: not call[1].startswith("waits"), default=None)

    @staticmethod
    def _all() -> dict[_Identity, dict[str, str]]:
        calls: dict[_Identity, dict[str, str]] = {}
        for name in map(names.parse_segment_file, sorted(os.listdir(names.SHM_DIRECTORY))):
            with contextlib.suppress(ShmaccError):
                if name is not None:
                    with contextlib.closing(removal.view(name)) as view:
                        entries = view.participants()
                    for entry in entries:
                        activity = layout.ACTIVITY_NAMES.get(entry["activity"], Activity.IDLE)
                        if entry["alive"] and activity != Activity.IDLE:
                            calls.setdefault(identity(entry), {})[name.system_name] = activity
        return calls
