"""A group over hosts answers as a group on one host does; and its hosts show what they do."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ray
from on_ray.books import wait_for

import shmacc
import shmacc.ray
from shmacc._multihost.columns import ALIGNED
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import BatchKey, Fence, Member, Opened, Report, Timing
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.pieces import Plan
from shmacc._multihost.segment import LocalSegment
from shmacc.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    WorkerDiedError,
)
from shmacc.ray._host import CONCURRENCY, HostActor
from shmacc.ray._link import open_links
from shmacc.ray._owner import OwnerActor
from shmacc.ray._parts import Config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from on_ray.nodes import Nodes

MEMBERS = {
    "rows": shmacc.IndexedSlicesSpec((100, 2), "float32"),
    "rest": shmacc.TensorSpec((5,), "float64", reduction_type="SUM"),
}
HOSTS = range(3)


@pytest.fixture(scope="module")
def group(nodes: Nodes) -> Iterator[shmacc.ray.AccumulatorGroup]:  # noqa: ARG001
    made = shmacc.ray.AccumulatorGroup(MEMBERS, "asked", shards=2, lanes=2, capacity=50)
    yield made
    made.unlink()


@pytest.fixture
def local(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> Iterator[list[shmacc.AccumulatorGroup]]:
    """The segments of the hosts, empty, at the owner's step."""
    step = group.global_step + 1
    group.advance_step(step)
    made = []
    for node in HOSTS:
        with nodes.on(node):
            made.append(shmacc.AccumulatorGroup.attach("asked", timeout=60))
    for each in made:
        wait_for(lambda each=each: each.global_step == step)
    yield made
    for each in made:
        each.close()


def gradient(row: int) -> dict[str, Any]:
    return {"rows": ([row, 99], np.full((2, 2), row, np.float32)), "rest": np.full(5, row)}


def wait_in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


def test_a_snapshot_is_what_a_take_then_gives(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    empty = group.snapshot()
    assert (empty.count, dict(empty), group.contributors().tolist()) == (0, {}, [])
    for number, each in enumerate(local):
        assert each.apply(gradient(number + 1), group.global_step, contributor=number, weight=2)
    shown = group.snapshot()
    assert group.contributors().tolist() == [0, 1, 2]
    assert all(each.apply(gradient(7), group.global_step) for each in local), "nothing is sealed"
    assert group.snapshot().count == 6
    with group.round(6, timeout=60) as taken:
        sealed = group.snapshot()
    assert sealed.count == 6
    assert np.array_equal(sealed["rows"].values, taken["rows"].values)
    assert shown.step == taken.step
    assert shown.contributors.tolist() == taken.contributors.tolist() == [0, 1, 2]
    assert sealed["rows"].indices.tolist() == taken["rows"].indices.tolist()
    assert (shown.count, shown.weight) == (3, 6)
    assert shown["rows"].indices.tolist() == [1, 2, 3, 99]
    assert shown["rest"].value.tolist() == [2.0 * (1 + 2 + 3)] * 5
    assert taken["rest"].value.tolist() == [2.0 * (1 + 2 + 3) + 3 * 7] * 5


def test_parameters_are_not_updated_from_a_round_over_hosts(
    local: list[shmacc.AccumulatorGroup], group: shmacc.ray.AccumulatorGroup
) -> None:
    """Another chief would get other gradients after a death: such rounds are not final."""
    contents = {"rows": np.ones((100, 2), np.float32), "rest": np.ones(5)}
    step = group.global_step
    assert local[1].apply(gradient(1), step)
    with (
        shmacc.Parameters(contents, optimizer=shmacc.optim.SGD(0.1)) as params,
        group.round(1, timeout=60) as taken,
    ):
        for call in (params.update, params.skip):
            with pytest.raises(FailedPreconditionError, match=r"shmacc\.ray, which are over many"):
                call(taken)
        assert params.step == 0
        np.testing.assert_array_equal(params["rows"], contents["rows"])
    assert group.global_step == step + 1


def test_cancel_ends_the_waits_of_all_chiefs(group: shmacc.ray.AccumulatorGroup) -> None:
    other = shmacc.ray.AccumulatorGroup.attach("asked")
    waits = [wait_in_thread(partial(each.take, 9, timeout=60)) for each in (group, other)]
    for thread, failures in waits:
        while thread.is_alive():  # the first call may come before it waits
            group.cancel()
            thread.join(0.05)
        assert [type(failure) for failure in failures] == [CancelledError]
    with pytest.raises(DeadlineExceededError):
        group.take(9, timeout=0.2)


def test_a_chief_follows_the_step(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    step = group.global_step
    with pytest.raises(DeadlineExceededError) as caught:
        group.wait_step(step, timeout=0.1)
    assert (caught.value.step, caught.value.accumulated, caught.value.required) == (step, 0, None)
    assert group.wait_step(step - 1) == step
    steps: list[int] = []
    thread, failures = wait_in_thread(lambda: steps.append(group.wait_step(step, timeout=60)))
    assert local[0].apply(gradient(1), step)
    group.take(1, timeout=60)
    thread.join()
    assert (steps, failures) == ([step + 1], [])


def test_a_group_is_found_by_its_name_and_pickled_as_it(
    group: shmacc.ray.AccumulatorGroup,
) -> None:
    again = pickle.loads(pickle.dumps(group))
    assert (again.shared_name, repr(again.members)) == (group.shared_name, repr(group.members))
    assert (again.lanes, again.capacity) == (2, 50)
    assert shmacc.ray.AccumulatorGroup.attach("asked", timeout=0).shared_name == "asked"
    with pytest.raises(NotFoundError):
        shmacc.ray.AccumulatorGroup.attach("never")
    with pytest.raises(DeadlineExceededError, match="no group 'never'"):
        shmacc.ray.AccumulatorGroup.attach("never", timeout=0.1)


def test_a_chief_that_another_one_has_replaced_removes_nothing_of_its(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"m": shmacc.TensorSpec((), "float64")}
    with nodes.on(0):
        first = shmacc.ray.AccumulatorGroup(members, "replaced", unlink_on_close=True)
        third = shmacc.ray.AccumulatorGroup.attach("replaced")
        with shmacc.ray.AccumulatorGroup(
            members, "replaced", if_exists="replace", unlink_on_close=True
        ) as second:
            first.close()
            assert "is another chief's now" in caplog.text
            assert second.running
            with pytest.raises(FailedPreconditionError, match="another chief has made one of"):
                third.set_global_step(7)
            assert second.global_step == 0
            with shmacc.attach("replaced", timeout=60) as local:
                assert local.running


def test_a_take_that_fails_leaves_the_round_of_another_thread_open(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    """What is published in that one's block must reach its owner's gates."""
    assert local[1].apply(gradient(1), group.global_step)
    with group.round(1, timeout=60):
        thread, failures = wait_in_thread(lambda: group.take(1, timeout=0.2))
        thread.join()
        assert [type(error) for error in failures] == [DeadlineExceededError]
        assert open_links() == {group._link}
        with pytest.raises(FailedPreconditionError, match="round of this group open"):
            group.take(1, timeout=60)
        assert open_links() == {group._link}
    assert open_links() == set()


def test_an_actor_that_is_ended_before_it_serves_makes_nothing(nodes: Nodes) -> None:
    config = Config("unborn", dict(MEMBERS), "MEAN", {}, 1, None, Timing(), 1)
    actor = HostActor(config, nodes.id(0))
    actor.end()
    actor.serve()
    assert not [name for name in os.listdir("/dev/shm") if "unborn" in name]  # noqa: PTH208, S108


def test_stats_are_those_of_each_segment(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    assert local[1].apply(gradient(1), group.global_step)
    found = group.stats()
    assert sorted(found) == sorted(nodes.id(node) for node in HOSTS)
    for node, each in zip(HOSTS, local, strict=True):
        assert found[nodes.id(node)].applied == each.stats().applied
    assert [found[nodes.id(node)].num_accumulated for node in HOSTS] == [0, 1, 0]


_WORKER = """
import sys, time
import numpy as np
import shmacc
group = shmacc.attach("asked", timeout=60)
assert group.apply({"rest": np.ones(5)}, int(sys.argv[1]), contributor=7)
print("applied", flush=True)
time.sleep(600)
"""


def test_the_death_of_a_worker_on_any_host_ends_a_wait_that_asks_for_it(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    before = group.counters()["died_workers"]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _WORKER, str(group.global_step)],
        env=nodes.environment(2),
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"applied\n"
        thread, failures = wait_in_thread(lambda: group.take(2, timeout=60, on_death="raise"))
        worker.kill()
        thread.join()
    [error] = failures
    assert isinstance(error, WorkerDiedError)
    assert (error.pids, error.contributors) == ((worker.pid,), (7,))
    assert nodes.id(2) in str(error)
    with pytest.raises(DeadlineExceededError):  # it was told once
        group.take(2, timeout=1, on_death="raise")
    assert local[0].apply(gradient(1), group.global_step, contributor=1)
    taken = group.take(2, timeout=60, on_death="raise")
    assert taken.contributors.tolist() == [1, 7], "what was applied before the death counts"
    assert group.counters()["died_workers"] == before + 1


_FAILING = """
import sys
import numpy as np
import shmacc
with shmacc.attach("asked", timeout=60) as group:
    rows = [7, 99], np.ones((2, 2), np.float32)
    group.apply({"rows": rows, "rest": np.ones(5)}, group.global_step, contributor=7)
    raise ValueError("a bad batch")
"""


def test_the_chief_is_told_why_a_worker_of_another_host_has_failed(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    assert local[0].apply(gradient(1), group.global_step, contributor=1)
    command = [sys.executable, "-P", "-c", _FAILING]
    worker = subprocess.Popen(command, env=nodes.environment(1), stderr=subprocess.DEVNULL)
    with pytest.raises(WorkerDiedError, match="ValueError: a bad batch") as caught:
        group.take(3, timeout=60, on_death="raise")
    assert worker.wait() == 1
    error = caught.value
    assert error.reasons == ("ValueError: a bad batch",)
    assert (error.pids, error.contributors) == ((worker.pid,), (7,))
    assert nodes.id(1) in str(error)
    assert group.take(2, timeout=60, on_death="raise").contributors.tolist() == [1, 7]


def test_what_a_forwarder_has_done_is_shown_on_its_host(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    def shown(node: int) -> dict[str, int]:
        inspect = Path(sys.executable).parent / "shmacc-inspect"
        command = [str(inspect), "show", "--json", "asked.forwarder"]
        made = subprocess.run(
            command, env=nodes.environment(node), capture_output=True, check=True, text=True
        )
        return {one["name"]: one["value"] for one in json.loads(made.stdout)["members"]}

    before = shown(0), shown(1)
    assert before[0]["starts"] == before[1]["starts"] == 1
    for _ in range(2):
        step = group.global_step
        assert local[0].wait_step(step - 1, timeout=60) == step
        assert local[0].apply(gradient(1), step)
        assert local[0].apply(gradient(2), step)
        group.take(2, timeout=60)
    wait_for(lambda: local[0].global_step == local[1].global_step == group.global_step)
    wait_for(lambda: shown(0)["rounds"] == before[0]["rounds"] + 2)
    after = shown(0), shown(1)
    grown = [
        {key: new[key] - old[key] for key in new} for old, new in zip(before, after, strict=True)
    ]
    assert (grown[0]["batches"], grown[0]["gradients"]) == (2, 4)
    sums = 2 * (3 * (8 + 8 + 2 * 4) + 5 * 8)
    assert sums <= grown[0]["bytes"] < sums + 4 * ALIGNED, "and what is between members' parts"
    assert (grown[1]["gradients"], grown[1]["bytes"]) == (0, 0)
    assert [each["step"] for each in grown] == [2, 2]
    for each in grown:
        assert each["reports"] > 0
        assert each["orders"] > 0
        assert each["seals"] >= 2
        assert (each["starts"], each["resent"], each["refused"]) == (0, 0, 0)


class _Shard:
    """A shard of a group of its own, and rounds of it that are made by hand."""

    def __init__(self) -> None:
        rows = shmacc.IndexedSlicesSpec((10, 1), "float64", reduction_type="CMEAN")
        members: dict[str, shmacc.TensorSpec] = {"m": rows}
        self.plan = Plan(members, 1)
        config = Config("by hand", members, "MEAN", {}, 1, None, Timing(), 1)
        self.actor: Any = ray.remote(concurrency_groups=CONCURRENCY)(HostActor).remote(config, "h")

    def stage(self, number: int, host: str, grant: int, weight: int, row: int | None) -> Member:
        fence, key = Fence(1, number), BatchKey(host, 1, grant)
        with HostGroup(self.plan.members) as group:
            rows = ([], np.empty((0, 1))) if row is None else ([row], [[1.0]])
            assert group.apply({"m": rows}, 0, weight=weight)
            content = LocalSegment(group, self.plan).seal()
        for shard, piece in content.pieces.items():
            ray.get(self.actor.stage.remote(shard, fence, key, piece))
        return Member(key, content.batch)

    def round(self, number: int, *members: Member) -> tuple[list[int], list[float]]:
        """Which rows the round has, and their values; then it is over."""
        opened = Opened(Fence(1, number), 0, members)
        rows = ray.get(self.actor.rows.remote(0, opened)).numbers.tolist()
        values = ray.get(self.actor.values.remote(0, opened)).view("float64").tolist()
        ray.get(self.actor.forget.remote(Fence(1, number + 1)))
        return rows, values


def test_what_a_shard_reduces_ahead_is_handed_out_only_if_it_is_what_the_round_has(
    nodes: Nodes,  # noqa: ARG001
) -> None:
    """Once pieces of the hosts of the last round are there it reduces them, and is told later."""
    shard = _Shard()
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


def test_what_a_block_has_is_not_reduced_again_when_a_host_ships_meanwhile(
    nodes: Nodes,  # noqa: ARG001
) -> None:
    shard = _Shard()
    opened = Opened(Fence(1, 0), 0, (shard.stage(0, "a", 1, 1, 5), shard.stage(0, "b", 1, 1, 5)))

    def mark(taken: shmacc.GroupTaken) -> float:
        taken["m"].values[...] += 7  # which only the same arrays remember
        return float(taken["m"].values[0, 0])

    assert ray.get(shard.actor.run.remote(0, opened, mark, ())) == 8.0
    shard.stage(0, "a", 2, 1, 5)
    assert ray.get(shard.actor.run.remote(0, opened, mark, ())) == 15.0
    ray.kill(shard.actor)


class _CountingCore(OwnerCore):
    """Counts how often somebody asks whether something has changed."""

    looks = 0

    def has_news(self, name: str, serial: int) -> bool:
        self.looks += 1
        return super().has_news(name, serial)


class _Owner(OwnerActor):
    """An owner as an object of this process, which starts nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        self._core = _CountingCore(1, 0, config.timing)

    def _start(self) -> None:
        pass


def test_a_report_that_changes_nothing_wakes_no_call_that_waits_at_the_owner() -> None:
    """Else each of n hosts' reports costs n calls another look."""
    timing = Timing(heartbeat=30.0, lease=120.0)
    hosts = 40

    async def run() -> tuple[int, int]:
        owner = _Owner(Config("woken", dict(MEMBERS), "MEAN", {}, 1, None, timing, 1))
        core: Any = owner._core
        incarnations = [await owner.enrol(f"host {i}") for i in range(hosts)]

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
        parked.append(report(0, 3, 5))  # a count, which nobody waits for
        quiet = await looks(asyncio.sleep(0))
        loud = await looks(owner.do("advance_step", 3))
        assert all(task.done() for task in parked), "a new step is everybody's concern"
        return quiet, loud

    quiet, loud = asyncio.run(run())
    assert quiet < hosts / 4
    assert loud >= hosts
