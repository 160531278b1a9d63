"""A group's shared memory on a node: its segment, its copy of the parameters, its counters.

All of it outlives the node's actor, and the next actor goes on with it. The counters are shared
arrays, ``<name>.forwarder``, which ``shmacc-inspect show`` shows. They also say which group has
made the segment, and the highest term of an owner that the node has answered (`promise`): so no
later actor follows an earlier owner.
"""

import contextlib
import os
from pathlib import Path

import numpy as np

from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import HostGroup, LocalSegment
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc.errors import InvalidArgumentError, NotFoundError, ShmaccError
from shmacc.ray._copy import HostCopy
from shmacc.ray._parts import Config, counters_of

COUNTERS = (
    "group",  # the number of the segment's group
    "copy",  # the number of the group that the copy of the parameters belongs to
    "promise",  # the highest term of an owner that this node has answered
    "copies",  # how many nodes had the last change when this node made it
    "starts",  # forwarders started on this node
    "reports",  # reports sent to the owner
    "orders",  # orders received from the owner
    "step",  # the owner's step in the last order
    "seals",  # how often the segment was held for a grant
    "batches",  # batches shipped
    "gradients",  # gradients in these batches
    "bytes",  # bytes in these batches
    "resent",  # pieces sent again, since their shard was lost
    "followed",  # updates that this node had missed, and got from other nodes
    "copied",  # whole copies of the parameters that it got from other nodes
    "rounds",  # rounds that consumed these batches
    "resets",  # how often the segment was emptied without a round of this host
    "deaths",  # workers that died or failed
    "refused",  # forwarders that ended since the owner knew a later forwarder
)

_STORE = "/dev/shm/plasma"  # noqa: S108  the prefix of the files' names
_BLOCK = 512  # bytes in a block of stat
_LEAST = 4 << 20  # bytes that a segment leaves free in any case


class ObjectStore:
    """Ray's object store on this node: the store of the raylet that has started this process.

    The store is one file in /dev/shm, as large as the store may become. The raylet makes the file
    when it starts, and unlinks it at once. The file gets a page of memory when an object is first
    written there, and keeps it. If /dev/shm has no memory left for the page, a bus error kills the
    process that writes: the process that puts an object, or for an object from another node the
    raylet, and with it the node. So a group's segment leaves room for all pages that the file does
    not have yet (`_core.Handle.keep_free`). If the file gets a page between two calls of `room`,
    free memory shrinks before the result does: so the segment may leave too much for a moment,
    never too little. With ``RAY_preallocate_plasma_memory=1`` the file has all its pages. Even then
    a little is kept free: so a worker that is ahead of the rounds waits for room, instead of
    failing on a full /dev/shm.
    """

    def __init__(self) -> None:
        self._files: list[Path] = []
        with contextlib.suppress(OSError):  # it is another user's raylet
            for link in Path(f"/proc/{os.getppid()}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).startswith(_STORE):
                        self._files.append(link)

    def room(self) -> int:
        """Return how many bytes of /dev/shm a segment must leave free."""
        missing = _LEAST
        for link in self._files:
            with contextlib.suppress(OSError):
                found = link.stat()
                missing += max(0, found.st_size - found.st_blocks * _BLOCK)
        return missing


class Memory:
    """A group's segment, copy of the parameters, and counters in a node's shared memory.

    Without parameters the segment is made at once. With parameters a new segment is made once the
    copy is right (`LocalSegment.reset`): so a worker never finds a segment without its parameters.

    Raises:
        InvalidArgumentError: An existing segment or copy differs; nothing has been changed.
        Everything else as for the constructors of groups and parameters.
    """

    def __init__(self, config: Config, host: str, store: ObjectStore) -> None:
        self._config, self._store = config, store
        is_ours, kept = self._earlier()
        self._was_there = bool(kept)  # whether the node had counters
        self._made = False  # whether the segment was made here
        self.counters = SharedArrays(
            dict.fromkeys(COUNTERS, np.int64(0)) | kept,
            counters_of(config.name),
            mode=config.options["mode"],
            owners=config.options["owners"],
            if_exists="attach" if is_ours else "replace",
        )
        self.copy: HostCopy | None = None
        self.segment = LocalSegment(None, Plan(config.members, config.shards), self._make)
        try:
            self.counters["starts"][...] += 1
            if config.copy is not None:
                is_earlier = bool(self.counters["copy"] != config.number)
                replace = (
                    is_earlier and config.copy.if_exists == "replace" and host != config.copy.home
                )
                self.copy = HostCopy(config, config.copy, host, self.counters, replace=replace)
                self.counters["copy"][...] = config.number
            if config.copy is None or self._is_there():
                self.segment.make()
        except BaseException:
            if not self._was_there:
                self.counters.unlink()
            self.close()
            raise

    def _earlier(self) -> tuple[bool, dict[str, np.int64]]:
        """Return whether an earlier actor of this group was here, and the counters to keep."""
        try:
            with SharedArrays.attach(counters_of(self._config.name)) as found:
                numbers = {int(found["group"]), int(found["copy"])}
                kept = {name: np.int64(found[name]) for name in ("promise", "copies")}
                return self._config.number in numbers, kept
        except (ShmaccError, KeyError):
            return False, {}

    def _is_there(self) -> bool:
        """Whether the node has a segment that the group can go on with."""
        is_earlier = self.counters["group"] != self._config.number
        if is_earlier and self._config.options.get("if_exists") == "replace":
            return False
        try:
            HostGroup.attach(self._config.name, owners=self._config.options["owners"]).close()
        except NotFoundError:
            return False
        except ShmaccError:
            return True  # `_make` will raise what is wrong
        return True

    def _make(self) -> HostGroup:
        """Make the segment, or attach to the segment that an earlier forwarder has made."""
        config, options = self._config, dict(self._config.options)
        is_ours = bool(self.counters["group"] == config.number)
        self._made = not self._is_there()
        if is_ours:
            options["if_exists"] = "attach"
        group = HostGroup(config.members, config.name, reduction_type=config.reduction, **options)
        if list(group.members) != list(config.members):  # pieces have members by number
            group.close()
            raise InvalidArgumentError(
                f"The segment {config.name!r} that is there has its members in another order, "
                f"{list(group.members)}: remove it, or use if_exists='replace'"
            )
        if not is_ours and not group.running:  # an earlier run finished it
            LocalSegment(group, Plan(config.members, config.shards)).reset(group.global_step)
        group.handle.keep_free(self._store.room())  # at once: the first order may take long
        self.counters["group"][...] = config.number  # last: now the segment is this group's
        return group

    def end(self, *, undo: bool = False) -> None:
        """Finish the segment; remove its name, and the name of the counters.

        Args:
            undo: Whether the group could not be made. Then what existed before stays, and a copy of
                the parameters that was made for this group is removed.
        """
        if self.segment.exists and (self._made or not undo):
            self.segment.group.finish()
            self.segment.group.unlink()
        if not (undo and self._was_there):  # earlier counters have a `promise` that must stay
            self.counters.unlink()
        if self.copy is not None:
            self.copy.end(undo=undo)
        self.close()

    def close(self) -> None:
        if self.segment.exists:
            self.segment.group.close()
        if self.copy is not None:
            self.copy.close()
        self.counters.close()
