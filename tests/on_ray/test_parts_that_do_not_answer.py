"""Parts are stopped, or cannot start: every call ends by its timeout, and names the part."""

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from helpers import support
from on_ray.nodes import Nodes, kill, pid_of, wait_for

import shmacc
import shmacc.ray
from shmacc._multihost.messages import Opened
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, NotFoundError, ShmaccError
from shmacc.ray import _owner, _parts
from shmacc.ray._head import answer_of_head
from shmacc.ray._parts import find_actor
from shmacc.ray._round import Round

MEMBERS = {"m": shmacc.TensorSpec((3,), "float32")}
TIMING = shmacc.ray.Timing(lease=30.0)  # so a part that is stopped does not count as lost
SECONDS = 1.5
SLACK = 8.0  # seconds that a busy machine may add


@pytest.fixture(scope="module")
def group(nodes: Nodes) -> Iterator[shmacc.ray.AccumulatorGroup]:  # noqa: ARG001
    made = shmacc.ray.AccumulatorGroup(MEMBERS, "stopped", shards=3, timing=TIMING)
    yield made
    made.unlink()


@pytest.fixture
def local(nodes: Nodes, group: shmacc.ray.AccumulatorGroup) -> Iterator[shmacc.AccumulatorGroup]:
    with shmacc.AccumulatorGroup.attach("stopped", timeout=60) as made:
        wait_for(lambda: made.global_step == group.global_step)
        # In another test the owner dies: the next owner must have heard of all hosts.
        ids = {nodes.id(number) for number in range(3)}
        wait_for(lambda: ids <= {node for node, host in group.hosts().items() if host.alive})
        yield made


@contextlib.contextmanager
def stopped(part: str) -> Iterator[None]:
    pid = pid_of(part)
    assert pid is not None
    with support.stopped(pid):
        yield


@contextlib.contextmanager
def ends_in_time(match: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=match):
        yield
    assert time.monotonic() - began < SECONDS + SLACK


def test_calls_end_by_their_timeout_while_the_owner_is_stopped(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> None:
    step = group.global_step
    with stopped("stopped/owner"):
        where = f"owner of 'stopped', on node {nodes.shown(0)}"
        with ends_in_time(where):
            group.take(1, timeout=SECONDS)
        with ends_in_time(where):
            group.wait_step(step, timeout=SECONDS)
        with ends_in_time(where):
            next(group.steps(timeout=SECONDS))
        with ends_in_time("owner of 'stopped'"):
            shmacc.ray.AccumulatorGroup.attach("stopped", timeout=SECONDS)
        with ends_in_time(where):
            group.stats(timeout=SECONDS)
        with ends_in_time(where):
            group.snapshot(timeout=SECONDS)
    assert group.global_step == step


@pytest.mark.usefixtures("local")
def test_calls_end_by_their_timeout_while_a_host_is_stopped(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> None:
    with stopped(f"stopped/host {nodes.id(1)}"):
        for call in (group.stats, group.snapshot, group.contributors):
            with ends_in_time(f"those of the nodes {nodes.shown(1)}"):
                call(timeout=SECONDS)
    assert len(group.stats()) == 3


@pytest.mark.usefixtures("local")
def test_a_host_that_is_lost_is_named_by_the_take(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> None:
    with stopped(f"stopped/host {nodes.id(1)}"):
        wait_for(lambda: not group.hosts()[nodes.id(1)].alive)
        for _ in range(3):  # steps
            with ends_in_time(f"nodes {nodes.shown(1)} are lost"):
                group.take(1, timeout=SECONDS)
            group.advance_step(group.global_step + 1)
    wait_for(lambda: group.hosts()[nodes.id(1)].alive)
    with ends_in_time(f"alive are 3 hosts: {nodes.shown(0, 1, 2)}$"):
        group.take(1, timeout=SECONDS)


def test_hosts_that_are_stopped_before_they_send_their_sums_are_named_by_the_take(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: shmacc.AccumulatorGroup
) -> None:
    step = group.global_step
    assert local.apply({"m": np.ones(3)}, step)
    wait_for(lambda: group.num_accumulated() == 1)
    with contextlib.ExitStack() as all_of_them:
        for number in range(3):
            all_of_them.enter_context(stopped(f"stopped/host {nodes.id(number)}"))
        with ends_in_time(f"nodes {nodes.shown(0, 1, 2)} have not sent what they have"):
            group.take(1, timeout=SECONDS)
    assert group.take(1, timeout=60).count == 1


def test_takes_end_by_their_timeout_while_shards_are_stopped(
    nodes: Nodes,
    group: shmacc.ray.AccumulatorGroup,
    local: shmacc.AccumulatorGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shards have the pieces, and only the chief waits for them."""
    step = group.global_step
    assert local.apply({"m": np.ones(3)}, step)
    with contextlib.ExitStack() as all_of_them, monkeypatch.context() as patch:
        fetch = Round._fetch

        def stop_first(self: Round, opened: Opened, until: float) -> Any:
            for number in range(3):
                all_of_them.enter_context(stopped(f"stopped/host {nodes.id(number)}"))
            return fetch(self, opened, until)

        patch.setattr(Round, "_fetch", stop_first)
        with ends_in_time(r"Shards \d of 'stopped'.*on node \S+ \([0-9a-f]{8}\)"):
            group.take(1, timeout=SECONDS)
    taken = group.take(1, timeout=60)  # and nothing was consumed
    assert (taken.step, taken.count) == (step, 1)


def test_an_owner_that_died_is_replaced_at_once_though_hosts_are_stopped(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> None:
    """The new owner gets the group's config from any host."""
    step = group.global_step
    with contextlib.ExitStack() as all_but_one:
        for node in sorted(nodes.id(number) for number in range(3))[:-1]:
            all_but_one.enter_context(stopped(f"stopped/host {node}"))
        kill("stopped/owner")
        began = time.monotonic()
        group.set_global_step(step)
        assert time.monotonic() - began < SLACK
    assert group.global_step == step


@pytest.mark.parametrize("differs", ["shape", "order"])
def test_a_segment_that_differs_on_one_node_makes_the_constructor_fail_and_leave_nothing(
    nodes: Nodes, differs: str
) -> None:
    """A segment with the members in another order differs, too: members are sent by number."""
    spec = shmacc.TensorSpec((3,), "float32")
    asked = MEMBERS if differs == "shape" else {"m": spec, "n": spec}
    left = (
        {"m": shmacc.TensorSpec((4,), "float64")} if differs == "shape" else {"n": spec, "m": spec}
    )
    with nodes.on(2):
        shmacc.AccumulatorGroup(left, "left").close()
    began = time.monotonic()
    with pytest.raises(FailedPreconditionError, match=rf"Node {nodes.shown(2)}.*InvalidArgument"):
        shmacc.ray.AccumulatorGroup(asked, "left")
    assert time.monotonic() - began < 30
    assert find_actor("left/owner") is None
    with pytest.raises(NotFoundError):
        shmacc.ray.AccumulatorGroup.attach("left")
    with nodes.on(2), shmacc.AccumulatorGroup.attach("left") as found:
        shapes = [(name, spec.shape) for name, spec in found.members.items()]
    assert shapes == [(name, spec.shape) for name, spec in left.items()], "as it was"
    with shmacc.ray.AccumulatorGroup(
        asked, "left", if_exists="replace", unlink_on_close=True
    ) as group:
        assert len(group.hosts()) == 3


def test_attaching_while_a_group_is_made_raises_not_found_until_it_succeeds(
    nodes: Nodes,  # noqa: ARG001
) -> None:
    def attach() -> str:
        while True:
            try:
                found = shmacc.ray.AccumulatorGroup.attach("young", timeout=60)
                return repr(found.global_step)
            except NotFoundError:
                continue
            except ShmaccError as error:
                return f"{type(error).__name__}: {error}"

    calls = [ray.remote(num_cpus=0)(attach).remote() for _ in range(2)]
    with shmacc.ray.AccumulatorGroup(MEMBERS, "young", unlink_on_close=True):
        assert ray.get(calls, timeout=120) == ["0", "0"]


def test_a_chief_with_another_namespace_than_its_node_is_refused(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> None:
    """Workers of its node would never find the segments that the chief makes."""
    said = f"'{nodes.namespace(1)}'.*'{nodes.namespace(0)}'"
    with nodes.on(1):
        for make in (
            lambda: shmacc.ray.AccumulatorGroup(MEMBERS, "elsewhere"),
            lambda: shmacc.ray.AccumulatorGroup.attach(group.shared_name),
            lambda: shmacc.ray.Parameters({"a": np.zeros(3, "f4")}, "elsewhere.params"),
        ):
            with pytest.raises(FailedPreconditionError, match=said):
                make()
    assert find_actor("elsewhere/owner") is None
    assert not [name for name in nodes.left() if "elsewhere" in name]


def test_removing_a_group_ends_in_time_without_rays_head(
    nodes: Nodes,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The actors go on, and another handle removes them."""
    monkeypatch.setattr("shmacc.ray._link.END", SECONDS)
    group = shmacc.ray.AccumulatorGroup(MEMBERS, "removed")
    back, ask = threading.Event(), ray.get_actor
    with monkeypatch.context() as patch:
        late = lambda *args, **kwargs: back.wait(100) and ask(*args, **kwargs)  # noqa: E731
        patch.setattr(ray, "get_actor", late)
        began = time.monotonic()
        group.unlink()
        assert time.monotonic() - began < SECONDS + SLACK
        back.set()
    shmacc.ray.AccumulatorGroup.attach("removed", timeout=60).unlink()


def test_removing_a_group_names_nodes_that_did_not_answer(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmacc.ray._link.END", 4.0)
    group = shmacc.ray.AccumulatorGroup(MEMBERS, "removed")
    part = f"removed/host {nodes.id(1)}"
    with stopped(part), caplog.at_level(logging.WARNING, "shmacc"):
        group.unlink()
        left = [name for name in nodes.left() if "removed" in name]
    assert re.search(f"left in /dev/shm: {nodes.shown(1)}", caplog.text)
    assert left
    assert all(nodes.namespace(1) in name for name in left)
    for name in left:
        with contextlib.suppress(FileNotFoundError):  # the actor may have removed it
            os.unlink(f"/dev/shm/{name}")  # noqa: PTH108, S108


@pytest.mark.usefixtures("nodes")
def test_a_forwarder_finds_its_owner_through_a_slow_head() -> None:
    """The forwarder asks again and again, and waits for a moment each time."""

    def ask() -> str:
        time.sleep(1)
        return "found"

    found, tries = None, 0
    while found is None and tries < 100:
        tries += 1
        with contextlib.suppress(DeadlineExceededError):
            found = answer_of_head("a slow question", ask, time.monotonic() + 0.1, late=True)
        time.sleep(0.2)
    assert found == "found"
    assert tries > 1


def test_an_owner_looks_after_its_nodes_again_after_rays_head_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: Any = iter([DeadlineExceededError("away"), {"a node"}])
    tended: list[str] = []

    def living_nodes(_: object) -> set[str]:
        found = next(answers, {"a node"})
        if isinstance(found, Exception):
            raise found
        return found

    async def keep(node: str) -> None:
        tended.append(node)

    async def tend() -> None:
        owner = _owner.OwnerActor(_parts.Config("g", {}, "MEAN", {}, 1, None, TIMING, 7), 0)
        monkeypatch.setattr(owner, "_keep", keep)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(owner._tend(), 1)

    monkeypatch.setattr(_owner, "living_nodes", living_nodes)
    monkeypatch.setattr(_owner, "_LOOK_FOR_NODES", 0.05)
    asyncio.run(tend())
    assert tended == ["a node"]
