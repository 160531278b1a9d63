"""A constructor that raises has changed nothing that others have, on any node."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
from on_ray.nodes import Nodes, wait_for

import shmacc
import shmacc.ray
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from shmacc.ray import _finding
from shmacc.ray._parts import find_actor

CONTENTS: dict[str, Any] = {"w": np.zeros(4), "t": shmacc.TableSpec((2,))}
SGD = shmacc.optim.SGD(1.0)


def _round(nodes: Nodes, group: Any, params: shmacc.ray.Parameters, node: int) -> None:
    """Make a round of one gradient that is applied on this node."""
    with nodes.on(node), shmacc.AccumulatorGroup.attach(group.shared_name, timeout=60) as there:
        step = there.wait_step(group.global_step - 1, timeout=60)
        assert there.apply({"w": np.ones(4)}, step)
    with group.round(1, timeout=60) as taken:
        params.update(taken)


@pytest.mark.parametrize("attached", ["copy", "segment"])
def test_replace_is_refused_while_a_process_of_any_node_has_the_segment_attached(
    nodes: Nodes, attached: str
) -> None:
    """A worker of another node has attached the copy or the group's segment; both stay."""
    made = shmacc.ray.Parameters(CONTENTS, "kept", optimizer=SGD)
    group = shmacc.ray.AccumulatorGroup(made.member_specs(), "kept.g")
    _round(nodes, group, made, 1)
    before, left = made.state(), sorted(nodes.left())
    made.close()
    kind: Any = shmacc.Parameters if attached == "copy" else shmacc.AccumulatorGroup
    with nodes.on(1):
        worker = kind.attach("kept" if attached == "copy" else "kept.g", timeout=60)
    says = rf"Node {nodes.shown(1)}.*in use.*pid"
    with worker, pytest.raises(FailedPreconditionError, match=says):
        shmacc.ray.Parameters(CONTENTS, "kept", optimizer=SGD, if_exists="replace")
    with pytest.raises(InvalidArgumentError):  # arguments are checked before anything is removed
        shmacc.ray.Parameters({"w": "x"}, "kept", optimizer=SGD, if_exists="replace")
    assert sorted(nodes.left()) == left
    params = shmacc.ray.Parameters(CONTENTS, "kept", optimizer=SGD)
    if attached == "segment":
        with nodes.on(1):
            worker = kind.attach("kept.g")
        for hosts in None, [nodes.id(0)]:  # even if the new group leaves out that node
            with pytest.raises(FailedPreconditionError, match=says):
                shmacc.ray.AccumulatorGroup(
                    params.member_specs(), "kept.g", if_exists="replace", hosts=hosts
                )
        worker.close()
    after = params.state()
    assert all(np.array_equal(after[key], before[key]) for key in before)
    _round(nodes, group, params, 1)
    assert params.step == group.global_step == 2
    group.unlink()
    params.unlink()
    params.close()


@pytest.mark.parametrize("replaced", ["group", "parameters"])
def test_replace_is_refused_while_a_chief_waits(nodes: Nodes, replaced: str) -> None:
    params = shmacc.ray.Parameters(CONTENTS, "waited.p", optimizer=SGD)
    members: Any = params.member_specs()
    with shmacc.ray.AccumulatorGroup(members, "waited", unlink_on_close=True) as group:
        taken: list[Any] = []
        chief = threading.Thread(target=lambda: taken.append(group.take(1, timeout=60)))
        chief.start()
        owner = group._link._owner
        wait_for(lambda: ray.get(owner.do.remote("chiefs")) == 1)
        if replaced == "parameters":
            params.close()
        with pytest.raises(FailedPreconditionError, match="1 chiefs wait for a round"):
            if replaced == "group":
                shmacc.ray.AccumulatorGroup(members, "waited", if_exists="replace")
            else:
                shmacc.ray.Parameters(CONTENTS, "waited.p", optimizer=SGD, if_exists="replace")
        with nodes.on(2), shmacc.AccumulatorGroup.attach("waited", timeout=60) as worker:
            assert worker.apply({"w": np.ones(4)}, 0)
        chief.join()
        assert taken[0].count == 1
    params.unlink()
    params.close()


@pytest.mark.parametrize("with_parameters", [False, True])
def test_a_group_that_one_node_refuses_leaves_every_node_as_it_was(
    nodes: Nodes, *, with_parameters: bool
) -> None:
    """Node 1 has a segment that fits, with a gradient; node 2 one of another shape."""
    spec = shmacc.TensorSpec((4,), "float64")
    params = None
    members: Any = {"w": spec}
    if with_parameters:
        params = shmacc.ray.Parameters({"w": np.zeros(4)}, "undone.p", optimizer=SGD)
        members = params.member_specs()
    with nodes.on(1):
        fits = shmacc.AccumulatorGroup({"w": spec}, "undone")
    assert fits.apply({"w": np.ones(4)}, 0)
    with nodes.on(2):
        differs = shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((5,), "float64")}, "undone")
    left = sorted(nodes.left())
    with pytest.raises(FailedPreconditionError, match=rf"Node {nodes.shown(2)}.*member .w. \[5\]"):
        shmacc.ray.AccumulatorGroup(members, "undone")
    assert sorted(nodes.left()) == left
    assert find_actor("undone/owner") is None
    assert (fits.num_accumulated(), fits.global_step, fits.running) == (1, 0, True)
    with pytest.raises(NotFoundError):
        shmacc.ray.AccumulatorGroup.attach("undone")
    for group in fits, differs:
        group.unlink()
        group.close()
    if params is not None:
        params.unlink()
        params.close()


def test_of_two_groups_made_at_once_of_the_same_parameters_at_most_one_is_made(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look for a group of these parameters before either is made."""
    look, looks, both = _finding.groups_of, iter(range(9)), threading.Barrier(2)

    def groups_of(name: str, until: float) -> Any:
        found = look(name, until)
        if next(looks) < 2:
            both.wait(60)
        return found

    monkeypatch.setattr("shmacc.ray._making.groups_of", groups_of)
    with shmacc.ray.Parameters(CONTENTS, "at_once", optimizer=SGD, unlink_on_close=True) as params:
        with ThreadPoolExecutor(2) as pool:
            kind = shmacc.ray.AccumulatorGroup
            calls = [pool.submit(kind, params.member_specs(), f"at_once.{n}") for n in range(2)]
            made = [call.result() for call in calls if call.exception() is None]
        assert len(made) < 2
        for call in calls:
            if call.exception() is not None:
                with pytest.raises(FailedPreconditionError, match="belong to the group 'at_once"):
                    call.result()
        for group in made:
            group.unlink()
    assert not [each for each in nodes.left() if "at_once" in each]


def test_a_one_host_class_with_a_many_hosts_class_is_refused_with_the_right_name(
    nodes: Nodes,  # noqa: ARG001
) -> None:
    with shmacc.ray.Parameters(CONTENTS, "half", optimizer=SGD) as params:
        with pytest.raises(InvalidArgumentError, match=r"shmacc\.ray\.AccumulatorGroup"):
            shmacc.AccumulatorGroup(params.member_specs(), "half.g")
        with pytest.raises(InvalidArgumentError, match="exists with") as caught:
            shmacc.ray.Parameters({"w": np.zeros(5)}, "half", optimizer=SGD)
        assert "shmacc-inspect" not in str(caught.value), "refused while the node's actor has it"
        params.unlink()
    with (
        shmacc.Parameters(CONTENTS, "half", optimizer=SGD, unlink_on_close=True) as local,
        pytest.raises(InvalidArgumentError, match=r"shmacc\.ray\.Parameters"),
    ):
        shmacc.ray.AccumulatorGroup(local.member_specs(), "half.g")


def test_a_take_returns_fewer_gradients_at_its_timeout_if_at_least_allows_it(nodes: Nodes) -> None:
    members = {"m": shmacc.TensorSpec((3,), "float32")}
    with shmacc.ray.AccumulatorGroup(members, "fewer", unlink_on_close=True) as group:
        with nodes.on(2), shmacc.AccumulatorGroup.attach("fewer", timeout=60) as worker:
            assert worker.apply({"m": np.ones(3)}, 0)
        wait_for(lambda: group.num_accumulated() == 1)
        with pytest.raises(DeadlineExceededError, match="1 of the 3 required"):
            group.take(3, at_least=2, timeout=0.2)
        assert group.take(3, at_least=1, timeout=0.2).count == 1


def test_a_restore_that_times_out_before_it_is_sent_says_that_the_timeout_was_too_short(
    nodes: Nodes,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = ray.put

    def slow(value: Any) -> Any:
        time.sleep(1.5)
        return put(value)

    with (
        shmacc.ray.Parameters(CONTENTS, "short", optimizer=SGD, unlink_on_close=True) as params,
        shmacc.ray.AccumulatorGroup(params.member_specs(), "short.g", unlink_on_close=True),
    ):
        monkeypatch.setattr(ray, "put", slow)
        with pytest.raises(DeadlineExceededError, match="too short"):
            params.restore(params.state(), timeout=0.2)
        monkeypatch.undo()
        assert params.step == 0


def test_a_constructor_that_is_interrupted_while_it_makes_the_owner_leaves_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C most likely comes then, since that takes longest."""
    make, first = _finding.make_owner, iter([True])

    def make_owner(*args: Any) -> Any:
        made = make(*args)
        if next(first, False):
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr("shmacc.ray._link.make_owner", make_owner)
    with pytest.raises(KeyboardInterrupt):
        shmacc.ray.AccumulatorGroup({"m": shmacc.TensorSpec((2,))}, "halfway")
    wait_for(lambda: not [name for name in nodes.left() if "halfway" in name], 20)
    wait_for(lambda: not find_actor("halfway/owner"))
    shmacc.ray.AccumulatorGroup({"m": shmacc.TensorSpec((2,))}, "halfway").unlink()
