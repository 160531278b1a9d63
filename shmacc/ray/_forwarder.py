"""The forwarder of a node: it makes the segment there, and begins again with each owner.

What it has done is counted in shared arrays of the node, ``<name>.forwarder``, which outlive it:
``shmacc-inspect show`` shows them.
"""

import contextlib
from concurrent.futures import Future

import numpy as np

from shmacc._accumulators.shared_arrays import SharedArrays
from shmacc._multihost.host_group import HostGroup
from shmacc._records.stats import Stats
from shmacc.errors import ShmaccError
from shmacc.ray._incarnation import Copy, Incarnation, Neighbours, Shared
from shmacc.ray._parts import LOST, Config, counters_of, find

_AGAIN = 0.2  # until it looks for an owner again
_COPY = 10.0  # that the thread has for a copy of what the segment has

_COUNTERS = (
    "group",  # the number of the group that the segment is of
    "starts",  # of forwarders on this node
    "reports",  # to the owner
    "orders",  # of the owner
    "step",  # of the owner, by the last order
    "seals",  # of the segment, for a grant of the owner
    "batches",  # shipped
    "gradients",  # in these
    "bytes",  # in these
    "resent",  # pieces whose shard was lost meanwhile
    "rounds",  # that consumed what was shipped
    "resets",  # of the segment, whose gradients got into no round of this host's
    "deaths",  # of processes that had applied
    "refused",  # forwarders that were told of a later one, and ended
)


class Forwarder:
    """The forwarder of a node: makes its segment, and has it follow the owner.

    Args:
        config: Of the group.
        host: The node.
        here: Its shards.
    """

    def __init__(self, config: Config, host: str, here: Neighbours) -> None:
        self._config = config
        self._shared = Shared(config, host, here)
        self._group: HostGroup | None = None
        self._counters: SharedArrays | None = None

    def run(self) -> None:
        """Go on until it is stopped, or the owner knows a later forwarder of this node.

        Raises:
            Whatever making the segment, or following the owner, has raised.
        """
        group, counters = self._make()
        while not self._shared.stopped.is_set():
            owner = find(self._config, "owner")
            if owner is not None:
                with contextlib.suppress(*LOST):  # there will be another one
                    if not Incarnation(self._shared, owner, group, counters).run():
                        return
            self._shared.stopped.wait(_AGAIN)

    def stop(self) -> None:
        """Have `run` end soon."""
        self._shared.stopped.set()
        self._shared.woken.set()

    def copy(self) -> Copy:
        """Return what the segment has, and to which fence it belongs.

        Raises:
            TimeoutError: The thread has not come to it.
        """
        asked: Future[Copy] = Future()
        self._shared.asked.put(asked)
        self._shared.woken.set()
        return asked.result(_COPY)

    def stats(self) -> Stats | None:
        """Return the segment's counters; None: there is no segment yet."""
        return None if self._group is None else self._group.stats()

    def unlink(self) -> None:
        """Finish the segment, and remove its name."""
        if self._group is not None:
            self._group.finish()
        for kept in self._group, self._counters:
            if kept is not None:
                kept.unlink()
                kept.close()

    def _make(self) -> tuple[HostGroup, SharedArrays]:
        """Make the segment, or go on with that of an earlier forwarder of the same group."""
        config = self._config
        options = dict(config.options)
        is_ours = self._has_segment()
        if is_ours:
            options["if_exists"] = "attach"
        self._group = HostGroup(
            config.members, config.name, reduction_type=config.reduction, **options
        )
        self._counters = SharedArrays(
            dict.fromkeys(_COUNTERS, np.int64(0)),
            counters_of(config.name),
            mode=options["mode"],
            owners=options["owners"],
            if_exists="attach" if is_ours else "replace",
        )
        self._counters["starts"][...] += 1
        self._counters["group"][...] = config.number  # last: now the segment is this group's
        return self._group, self._counters

    def _has_segment(self) -> bool:
        try:
            with SharedArrays.attach(counters_of(self._config.name)) as found:
                return int(found["group"]) == self._config.number
        except (ShmaccError, KeyError):
            return False
