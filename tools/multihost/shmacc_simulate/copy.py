"""A host's copy of the parameters: it gets changes and makes them, as the library's core says."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from shmacc._base.lineage import Copy, Lineage
from shmacc._multihost.forwarder import Get
from shmacc_simulate.clock import Processor

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.forwarder import ForwarderCore
    from shmacc._multihost.messages import Order, Stage
    from shmacc_simulate.clock import Steps
    from shmacc_simulate.world import World


class HostCopy:
    """A copy. It is changed in a thread of its own, one thing at a time."""

    def __init__(self, world: World, at: int, core: ForwarderCore) -> None:
        self._world, self._at, self._core = world, at, core
        self._processor = Processor(world.clock)

    def work(self, done: Callable[[], None]) -> None:
        """Begin what the core wants done; call `done` afterwards."""
        if (change := self._core.next_change()) is not None:
            self._world.clock.start(self._do(*change, done))

    def _do(self, get: Get, order: Order, done: Callable[[], None]) -> Steps[None]:
        world, stage = self._world, order.stage if get is Get.STAGE else self._core.stage
        if stage is None or get is Get.REPLACE:  # the next round waits for all hosts
            raise RuntimeError(f"{order.lineage} is ordered at a host that has not got it")
        rows = 0.0 if stage.parent is None else world.scenario.update  # the first one is not timed
        if get is Get.STAGE:
            yield from stage.source.pull(self._at, world.random, shared=world.scenario.shared)
            yield self._processor.done(rows * world.costs.check)
            self._core.staged(stage)
        else:
            yield self._processor.done(rows * world.costs.make)
            self._make(stage, order.step if stage.parent is None else stage.step)
        done()

    def _make(self, stage: Stage, step: int) -> None:
        """Make a change. The digest of an update is one of all that the copy has."""
        path, whole = self._world.paths[self._at], stage.parent is None
        if not whole and path[-1] != stage.parent:
            raise RuntimeError(f"{stage} is not a change of {path}")
        digest = 0 if whole else zlib.crc32(repr((path, stage.update)).encode())
        lineage = Lineage(*stage.update, digest)
        self._world.paths[self._at] = (*path, lineage)
        self._core.changed(Copy(lineage, step, step))
