"""What a group has in a node's shared memory: its segment, its copy of the parameters, counters.

All of it outlives the node's actor, and the next actor goes on with it. The counters are shared
arrays, ``<name>.forwarder``, which ``shmacc-inspect show`` shows. They also say whose the segment
is, and which terms of owners the node has answered (`promise`): no later actor follows an earlier
owner.
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
    "copies",  # how many nodes had the last change when this one made it
    "starts",  # forwarders started on this node
    "reports",  # sent to the owner
    "orders",  # received from the owner
    "step",  # the owner's step in the last order
    "seals",  # how often the segment was sealed for a grant
    "batches",  # batches shipped
    "gradients",  # in these batches
    "bytes",  # in these batches
    "resent",  # pieces sent again, since their shard was lost
    "followed",  # updates that other nodes had made without this one
    "copied",  # whole copies of the parameters that it got from other nodes
    "rounds",  # rounds that consumed these batches
    "resets",  # how often the segment was emptied without a round of this host
    "deaths",  # workers that died or failed
    "refused",  # forwarders that were told of a later one, and ended
)

_STORE = "/dev/shm/plasma"  # noqa: S108  the prefix of the files' names
_BLOCK = 512  # bytes in a block of stat
_LEAST = 4 << 20  # bytes that are kept in any case


class ObjectStore:
    """Ray's object store on this node, that of the raylet that has started this process.

    The store is one file there, as large as the store may become. The raylet makes it when it
    starts, and unlinks it at once. Its pages are taken when objects are first written to them,
    and stay. If there is no memory for a page by then, a bus error ends the process that
    writes: the one that puts an object, or the raylet, and with it the node, if the object
    comes from another node. So a group's segment leaves room for all pages that the file does
    not have yet (`_core.Handle.keep_free`). When a page is taken between two looks, the free
    memory shrinks before the kept memory does: the segment leaves too much for a moment, and
    never too little. With ``RAY_preallocate_plasma_memory=1`` the file has all its pages. Even
    then a little is kept free, so that a worker that is ahead of the rounds waits for room: a
    full /dev/shm would be an error.
    """

    def __init__(self) -> None:
        self._files: list[Path] = []
        with contextlib.suppress(OSError):  # another user's raylet: its files are unknown
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
    """What a group has in a node's shared memory.

    Without parameters the segment is made at once. With parameters a new segment is made when the
    copy is right (`LocalSegment.reset`): a worker that finds it finds the parameters of its step.

    Raises:
        InvalidArgumentError: What is there from earlier differs. Everything stays as it was.
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
        """Return whether an earlier actor of this group was here, and what the node has to keep."""
        try:
            with SharedArrays.attach(counters_of(self._config.name)) as found:
                numbers = {int(found["group"]), int(found["copy"])}
                kept = {name: np.int64(found[name]) for name in ("promise", "copies")}
                return self._config.number in numbers, kept
        except (ShmaccError, KeyError):
            return False, {}

    def _is_there(self) -> bool:
        """Whether the node has a segment that the group goes on with."""
        is_earlier = self.counters["group"] != self._config.number
        if is_earlier and self._config.options.get("if_exists") == "replace":
            return False
        try:
            HostGroup.attach(self._config.name, owners=self._config.options["owners"]).close()
        except NotFoundError:
            return False
        except ShmaccError:
            return True  # making it says what is wrong
        return True

    def _make(self) -> HostGroup:
        """Make the segment, or go on with that of an earlier forwarder of the same group."""
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
        group.handle.keep_free(self._store.room())  # there may be no owner for long
        self.counters["group"][...] = config.number  # last: now the segment is this group's
        return group

    def end(self, *, undo: bool = False) -> None:
        """Finish the segment, and remove its name and the counters': nobody will take from it.

        Args:
            undo: Whether the group was not made after all: what was there before stays, and a copy
                that was made for it goes, too.
        """
        if self.segment.exists and (self._made or not undo):
            self.segment.group.finish()
            self.segment.group.unlink()
        if not (undo and self._was_there):  # counters of before have a promise to keep
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
