"""Tests call the actors' methods, to hit moments that are too short to hit from outside."""

import asyncio
import os
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from on_ray.nodes import Nodes
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import shmacc
import shmacc.ray
from shmacc._multihost.messages import (
    BatchKey,
    Fence,
    HostBatch,
    Opened,
    Order,
    Report,
    Share,
    Stage,
    Timing,
)
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import HostGroup, LocalSegment
from shmacc.ray._copy import HostCopy
from shmacc.ray._forwarder import Incarnation, Shared
from shmacc.ray._host import CONCURRENCY, HostActor
from shmacc.ray._memory import Memory, ObjectStore
from shmacc.ray._owner import OwnerActor
from shmacc.ray._parts import Config, Source

MEMBERS = {
    "rows": shmacc.IndexedSlicesSpec((100, 2), "float32"),
    "rest": shmacc.TensorSpec((5,), "float64", reduction_type="SUM"),
}


def test_an_actor_that_ends_before_it_serves_makes_nothing(nodes: Nodes) -> None:
    config = Config("unborn", dict(MEMBERS), "MEAN", {}, 1, None, Timing(), 1)
    actor = HostActor(config, nodes.id(0))
    actor.end()
    actor.serve()
    assert not [name for name in os.listdir("/dev/shm") if "unborn" in name]  # noqa: PTH208, S108


def test_an_actor_that_ends_before_it_serves_removes_what_its_group_has_made_there(
    nodes: Nodes,
) -> None:
    """An earlier actor of the group made the segment. A segment of another group stays."""
    options = {"mode": None, "owners": "mine"}
    config = Config("begun", dict(MEMBERS), "MEAN", options, 1, None, Timing(), 1)
    for number, stays in (2, True), (1, False):
        Memory(config, nodes.id(0), ObjectStore()).close()
        HostActor(replace(config, number=number), nodes.id(0)).end()
        assert any("begun" in name for name in os.listdir("/dev/shm")) == stays  # noqa: PTH208, S108


def test_a_finished_segment_of_an_earlier_run_starts_again(nodes: Nodes) -> None:
    """A segment of this run stays finished: a process finished it while no actor was there."""
    with HostGroup(MEMBERS, "left") as earlier:
        earlier.finish()
    options = {"mode": None, "owners": "mine"}
    config = Config("left", dict(MEMBERS), "MEAN", options, 1, None, Timing(), 1)
    first = Memory(config, nodes.id(0), ObjectStore())
    assert first.segment.group.running
    first.segment.group.finish()
    second = Memory(config, nodes.id(0), ObjectStore())
    assert not second.segment.group.running
    for memory in first, second:
        memory.end()


def test_a_finish_while_a_chief_gets_its_copy_is_not_undone_by_a_reset(nodes: Nodes) -> None:
    """The copy may take long; meanwhile the order to begin the step again has arrived."""
    options = {"mode": None, "owners": "mine"}
    config = Config("ended", dict(MEMBERS), "MEAN", options, 1, None, Timing(), 1)
    shared = Shared(config, nodes.id(0), Mock())
    memory = Memory(config, nodes.id(0), shared.store)
    group = memory.segment.group
    copied: Future[Any] = Future()
    copied.add_done_callback(lambda _: group.finish())

    def answer(report: Report, _: int) -> Mock:
        number = min(report.number - 1, 1)
        if report.number == 2:
            shared.asked.put(copied)
        elif report.number > 2:
            shared.stopped.set()
        order = Order(1, number, 1, ready=True, fence=Fence(1, number), adopt=number == 0)
        answered: Future[Order] = Future()
        answered.set_result(order)
        return Mock(future=lambda: answered)

    owner = Mock()
    owner.enrol.remote = lambda *_: ray.put(1)
    owner.report.remote = answer
    try:
        assert Incarnation(shared, owner, memory).run()
        assert copied.done()
        assert not group.running
    finally:
        memory.end()


def test_an_error_of_ray_does_not_refuse_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is being removed does not get the change; the other nodes make it."""

    def reset(*_: object, **__: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(ray, "wait", reset)
    core, stage = Mock(), Stage(Fence(1, 1), None, 1, Source(None))
    HostCopy._stage(Mock(), core, stage)()
    core.refused.assert_called_once_with(stage.update, None)


class _Shard:
    """A shard with its own group; the test makes its rounds."""

    def __init__(self, nodes: Nodes) -> None:
        rows = shmacc.IndexedSlicesSpec((10, 1), "float64", reduction_type="CMEAN")
        members: dict[str, shmacc.TensorSpec] = {"m": rows}
        self.plan = Plan(members, 1)
        config = Config("by hand", members, "MEAN", {}, 1, None, Timing(), 1)
        # In an earlier test a node may have died, and Ray may not know it yet.
        here = NodeAffinitySchedulingStrategy(nodes.id(0), soft=False)
        actors = ray.remote(concurrency_groups=CONCURRENCY, scheduling_strategy=here)(HostActor)
        self.actor: Any = actors.remote(config, "h")

    def stage(self, number: int, host: str, grant: int, weight: int, row: int | None) -> HostBatch:
        fence, key = Fence(1, number), BatchKey(host, 1, grant)
        with HostGroup(self.plan.members) as group:
            rows = ([], np.empty((0, 1))) if row is None else ([row], [[1.0]])
            assert group.apply({"m": rows}, 0, weight=weight)
            content = LocalSegment(group, self.plan).hold()
        for shard, piece in content.pieces.items():
            ray.get(self.actor.stage.remote(shard, fence, key, piece))
        return HostBatch(key, content.batch)

    def round(self, number: int, *members: HostBatch) -> tuple[list[int], list[float]]:
        """Return the rows of a round, and their values."""
        share = Share.of(Opened(Fence(1, number), 0, members), 0)
        rows = ray.get(self.actor.rows.remote(0, share)).numbers.tolist()
        values = ray.get(self.actor.values.remote(0, share)).view("float64").tolist()
        return rows, values


def test_a_reduction_made_ahead_is_used_only_if_it_fits_the_round(
    nodes: Nodes,
) -> None:
    """A shard reduces as soon as it has the pieces of all hosts of the last round."""
    shard = _Shard(nodes)
    for number in range(2):  # the first round says which hosts there are
        members = shard.stage(number, "a", 1, 3, 5), shard.stage(number, "b", 1, 1, 5)
        assert shard.round(number, *members) == ([5], [1.0]), "(3 + 1) / weight 4"
    a, b = shard.stage(2, "a", 2, 2, 1), shard.stage(2, "b", 2, 2, 1)
    c = shard.stage(2, "c", 2, 4, 2)
    assert shard.round(2, a, b, c) == ([1, 2], [0.5, 0.5]), "another host has come"
    a, b = shard.stage(3, "a", 3, 2, 1), shard.stage(3, "b", 3, 2, 4)
    shard.stage(3, "c", 3, 2, 7)
    assert shard.round(3, a, b) == ([1, 4], [0.5, 0.5]), "one of them is gone"
    a, b = shard.stage(4, "a", 4, 1, 1), shard.stage(4, "b", 4, 1, 2)
    c = shard.stage(4, "c", 4, 2, None)
    assert shard.round(4, a, b, c) == ([1, 2], [0.25, 0.25]), "one has nothing at this shard"
    a, b = shard.stage(5, "a", 5, 1, 1), shard.stage(5, "b", 5, 1, 2)
    late = shard.stage(5, "b", 6, 3, 2)
    assert shard.round(5, a, late) == ([1, 2], [0.25, 0.75]), "one has shipped again"
    ray.kill(shard.actor)


class _CountingCore(OwnerCore):
    """Counts the calls of `has_news`."""

    looks = 0

    def has_news(self, name: str, serial: int) -> bool:
        self.looks += 1
        return super().has_news(name, serial)


class _Owner(OwnerActor):
    """An owner in this process, which starts nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        self._core = _CountingCore(1, 0, config.timing)

    def _start(self) -> None:
        pass


def test_a_report_that_changes_nothing_wakes_no_call_that_waits() -> None:
    """If it woke them, the reports of n hosts would wake n calls each."""
    timing = Timing(heartbeat=30.0, lease=120.0)
    hosts = 40

    async def run() -> tuple[int, int]:
        owner = _Owner(Config("woken", dict(MEMBERS), "MEAN", {}, 1, None, timing, 1))
        core: Any = owner._core
        await owner.begin()
        incarnations = [await owner.enrol(f"host {i}", None) for i in range(hosts)]

        def report(host: int, number: int, count: int) -> asyncio.Task[Any]:
            made = Report(f"host {host}", incarnations[host], number, core.fence, 0, count)
            return asyncio.ensure_future(owner.report(made, core.serial))

        async def looks(change: Any) -> int:
            before = int(core.looks)
            await change
            await asyncio.sleep(0.1)
            return int(core.looks) - before

        parked = [report(host, 1, 0) for host in range(hosts)]
        await asyncio.sleep(0.1)
        parked = [task for task in parked if not task.done()]
        parked += [report(host, 2, 0) for host in range(hosts)]
        await asyncio.sleep(0.1)
        parked.append(report(0, 3, 5))  # a higher count, but no chief waits for gradients
        quiet = await looks(asyncio.sleep(0))
        loud = await looks(owner.do("advance_step", 3))
        assert all(task.done() for task in parked), "a new step is everybody's concern"
        return quiet, loud

    quiet, loud = asyncio.run(run())
    assert quiet < hosts / 4
    assert loud >= hosts
