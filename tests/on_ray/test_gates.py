"""A node shows no step before its arrays, even if a publish went on without the node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import ray
from helpers.support import stopped
from on_ray.journals import end_training, wait_for

import shmacc
import shmacc.ray
from shmacc.errors import DeadlineExceededError
from shmacc.ray import _gates
from shmacc.ray._head import living_nodes
from shmacc.ray._link import Link
from shmacc.ray._parts import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from on_ray.nodes import Nodes

_WORKER = """
import sys
import shmacc
arrays = shmacc.SharedArrays.attach("gated.arrays", timeout=60)
group = shmacc.attach("gated", timeout=60)
step = group.global_step
while True:
    if (seen := int(arrays["step"])) < step:
        sys.exit(f"at step {step} it saw the arrays of step {seen}")
    group.apply({"seen": seen}, step, contributor=int(sys.argv[1]))
    step = group.wait_step(step, timeout=600)
"""


class Training:
    """A chief that publishes the step in each block; a worker on each node, which ends if it lags.

    Attributes:
        step: The step that was published last.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.step = nodes, 0
        self.arrays = shmacc.ray.PublishedArrays({"step": np.int64(0)}, "gated.arrays")
        members = {"seen": shmacc.TensorSpec((), "int64", reduction_type="SUM")}
        self.group = shmacc.ray.AccumulatorGroup(members, "gated", shards=1)
        self.workers = [self.start(node, node) for node in range(3)]

    def start(self, node: int, rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, str(rank)], env=self.nodes.environment(node)
        )

    def rounds(self, number: int, required: int) -> None:
        for _ in range(number):
            with self.group.round(required, timeout=60) as taken:
                assert taken.step == self.step
                self.step += 1
                self.arrays["step"][...] = self.step
                self.arrays.publish({"step": None})

    def kill_owner(self) -> None:
        os.kill(self.pid("gated/owner"), signal.SIGKILL)

    @contextlib.contextmanager
    def stays_at(self, step: int, keeper: int) -> Iterator[None]:
        """Keep the last node's keeper stopped in the block; meanwhile its segment gets no step."""
        with stopped(keeper):
            wait_for(lambda: self.nodes.id(2) in self.group.hosts())  # it has found the owner
            yield
            time.sleep(0.5)
            with self.nodes.on(2), shmacc.AccumulatorGroup.attach("gated") as segment:
                assert segment.global_step == step, "as before it was frozen"

    def pid(self, part: str) -> int:
        actor: Any = ray.get_actor(part, namespace=NAMESPACE)
        pid: int = ray.get(actor.pid.remote())
        return pid

    def end(self) -> None:
        end_training(self.workers, self.group, self.arrays)


@pytest.fixture
def training(nodes: Nodes) -> Iterator[Training]:
    made = Training(nodes)
    try:
        yield made
        assert {worker.poll() for worker in made.workers} == {None}
    finally:
        made.end()


def test_a_gate_stays_closed_though_the_owner_that_closed_it_dies(training: Training) -> None:
    """The next owner is told of it before it knows a step that it could pass on."""
    training.rounds(3, 3)
    gone = training.nodes.id(2)
    keeper = training.pid(f"gated.arrays/keeper {gone}")
    with training.nodes.frozen(2):
        training.rounds(1, 2)
        assert gone in living_nodes(None), "Ray has not seen it yet"
        assert not training.group.hosts()[gone].alive
        training.kill_owner()
        training.group.set_global_step(training.step)
        training.rounds(5, 2)
    with training.stays_at(3, keeper):
        training.rounds(2, 2)
    training.rounds(5, 3)  # with its worker, which has checked each step


def test_a_publish_gives_up_a_frozen_node_that_the_owner_does_not_know(
    training: Training,
) -> None:
    """The owner died before it took the node for lost; Ray takes a minute to notice."""
    training.rounds(3, 3)
    gone = training.nodes.id(2)
    keeper = training.pid(f"gated.arrays/keeper {gone}")
    with training.nodes.frozen(2):
        training.kill_owner()
        training.group.set_global_step(training.step)
        training.rounds(3, 2)
        assert gone in living_nodes(None), "Ray has not seen it yet"
        assert gone not in training.group.hosts()
    with training.stays_at(3, keeper):
        training.rounds(2, 2)
    training.rounds(5, 3)


def test_a_node_that_one_group_has_given_up_learns_of_no_step_of_another(
    training: Training,
) -> None:
    """The arrays belong to the steps of both, and only one's owner takes the node for lost."""
    nodes = training.nodes
    gone = nodes.id(2)
    pids = [training.pid(part + gone) for part in ("gated/host ", "gated.arrays/keeper ")]
    members = {"m": shmacc.TensorSpec((), "int64")}
    with shmacc.ray.AccumulatorGroup(members, "beside", shards=1, unlink_on_close=True) as other:
        with nodes.on(0):
            here = shmacc.AccumulatorGroup.attach("beside", timeout=60)
        with nodes.on(2):
            there = shmacc.AccumulatorGroup.attach("beside", timeout=60)
        with stopped(*pids):
            training.rounds(1, 2)
            assert here.apply({"m": 1}, 0)
            with other.round(1, timeout=60):
                training.arrays.publish()
            assert here.wait_step(0, timeout=60) == 1
            time.sleep(0.5)
            assert there.global_step == 0
        assert there.wait_step(0, timeout=60) == 1
        here.close()
        there.close()
    training.rounds(5, 3)


def test_a_machine_on_which_ray_is_started_again_sees_no_step_before_its_arrays(
    training: Training,
) -> None:
    """Its memory has arrays of an earlier step, which workers may use."""
    training.rounds(3, 3)
    with training.nodes.without_ray(2, training.workers[2].pid):
        training.rounds(3, 2)
        training.workers.append(training.start(2, 3))
    training.workers.append(training.start(2, 4))
    training.rounds(5, 5)
    with training.nodes.on(2), shmacc.AccumulatorGroup.attach("gated") as segment:
        wait_for(lambda: segment.global_step == training.step)


def test_a_new_node_learns_of_steps_if_nobody_publishes(training: Training) -> None:
    """The chief that published has ended, or publishes no more."""
    training.rounds(3, 3)
    training.arrays._stop.set()
    number = training.nodes.add()
    try:
        with (
            training.nodes.on(number),
            shmacc.AccumulatorGroup.attach("gated", timeout=60) as segment,
        ):
            assert segment.wait_step(0, timeout=60) == training.step
    finally:
        training.nodes.remove(number)


@pytest.mark.parametrize("attached_before", [False, True])
def test_the_next_owner_hears_of_a_gate_from_any_handle_of_the_process(
    training: Training, *, attached_before: bool
) -> None:
    training.rounds(3, 3)
    keeper = training.pid(f"gated.arrays/keeper {training.nodes.id(2)}")
    other = training.group
    if attached_before:
        other = shmacc.ray.AccumulatorGroup.attach("gated")
    with training.nodes.frozen(2):
        training.rounds(1, 2)
        training.kill_owner()
        if not attached_before:
            other = shmacc.ray.AccumulatorGroup.attach("gated")
        other.set_global_step(training.step)
    with training.stays_at(3, keeper):
        pass
    training.rounds(5, 3)


def test_a_gate_that_could_not_be_opened_is_tried_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be stopped just then."""
    tries = []

    def gate(link: Link, hosts: Any, by: str, until: float, *, closed: bool) -> None:
        if not closed:
            tries.append(hosts)
            if len(tries) == 1:
                raise DeadlineExceededError("as if the owner did not answer")
        original(link, hosts, by, until, closed=closed)

    original = Link.gate
    training.rounds(3, 3)
    with training.nodes.frozen(2):
        training.rounds(1, 2)
        monkeypatch.setattr(Link, "gate", gate)
    training.rounds(5, 3)  # with its worker
    assert tries[:2] == [{training.nodes.id(2)}] * 2


class SilentOwner:
    """A link to an owner that does as it is told, but answers the first call too late."""

    closed = False

    def __init__(self) -> None:
        self.gates: set[str] = set()
        self.calls = 0

    def gate(self, hosts: set[str], by: str, until: float, *, closed: bool) -> None:  # noqa: ARG002
        (self.gates.update if closed else self.gates.difference_update)(hosts)
        self.calls += 1
        if self.calls == 1:
            raise DeadlineExceededError("the owner is stopped, and does this when it goes on")


@pytest.mark.parametrize("again", [False, True])
def test_a_gate_may_be_closed_though_the_owner_has_not_said_so(
    monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    link: Any = SilentOwner()
    monkeypatch.setattr(_gates, "open_links", lambda: {link})
    gates = _gates.Gates("publisher", None)
    with pytest.raises(DeadlineExceededError):
        gates.close({"node"}, 0)
    if again:
        gates.close({"node"}, 0)
        gates.close({"node"}, 0)
        assert link.calls == 2, "it was not known before"
    assert gates.nodes == link.gates == {"node"}
    gates.open("node", 0)
    assert not gates.nodes
    assert not link.gates


def test_owners_hear_of_a_publisher_while_a_node_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they forget it after `chief_lease`, and the node sees steps before its arrays."""
    answers = iter([[], [], ["call"]])
    monkeypatch.setattr(ray, "wait", lambda calls, timeout: (next(answers), calls))  # noqa: ARG005
    link = Mock(closed=False)
    arrays: Any = object.__new__(shmacc.ray.PublishedArrays)
    arrays._patience, arrays._stop, arrays._fed = {"node": 60.0}, threading.Event(), frozenset()
    arrays._gates = _gates.Gates("publisher", None)
    arrays._gates._told = frozenset({link})
    assert arrays._answers_in_time("node", "call")
    assert link.tell.mock_calls == [call("do", "publishes", "publisher", None, frozenset())] * 2
