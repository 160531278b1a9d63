"""A node's copy of the parameters: gets changes for the node's forwarder, and makes them.

One thread does all this work, while the forwarder's thread goes on reporting: to get a large
change, or another node's whole copy, may take longer than a lease.

A node keeps the last updates that it has made, and sends them to nodes that have missed them. If a
node has missed more updates than are kept, it gets a whole copy, and rounds wait for it meanwhile.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray

from shmacc._base import names
from shmacc._base.array_types import ValueArray
from shmacc._base.lineage import NO_COPY, Copy, Lineage
from shmacc._base.names import segment_name
from shmacc._core import SegmentView
from shmacc._multihost.changes import beginning, same
from shmacc._multihost.forwarder import ForwarderCore, Get
from shmacc._multihost.messages import Fence, Order, Refusal, Stage
from shmacc._parameters import copies
from shmacc._parameters.parameters import Parameters
from shmacc._segment import removal
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    ShmaccError,
)
from shmacc.ray._head import shown
from shmacc.ray._parts import Config, CopyConfig, find
from shmacc.ray._waits import PATIENCE

_logger = logging.getLogger("shmacc")

_LOOK = 0.2  # seconds between two checks whether a change is still wanted
_LONGEST = 10.0  # the longest pause in seconds before a failed change is tried again
_KEPT = 0.25  # a node keeps updates of at most this part of the copy's bytes


class Made(NamedTuple):
    """An update that was made in a copy, with the lineages before and after; can be pickled."""

    parent: Lineage
    lineage: Lineage
    update: copies.Update


class HostCopy:
    """The copy of a node. A new copy is made once its contents are here, so no worker finds zeros.

    `replace` says whether to remove an existing copy, since it belongs to an earlier run.
    """

    def __init__(
        self,
        config: Config,
        given: CopyConfig,
        host: str,
        counters: Mapping[str, Any],  # of `_memory.py`
        *,
        replace: bool,
    ) -> None:
        self._config, self._given, self._host, self._counters = config, given, host, counters
        if replace:  # remove it early: this raises if a process has it attached
            options = given.options(if_exists="replace")
            with copies.open_copy(given.recipe, given.name, options, None) as removed:
                removed.unlink()
        self._params = self._earlier()
        self._made = self._made_again = False  # by this object; again, after its name was removed
        self._view = self._viewed()
        self._pool = ThreadPoolExecutor(1, "shmacc copy")
        self._kept: tuple[Made, ...] = ()  # the last updates, each the parent of the next
        self._work: Future[Callable[[], None]] | None = None  # its result tells the core
        self._warned = ""
        self._pause = self._again = 0.0  # the pause after a failure, and the time when it ends

    def _earlier(self) -> Parameters | None:
        """Return the node's copy, or None if it has none. Raise if its arrays or tables differ."""
        given = self._given
        try:
            Parameters.attach(given.name, owners=given.owners).close()
        except NotFoundError:
            return None
        return copies.open_copy(given.recipe, given.name, given.options("attach"), None)

    def _viewed(self) -> SegmentView | None:
        """Return a view of the copy: it shows who uses it, even after its name was removed."""
        with contextlib.suppress(ShmaccError):
            return None if self._params is None else removal.view(segment_name(self._given.name))
        return None

    def look_around(self, core: ForwarderCore) -> None:
        """Tell the core if a process of the node has restored the copy, or removed its name.

        If the name was removed, make a new copy, but only once no other process uses the old one.
        """
        if self._work is not None or self._params is None:
            return
        problem = ""
        if copies.is_removed(self._params):
            users = () if self._view is None else removal.users(self._view)
            if pids := sorted({*users} - {os.getpid()}):
                problem = (
                    f"the name of its copy of {self._given.name!r} was removed: no process can "
                    f"attach to it until those that have it attached have ended: {pids}"
                )
            else:
                self._work = self._pool.submit(self._make_again)
        with contextlib.suppress(DeadlineExceededError):  # another process has it locked
            core.noticed(copies.look(self._params, 0.0), problem)

    def _make_again(self) -> Callable[[], None]:
        """Make a new copy with the same contents and name, after the name was removed."""
        params, given = self._params, self._given
        if params is not None:
            try:
                copy, state = copies.state(params, PATIENCE)
                options = given.options("error")
                self._params = copies.open_copy(given.recipe, given.name, options, state)
                copies.replace(self._params, state, copy.lineage, copy.begun, copy.step)
                self._made_again, self._view = True, self._viewed()
                params.close()
                self._warn(
                    f"Node {shown(self._host)}: the name of its copy was removed; made again"
                )
            except Exception as error:  # noqa: BLE001  it is tried again
                self._warn(f"Node {shown(self._host)} cannot make its copy again: {error}")
        return lambda: None

    def look(self) -> Copy:
        """Return lineage and steps of the copy; undo a change that a dead process has begun."""
        return NO_COPY if self._params is None else copies.look(self._params)

    def state(self) -> tuple[Copy, dict[str, ValueArray]] | None:
        """Return the whole contents of the copy, for another node; None: there is no copy yet."""
        return None if self._params is None else copies.state(self._params, PATIENCE)

    def made_since(self, lineage: Lineage) -> list[Made] | None:
        """Return the updates from `lineage` up to this copy's lineage; None: not all are kept."""
        made = self._kept  # read it once: another thread replaces it
        first = [number for number, each in enumerate(made) if each.parent == lineage]
        return list(made[first[0] :]) if first else None

    def work(self, core: ForwarderCore, woken: threading.Event) -> None:
        """Tell the core what has been done, begin what it wants next, and return at once."""
        if self._work is not None and self._work.done():
            self._work.result()()
            self._work = None
        if self._work is not None or time.monotonic() < self._again:
            return
        if (wanted := core.next_change()) is not None:
            self._work = self._pool.submit(self._do, core, *wanted)
            self._work.add_done_callback(lambda _: woken.set())

    def rest(self, core: ForwarderCore) -> None:
        """Wait for the end of the current change, since another forwarder will follow."""
        core.want_nothing()
        if self._work is not None:
            self._work.result()()
            self._work = None

    def end(self, *, undo: bool) -> None:
        """Remove the name of a copy that was made again; with `undo`, of any copy made here."""
        if self._params is not None and (self._made_again or (self._made and undo)):
            self._params.unlink()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._params is not None:
            self._params.close()

    def _do(self, core: ForwarderCore, get: Get, order: Order) -> Callable[[], None]:
        """Do what the core wants; return a function that tells the core the result.

        The forwarder's thread calls this function: only that thread may use the core.
        """
        stage = order.stage
        if get is Get.STAGE and stage is not None:
            return self._stage(core, stage, (order.lineage or ())[:2] != stage.update)
        refused = None
        try:
            if get is Get.MAKE:
                self._make(core, order)
            else:
                self._replace(core, order)
            self._warned, self._pause = "", 0.0
        except Exception as error:  # noqa: BLE001  the copy is as it was: it is tried again
            self._warn(f"Node {shown(self._host)} cannot follow with its copy: {error}")
            self._pause = min(max(2 * self._pause, _LOOK), _LONGEST)
            self._again = time.monotonic() + self._pause
            # Report an error that will last; after any other error, the next attempt may succeed.
            lasts = get is Get.MAKE or isinstance(error, ResourceExhaustedError)
            if lasts and order.lineage is not None:
                refused = Refusal(Fence(*order.lineage[:2]), error)
        return partial(core.changed, self.look(), refused)

    def _stage(self, core: ForwarderCore, stage: Stage, checks: bool = True) -> Callable[[], None]:
        """Get a change from the chief's object; check it now, before it can be committed."""
        ref = stage.source.ref
        # An error of Ray says nothing about the change: the chief is gone, or Ray ends here.
        with contextlib.suppress(Exception):
            # The chief's node may be out of reach: stop waiting once the change is not wanted.
            while core.wants(stage):
                if ray.wait([ref], timeout=_LOOK)[0]:
                    change = ray.get(ref)
                    if checks:
                        return self._check(core, stage, change)
                    return partial(core.staged, stage._replace(source=change))
        return partial(core.refused, stage.update, None)

    def _check(self, core: ForwarderCore, stage: Stage, change: Any) -> Callable[[], None]:
        try:
            self._put(stage, change, only_check=True)
        except Exception as error:  # noqa: BLE001  it is reported to the chief
            # A process of this node may have restored the copy: then the change is not at fault.
            copy = self.look()
            why = error if stage.parent in {None, copy.lineage} else None
            return partial(core.changed, copy, Refusal(stage.update, why))
        return partial(core.staged, stage._replace(source=change))

    def _make(self, core: ForwarderCore, order: Order) -> None:
        staged = core.stage
        if staged is None:
            raise FailedPreconditionError("The change is not here any more")
        step = order.step if staged.parent is None else staged.step
        self._put(staged._replace(step=step), staged.source, only_check=False)

    def _put(self, stage: Stage, change: Any, *, only_check: bool) -> None:
        """Make a change, or check that it can be made."""
        if stage.parent is None:
            made = Lineage(*stage.update, 0)
            self._fill(change, made, stage.step, stage.step, only_check=only_check)
        elif only_check and self._params is not None:
            copies.make(self._params, change, stage.update, stage.parent, only_check=True)
        else:
            self._follow(change, stage.update, stage.parent)

    def _follow(self, update: copies.Update, name: Fence, parent: Lineage, begun: int = 0) -> None:
        """Make an update, and keep it for nodes that miss it."""
        params, keep = self._params, self._given.keep
        if params is None:
            raise FailedPreconditionError("The copy is not here")
        _, lineage = copies.make(params, update, name, parent, begun=begun)
        made = [*(self._kept if self._kept and self._kept[-1].lineage == parent else ())]
        made.append(Made(parent, lineage, update))
        with contextlib.suppress(OSError):  # its name was removed
            size = Path(names.segment_name(self._given.name).path).stat().st_blocks * 512
            most = size * _KEPT if keep is None else min(keep, size * _KEPT)
            while made and sum(each.update.size for each in made) > most:
                del made[0]
        self._kept = tuple(made)

    def _fill(
        self,
        state: Mapping[str, ValueArray],
        lineage: Lineage,
        begun: int,
        step: int,
        *,
        only_check: bool = False,
    ) -> None:
        """Replace the copy's contents by a state; if there is no copy, make it."""
        if self._params is None and only_check:
            return  # make no copy for a change that may be dropped
        self._kept = self._kept if only_check else ()
        if self._params is None:
            given = self._given
            options = given.options("attach")  # the chief of this node may make it just now
            self._params = copies.open_copy(given.recipe, given.name, options, state)
            self._made, self._view = self._host != given.home, self._viewed()
        copies.replace(self._params, state, lineage, begun, step, only_check=only_check)

    def _replace(self, core: ForwarderCore, order: Order) -> None:
        """Make the updates that this copy lacks, or replace it by the whole copy of `order.source`.

        The source's copy must still have the lineage that was ordered.
        """
        lineage = order.lineage
        if lineage is None or order.source is None:
            return
        actor = find(self._config, f"host {order.source}")
        if actor is None:
            raise FailedPreconditionError(f"Node {shown(order.source)} has no actor now")
        if (
            made := self._got(core, order, actor.made_since.remote(self.look().lineage))
        ) is not None:
            for each in made:
                self._follow(each.update, Fence(*each.lineage[:2]), each.parent, order.step)
                self._counters["followed"][...] += 1
                if same(each.lineage, lineage):
                    return
        if not core.follows(order):
            return
        core.gets_whole()
        if (found := self._got(core, order, actor.state_of_copy.remote())) is None:
            return
        copy, state = found
        if not same(copy.lineage, lineage):
            raise FailedPreconditionError(f"Node {shown(order.source)} has another copy by now")
        own = self.look()
        if own.step and beginning(own.lineage) != beginning(lineage):
            self._warn(
                f"Node {shown(self._host)}: its copy of {self._given.name!r} at step {own.step} is "
                "not one of the group's: another run has made it, a process of the node, or the "
                "group before it began anew. It is replaced by that of node "
                f"{shown(order.source)}"
            )
        self._fill(state, copy.lineage, order.step, copy.step)
        self._counters["copied"][...] += 1

    @staticmethod
    def _got(core: ForwarderCore, order: Order, call: Any) -> Any:
        """Return another node's answer to a call, or None once the order is out of date."""
        while not ray.wait([call], timeout=_LOOK)[0]:
            if not core.follows(order):
                return None
        return ray.get(call)

    def _warn(self, text: str) -> None:
        if text != self._warned:  # each new attempt would repeat it
            self._warned = text
            _logger.warning("%s", text)
