"""A worker that sees a published step sees the parameters of that step, on every node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from helpers.support import stopped
from on_ray.journals import end_training, wait_for

import shmacc
import shmacc.ray
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from shmacc.ray import _published, _waits
from shmacc.ray._head import living_nodes
from shmacc.ray._parts import NAMESPACE, find_actor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from on_ray.nodes import Nodes

ROWS = 50
CONTENTS = {f"copy {copy}": np.zeros((ROWS, 3)) for copy in (0, 1)} | {"fixed": np.arange(5)}

# The row `step % ROWS` of a copy is the last one that was written, and has the step's number.
_WORKER = """
import sys
import shmacc
arrays = shmacc.SharedArrays.attach("values.arrays", timeout=60)
group = shmacc.attach("values", timeout=60)
assert "ray" not in sys.modules
step = group.global_step
while True:
    copy = arrays[f"copy {step % 2}"]
    seen = float(copy.max()), float(copy[step % 50].min()), int(arrays["fixed"].sum())
    if group.apply({"seen": seen}, step, contributor=int(sys.argv[1])):
        step = group.wait_step(step, timeout=600)
    else:
        step = group.global_step
"""


class Training:
    """A chief that publishes in each round, and compares what workers saw with the step."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.workers: list[subprocess.Popen[bytes]] = []
        self.arrays = shmacc.ray.PublishedArrays(CONTENTS, "values.arrays")
        self.group = shmacc.ray.AccumulatorGroup(
            {"seen": shmacc.TensorSpec((3,), "float64", reduction_type="SUM")}, "values", shards=1
        )

    def work(self, node: int) -> None:
        self.workers.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, str(len(self.workers))],
                env=self.nodes.environment(node),
            )
        )

    def round(self, *, before_publish: Any = None) -> None:
        with self.group.round(len(self.workers), timeout=60) as taken:
            part: Any = taken["seen"]
            wanted = np.array([taken.step, taken.step, 10]) * len(self.workers)
            assert part.value.tolist() == wanted.tolist(), "parameters of another step"
            new = taken.step + 1
            copy = f"copy {new % 2}"
            self.arrays[copy][new % ROWS] = new
            if before_publish is not None:
                before_publish()
            self.arrays.publish({copy: [new % ROWS]})

    def keeper(self, node: int) -> Any:
        return ray.get_actor(f"values.arrays/keeper {self.nodes.id(node)}", namespace=NAMESPACE)

    def end(self) -> None:
        end_training(self.workers, self.group, self.arrays)


@pytest.fixture(scope="module")
def training(nodes: Nodes) -> Iterator[Training]:
    made = Training(nodes)
    try:
        for node in range(3):
            made.work(node)
        yield made
    finally:
        made.end()


def test_workers_on_all_nodes_see_the_parameters_of_their_step(training: Training) -> None:
    for _ in range(10):
        training.round()


def test_a_keeper_may_die_before_or_while_it_writes(training: Training) -> None:
    training.round()

    def kill() -> None:
        os.kill(ray.get(training.keeper(1).pid.remote()), signal.SIGKILL)

    for _ in range(3):
        training.round(before_publish=kill)
        training.round()


@pytest.mark.parametrize("unanswered", [0.5, 0.0001], ids=["small", "large"])
def test_a_node_that_joins_has_everything_before_the_next_round(
    training: Training, unanswered: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds wait for its worker, which waits for the arrays; nobody publishes meanwhile.

    Large arrays take longer than the first answer is waited for.
    """
    monkeypatch.setattr(_waits, "_UNANSWERED", unanswered)
    for _ in range(3):
        training.round()
    late = training.nodes.add()
    training.work(late)
    for _ in range(3):
        training.round()
    worker = training.workers.pop()
    worker.kill()
    worker.wait()
    training.nodes.remove(late)
    with training.group.round(3, timeout=60) as taken:
        for copy in (0, 1):
            training.arrays[f"copy {copy}"][...] = taken.step + 1
        training.arrays.publish()  # without the node that is dead


def test_a_publish_ends_by_its_timeout_while_a_keeper_is_stopped(
    training: Training,
) -> None:
    training.round()
    pid = ray.get(training.keeper(2).pid.remote())
    with stopped(pid):
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=f"on node {training.nodes.id(2)}"):
            training.arrays.publish({"copy 0": [1]}, timeout=1.5)
        assert time.monotonic() - began < 10
        with (  # the same in a block, where the owner is asked who is lost
            pytest.raises(DeadlineExceededError, match=f"keeper .* on node {training.nodes.id(2)}"),
            training.group.round(3, timeout=60),
        ):
            training.arrays.publish({"copy 0": [1]}, timeout=1.5)
    for _ in range(3):
        training.round()


def test_a_frozen_node_delays_a_publish_by_its_lease_and_sees_no_step_before_its_arrays(
    training: Training,
) -> None:
    for _ in range(3):
        training.round()
    gone = training.nodes.id(2)
    with training.nodes.frozen(2):
        for _ in range(2):  # in the second round it is known to be lost
            with training.group.round(2, timeout=60) as taken:
                new = taken.step + 1
                training.arrays[f"copy {new % 2}"][new % ROWS] = new
                training.arrays.publish({f"copy {new % 2}": [new % ROWS]})
        assert gone in living_nodes(None), "Ray has not seen it yet"
        assert not training.group.hosts()[gone].alive
    for _ in range(3):  # with its worker, which sees what goes with the step
        training.round()


def test_another_chief_goes_on_and_the_first_one_is_refused(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.round()
    values = {name: array.copy() for name, array in training.arrays.items()}
    with shmacc.ray.PublishedArrays(CONTENTS, "values.arrays") as other:
        for name, array in values.items():
            assert np.array_equal(other[name], array)
        other.publish()
        with pytest.raises(FailedPreconditionError, match="Another chief"):
            training.arrays.publish({"copy 0": [1]})
        for _ in range(2):  # as in a block with unlink_on_close, and at its end
            training.arrays.unlink()
            assert "not removed" in caplog.text
            caplog.clear()
        for node in range(3):
            with training.nodes.on(node):
                shmacc.SharedArrays.attach("values.arrays").close()
    training.arrays.close()
    training.arrays = shmacc.ray.PublishedArrays(CONTENTS, "values.arrays")


_CHIEF = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray, shmacc.ray
import numpy as np
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.3", log_to_driver=False)
contents = {f"copy {copy}": np.zeros((50, 3)) for copy in (0, 1)} | {"fixed": np.arange(5)}
with shmacc.ray.PublishedArrays(contents, "values.arrays") as arrays:
    group = shmacc.ray.AccumulatorGroup.attach("values")
    for _ in range(3):
        with group.round(3, timeout=60) as taken:
            new = taken.step + 1
            assert taken["seen"].value.tolist() == [3 * taken.step, 3 * taken.step, 30]
            arrays[f"copy {new % 2}"][new % 50] = new
            arrays.publish({f"copy {new % 2}": [new % 50]})
"""


def test_a_chief_on_another_node_goes_on(training: Training) -> None:
    began = training.group.global_step
    training.round()
    command = [sys.executable, "-P", "-c", _CHIEF, training.nodes.cluster.address]
    environment = training.nodes.environment(1)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert training.group.global_step == began + 4
    with pytest.raises(FailedPreconditionError, match="Another chief"):
        training.arrays.publish({"copy 0": [1]})
    training.arrays.close()
    training.arrays = shmacc.ray.PublishedArrays(CONTENTS, "values.arrays")
    for _ in range(3):
        training.round()


def test_a_node_that_missed_a_publish_gets_the_next(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the owner would keep steps from it for ever."""
    monkeypatch.setattr(shmacc.ray.PublishedArrays, "_feed", lambda _: None)
    contents = {"a": np.zeros(3)}
    with shmacc.ray.PublishedArrays(contents, "late.arrays", unlink_on_close=True) as arrays:
        late = nodes.add()
        try:
            wait_for(lambda: nodes.id(late) in living_nodes(None))
            with contextlib.suppress(DeadlineExceededError):  # its keeper takes longer to start
                arrays.publish({}, timeout=0)
            arrays.publish({})
            assert nodes.id(late) in arrays._fed
        finally:
            nodes.remove(late)


@pytest.fixture
def without_keeper(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> Iterator[shmacc.ray.PublishedArrays]:
    """Arrays without their keeper on node 1. No thread sends arrays to nodes."""
    monkeypatch.setattr(shmacc.ray.PublishedArrays, "_feed", lambda _: None)
    contents = {"a": np.zeros(3)}
    with shmacc.ray.PublishedArrays(contents, "bare.arrays", unlink_on_close=True) as arrays:
        node = nodes.id(1)
        ray.kill(arrays._keepers.pop(node))
        wait_for(lambda: find_actor(f"bare.arrays/keeper {node}") is None)
        yield arrays


def test_arrays_are_sent_again_if_the_object_store_was_full(
    nodes: Nodes, without_keeper: shmacc.ray.PublishedArrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper obeys nobody yet: `publish` took it for another chief's."""
    with monkeypatch.context() as patch, pytest.raises(ray.exceptions.ObjectStoreFullError):
        patch.setattr(ray, "put", Mock(side_effect=ray.exceptions.ObjectStoreFullError))
        without_keeper._give(nodes.id(1), time.monotonic() + 60)
    without_keeper.publish()


def test_a_node_that_refused_once_refuses_again(
    nodes: Nodes, without_keeper: shmacc.ray.PublishedArrays
) -> None:
    """Its keeper obeys nobody, though no other chief publishes."""
    node = nodes.id(1)
    with nodes.on(1):
        with shmacc.SharedArrays.attach("bare.arrays") as earlier:
            earlier.unlink()
        other = shmacc.SharedArrays({"b": np.zeros(3)}, "bare.arrays", unlink_on_close=True)
    without_keeper._give(node, time.monotonic() + 60)  # its error is not waited for
    with pytest.raises(InvalidArgumentError, match=f"Node {node} cannot have"):
        without_keeper.publish()
    other.close()
    without_keeper.publish()


def test_a_publish_during_an_unlink_makes_nothing_again(nodes: Nodes) -> None:
    arrays = shmacc.ray.PublishedArrays({"a": np.zeros(3)}, "gone.arrays", unlink_on_close=True)

    class Rows:
        def __array__(self, *_: object, **__: object) -> Any:
            arrays.unlink()
            return np.arange(3)

    with arrays, pytest.raises(FailedPreconditionError, match="were removed"):
        arrays.publish({"a": Rows()})
    assert not [name for name in nodes.left() if "gone.arrays" in name]


def test_unlink_ends_the_keeper_of_a_node_that_nobody_waited_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shmacc.ray.PublishedArrays, "_feed", lambda _: None)
    with shmacc.ray.PublishedArrays({"a": np.zeros(3)}, "slow.arrays") as arrays:
        node = nodes.id(1)
        del arrays._keepers[node]  # as if it had joined now
        monkeypatch.setattr(arrays, "_answers_in_time", lambda *_: False)
        arrays._feed_new()
        assert node not in arrays._keepers
        arrays.unlink()
        wait_for(lambda: find_actor(f"slow.arrays/keeper {node}") is None)
    assert not [name for name in nodes.left() if "slow.arrays" in name]


@pytest.mark.parametrize("refuses", [True, False], ids=["a node refuses", "another chief"])
def test_sending_to_a_node_ends_only_for_another_chief(
    monkeypatch: pytest.MonkeyPatch, *, refuses: bool
) -> None:
    """A node whose arrays are in use, and so cannot be replaced, stops no other node."""
    monkeypatch.setattr(_published, "_LOOK_FOR_NODES", 0.001)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    stop, calls = threading.Event(), []

    class Feeder:
        def feed(self) -> None:
            calls.append(self)
            if len(calls) == 2:
                stop.set()
            cause = FailedPreconditionError("a process has them") if refuses else None
            raise FailedPreconditionError("it has none") from cause

    feeder = Feeder()
    _published._keep_feeding(weakref.WeakMethod(feeder.feed), "a", stop)
    assert len(calls) == 1 + refuses


def test_bad_arguments_are_refused(training: Training) -> None:
    with pytest.raises(InvalidArgumentError, match="no array 'copies'"):
        training.arrays.publish({"copies": None})
    with pytest.raises(IndexError):
        training.arrays.publish({"copy 0": [ROWS]})
    with pytest.raises(InvalidArgumentError, match="'fixed'"):
        shmacc.ray.PublishedArrays({**CONTENTS, "fixed": np.arange(6)}, "values.arrays")
    with pytest.raises(InvalidArgumentError, match="shared_name"):
        shmacc.ray.PublishedArrays(CONTENTS, "")
    training.arrays.publish({"copy 0": []})
