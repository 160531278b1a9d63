"""What processes do in other segments: one that is in no call here may wait there."""

import contextlib
import os

from shmacc._base import layout, names
from shmacc._base.layout import Activity
from shmacc._base.names import SegmentName
from shmacc._base.reports import Participant
from shmacc._segment import removal
from shmacc.errors import ShmaccError
from shmacc.inspection._observation import Observation, identity
from shmacc.inspection._process_records import AttachedProcess
from shmacc.inspection._processes import Look
from shmacc.inspection._stall_facts import Facts

_Identity = tuple[int, int, int]  # of a process, whatever its pid is here


class Elsewhere:
    """The calls of processes in all segments that can be read, as they are when first asked for."""

    def __init__(self, look: Look) -> None:
        """Read nothing yet."""
        self._look = look
        self._calls: dict[_Identity, dict[str, str]] | None = None  # by segments
        self._facts: dict[str, Facts | None] = {}

    @classmethod
    def of(cls, look: Look) -> "Elsewhere":
        """Return the object that all segments of this look share."""
        if look.elsewhere is None:
            look.elsewhere = cls(look)
        assert isinstance(look.elsewhere, cls)  # noqa: S101
        return look.elsewhere

    def call(self, here: Facts, process: AttachedProcess) -> tuple[str, str] | None:
        """Return a call of the process in another segment: its system name, and the activity.

        A wait comes before other calls. None: it is in no call elsewhere, as far as can be seen.
        """
        calls = dict(self._all().get(here.seen.identities[process.entry], {}))
        calls.pop(here.name, None)
        found = sorted(calls.items(), key=lambda call: not call[1].startswith("waits"))
        return found[0] if found else None

    def facts(self, system_name: str) -> Facts | None:
        """Return the facts of a segment; None: it cannot be read, or was changed meanwhile."""
        if system_name not in self._facts:
            self._facts[system_name] = None
            name = names.parse_segment_file(system_name)
            with contextlib.suppress(ShmaccError):
                if name is not None:
                    view = removal.view(name)
                    with contextlib.closing(view):
                        seen = Observation.at(name, view, self._look)
                        if seen.steady:
                            self._facts[system_name] = Facts(system_name, seen, self.call)
        return self._facts[system_name]

    def _all(self) -> dict[_Identity, dict[str, str]]:
        if self._calls is None:
            self._calls = {}
            for file_name in sorted(os.listdir(names.SHM_DIRECTORY)):
                name = names.parse_segment_file(file_name)
                if name is not None:
                    for entry in _participants(name):
                        activity = layout.ACTIVITY_NAMES.get(entry["activity"], Activity.IDLE)
                        if entry["alive"] and activity != Activity.IDLE:
                            calls = self._calls.setdefault(identity(entry), {})
                            calls[name.system_name] = activity
        return self._calls


def _participants(name: SegmentName) -> list[Participant]:
    with contextlib.suppress(ShmaccError):
        view = removal.view(name)
        with contextlib.closing(view):
            return view.participants()
    return []
