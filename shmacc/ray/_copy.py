"""A node's copy of the parameters, as the node's forwarder uses it: it gets changes and makes them.

All of it is done in one thread, one thing at a time, while the forwarder goes on reporting: to get
a large change, or another node's whole copy, may take longer than a lease.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import ray

from shmacc._base.array_types import ValueArray
from shmacc._base.lineage import NO_COPY, Copy, Lineage
from shmacc._multihost.changes import same
from shmacc._multihost.forwarder import ForwarderCore, Get
from shmacc._multihost.messages import Fence, Order, Refusal, Stage
from shmacc._parameters import copies
from shmacc._parameters.parameters import Parameters
from shmacc.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from shmacc.ray._head import shown
from shmacc.ray._parts import Config, CopyConfig, find
from shmacc.ray._waits import PATIENCE

_logger = logging.getLogger("shmacc")

_LOOK = 0.2  # seconds between two looks whether a change is still wanted
_LONGEST = 10.0  # seconds until what failed again and again is tried again


class HostCopy:
    """The copy of a node. A new one is made when its contents are here: no worker finds zeros.

    `replace` says whether a copy that is there is removed, since it is an earlier run's.
    """

    def __init__(self, config: Config, given: CopyConfig, host: str, *, replace: bool) -> None:
        self._config, self._given, self._host = config, given, host
        if replace:  # now, and not when the new one is made: this says if a process has it attached
            options = given.options(if_exists="replace")
            with copies.open_copy(given.recipe, given.name, options, None) as removed:
                removed.unlink()
        self._params = self._earlier()
        self._pool = ThreadPoolExecutor(1, "shmacc copy")
        self._here: tuple[Fence, Any] | None = None  # the change that was got, and its name
        self._work: Future[Callable[[], None]] | None = None  # returns what tells the core
        self._warned = ""
        self._pause = self._again = 0.0  # after a failure, and when it ends

    def _earlier(self) -> Parameters | None:
        """Return the node's copy, which must be like the other nodes'; None: there is none yet."""
        given = self._given
        try:
            Parameters.attach(given.name, owners=given.owners).close()
        except NotFoundError:
            return None
        return copies.open_copy(given.recipe, given.name, given.options("attach"), None)

    def look(self) -> Copy:
        """Return what is known of the copy; a change that a dead process has begun is undone."""
        return NO_COPY if self._params is None else copies.look(self._params)

    def state(self) -> tuple[Copy, dict[str, ValueArray]] | None:
        """Return all of the copy, for another node; None: there is none yet."""
        return None if self._params is None else copies.state(self._params, PATIENCE)

    def work(self, core: ForwarderCore, woken: threading.Event) -> None:
        """Tell the core what is done, and begin what it wants done next. Does not wait."""
        if self._work is not None and self._work.done():
            self._work.result()()
            self._work = None
        if self._work is not None or time.monotonic() < self._again:
            return
        if (wanted := core.next_change()) is not None:
            self._work = self._pool.submit(self._do, core, *wanted)
            self._work.add_done_callback(lambda _: woken.set())

    def rest(self, core: ForwarderCore) -> None:
        """Wait until nothing is done any more: another forwarder follows."""
        core.want_nothing()
        if self._work is not None:
            self._work.result()()
            self._work = None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._params is not None:
            self._params.close()

    def _do(self, core: ForwarderCore, get: Get, order: Order) -> Callable[[], None]:
        """Do what the core wants; return what tells it the result in the forwarder's thread."""
        stage = order.stage
        if get is Get.STAGE and stage is not None:
            return self._stage(core, stage)
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
            # These errors are reported. Others may pass: the other node may have its copy later.
            lasts = get is Get.MAKE or isinstance(error, ResourceExhaustedError)
            if lasts and order.lineage is not None:
                refused = Refusal(Fence(*order.lineage[:2]), error)
        return partial(core.changed, self.look(), refused)

    def _stage(self, core: ForwarderCore, stage: Stage) -> Callable[[], None]:
        """Get a change from the chief's object, and check it: after its commit it is too late."""
        ref = stage.source.ref
        # Ray's errors are not the change's: the chief is gone, or Ray ends on this node.
        with contextlib.suppress(Exception):
            # The chief's node may be out of reach: so do not wait longer than the change is wanted.
            while core.wants(stage):
                if ray.wait([ref], timeout=_LOOK)[0]:
                    return self._check(core, stage, ray.get(ref))
        return partial(core.refused, stage.update, None)

    def _check(self, core: ForwarderCore, stage: Stage, change: Any) -> Callable[[], None]:
        try:
            self._put(stage, change, only_check=True)
        except Exception as error:  # noqa: BLE001  the chief's
            # A process of this node may have restored the copy by itself: so look at it again.
            return partial(core.changed, self.look(), Refusal(stage.update, error))
        self._here = stage.update, change
        return partial(core.staged, stage)

    def _make(self, core: ForwarderCore, order: Order) -> None:
        staged = core.stage
        if staged is None or self._here is None or self._here[0] != staged.update:
            raise FailedPreconditionError("The change is not here any more")
        step = order.step if staged.parent is None else staged.step
        self._put(staged._replace(step=step), self._here[1], only_check=False)

    def _put(self, stage: Stage, change: Any, *, only_check: bool) -> None:
        """Make a change, or check that it can be made."""
        if stage.parent is None:
            made = Lineage(*stage.update, 0)
            self._fill(change, made, stage.step, stage.step, only_check=only_check)
        elif self._params is not None:
            copies.make(self._params, change, stage.update, stage.parent, only_check=only_check)

    def _fill(
        self,
        state: Mapping[str, ValueArray],
        lineage: Lineage,
        begun: int,
        step: int,
        *,
        only_check: bool = False,
    ) -> None:
        """Replace the copy by a state, or make it."""
        if self._params is None and only_check:
            return  # it is not made for a change that may be dropped
        if self._params is None:
            given = self._given
            options = given.options("attach")  # the chief of this node may make it just now
            self._params = copies.open_copy(given.recipe, given.name, options, state)
        copies.replace(self._params, state, lineage, begun, step, only_check=only_check)

    def _replace(self, core: ForwarderCore, order: Order) -> None:
        """Get another node's whole copy, if it still is the one that was ordered."""
        lineage = order.lineage
        if lineage is None or order.source is None:
            return
        actor = find(self._config, f"host {order.source}")
        if actor is None:
            raise FailedPreconditionError(f"Node {shown(order.source)} has no actor now")
        call = actor.state_of_copy.remote()
        while not ray.wait([call], timeout=_LOOK)[0]:
            if not core.follows(order):
                return
        copy, state = ray.get(call)
        if not same(copy.lineage, lineage):
            raise FailedPreconditionError(f"Node {shown(order.source)} has another copy by now")
        self._fill(state, copy.lineage, order.step, copy.step)

    def _warn(self, text: str) -> None:
        if text != self._warned:  # it is tried again and again
            self._warned = text
            _logger.warning("%s", text)
