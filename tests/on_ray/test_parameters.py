"""Parameters over hosts: every node's copy has the same bits, whichever part dies."""

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.support import stopped
from on_ray.nodes import Nodes, kill, pid_of, wait_for
from on_ray.replicated import CONTENTS, OPTIMIZERS, TIMING, Replicated, gradient

import shmacc
import shmacc.ray
from shmacc import Parameters as LocalParameters


@pytest.fixture
def training(nodes: Nodes, tmp_path: Path) -> Iterator[Replicated]:
    made = Replicated(nodes, f"line{os.getpid()}x{random.randrange(10**6)}", tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_three_nodes_train_as_one_host(training: Replicated) -> None:
    training.start_workers()
    training.train_until(20)
    assert training.check() == 20
    assert [training.step_on(node) for node in range(3)] == [20, 20, 20]


@pytest.mark.parametrize("part", ["chief", "owner", "host 0", "host 1", "host 2"])
def test_a_part_that_is_killed_again_and_again_costs_no_update(
    training: Replicated, part: str
) -> None:
    training.start_workers()
    rng = random.Random(7)
    training.start_chief(40)
    killed = 0
    while training.step_on(0) < 40 and killed < 6:
        before = training.step_on(0)
        wait_for(lambda last=before: training.step_on(0) > last or _ended(training), 120)
        time.sleep(rng.uniform(0, 0.2))
        if part == "chief":
            assert training.chief is not None
            training.chief.kill()
            training.chief.wait()
            training.start_chief(40)
        else:
            kind, _, node = part.partition(" ")
            name = kind if kind == "owner" else f"host {training.nodes.id(int(node))}"
            pid = pid_of(f"{training.name}/{name}")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        killed += 1
        if _ended(training):
            training.start_chief(40)
    training.train_until(40)
    training.check()


def _ended(training: Replicated) -> bool:
    return training.chief is not None and training.chief.poll() is not None


def test_a_node_that_is_silent_gets_the_copy_of_another_one(training: Replicated) -> None:
    training.start_workers()
    training.start_chief(10**6)
    wait_for(lambda: training.step_on(0) >= 3)
    pid = pid_of(f"{training.name}/host {training.nodes.id(2)}")
    assert pid is not None
    training.move((2, 5), 0)  # the workers of node 2 go on at another node
    with stopped(pid):
        before = training.step_on(0)
        wait_for(lambda: training.step_on(0) >= before + 3, 60)
        assert training.step_on(2) <= before + 1
    wait_for(lambda: training.step_on(2) > before + 3, 60)
    assert training.chief is not None
    training.chief.kill()
    time.sleep(TIMING.chief_lease)
    wait_for(lambda: len({training.step_on(node) for node in range(3)}) == 1)
    training.check()


def test_a_machine_on_which_ray_is_started_again_gets_the_newer_copy(training: Replicated) -> None:
    """The machine has an older copy, and its workers see no later step before a later copy."""
    training.start_workers()
    training.start_chief(10**6)
    wait_for(lambda: training.step_on(0) >= 3)
    training.move((2, 5), 0)
    with (
        training.nodes.on(2),
        shmacc.Parameters.attach(f"{training.name}.params") as copy,
        shmacc.AccumulatorGroup.attach(training.name) as segment,
    ):
        with training.nodes.without_ray(2):
            old = max(copy.step, segment.global_step)
            wait_for(lambda: training.step_on(0) >= old + 3, 60)
        segment.wait_step(old, timeout=60)
        assert copy.step >= old + 3, "it sees a step before the parameters"
    training.move((2, 5), 2)
    assert training.chief is not None
    training.chief.kill()
    training.train_until(training.step_on(0) + 5)
    training.check()


def test_a_node_that_has_missed_two_updates_makes_them_and_gets_no_copy(nodes: Nodes) -> None:
    name = f"missed{os.getpid()}"
    with _made(name) as (params, group), shmacc.AccumulatorGroup.attach(name) as segment:

        def make_round() -> None:
            step = segment.wait_step(params.step - 1, timeout=30)
            assert segment.apply(gradient(0), step, contributor=0)
            with group.round(1, timeout=30) as taken:
                params.update(taken, timeout=30)

        make_round()
        pid = pid_of(f"{name}/host {nodes.id(2)}")
        assert pid is not None
        with stopped(pid):
            make_round()
            make_round()
        with (
            nodes.on(2),
            shmacc.Parameters.attach(f"{name}.params") as copy,
            shmacc.SharedArrays.attach(f"{name}.forwarder") as counters,
        ):
            wait_for(lambda: counters["followed"] == 2)
            assert (copy.step, int(counters["copied"])) == (3, 0)
            theirs = copy.snapshot()[1]
        for array in "dense", "sparse":
            np.testing.assert_array_equal(theirs[array], params[array])


@contextlib.contextmanager
def _made(name: str) -> Iterator[tuple[shmacc.ray.Parameters, shmacc.ray.AccumulatorGroup]]:
    """Make parameters and their group, with this name, for the length of the block."""
    with (
        shmacc.ray.Parameters(
            CONTENTS, f"{name}.params", optimizer=OPTIMIZERS, unlink_on_close=True
        ) as params,
        shmacc.ray.AccumulatorGroup(
            params.member_specs(sparse=["sparse"]), name, timing=TIMING, unlink_on_close=True
        ) as group,
    ):
        yield params, group


def test_a_restore_reaches_all_nodes_at_a_higher_step(nodes: Nodes, tmp_path: Path) -> None:
    with _made("kept") as (params, group):
        _apply(nodes, 0, 0)
        with group.round(1, timeout=60) as taken:
            params.update(taken)
        early: dict[str, Any] = params.state()
        np.savez(tmp_path / "early.npz", **early)
        shmacc.save(tmp_path / "other.npz", {"kept": params})
        _apply(nodes, 1, 1)
        with group.round(1, timeout=60) as taken:
            params.update(taken)
            with pytest.raises(shmacc.errors.FailedPreconditionError, match="outside of a round"):
                params.restore(early)
        _apply(nodes, 2, 2)  # dropped by the restore, which moves on to step 3
        with pytest.raises(shmacc.errors.FailedPreconditionError, match="this host only"):
            shmacc.load(tmp_path / "other.npz", {"kept": params})
        params.restore(dict(np.load(tmp_path / "early.npz")), timeout=60)
        assert group.global_step == params.step == 3
        wait_for(lambda: group.num_accumulated() == 0)
        for node in range(3):
            with nodes.on(node), shmacc.Parameters.attach("kept.params") as copy:
                own = copy.state()
                assert own["step"] == 3
                for key in early.keys() - {"step"}:
                    np.testing.assert_array_equal(own[key], early[key])
            assert not _apply(nodes, node, 2)
        calls: list[Callable[[], Any]] = [
            lambda: group.global_step,
            lambda: next(group.steps(timeout=60)),
            lambda: group.wait_step(2, timeout=60),
            lambda: group.snapshot().step,
            lambda: len(group.stats()),  # of all three nodes
            lambda: group.advance_step(3) + 3,
        ]
        for call in calls:  # each finds a new owner, which learns the step first
            kill("kept/owner")
            assert call() == 3


def _apply(nodes: Nodes, node: int, step: int, name: str = "kept") -> bool:
    from on_ray.replicated import gradient

    with nodes.on(node), shmacc.AccumulatorGroup.attach(name, timeout=60) as group:
        group.wait_step(step - 1, timeout=60)
        return bool(group.apply(gradient(node), step, contributor=node))


def test_an_update_that_a_node_refuses_changes_no_copy(nodes: Nodes) -> None:
    """All nodes' tables have the limit that it exceeds. The round stays open for a new update."""
    contents = {"table": shmacc.TableSpec((2,), max_rows=3)}
    with (
        shmacc.ray.Parameters(
            contents,
            "limited.params",
            optimizer=shmacc.optim.SGD(1.0),
            unlink_on_close=True,
        ) as params,
        shmacc.ray.AccumulatorGroup(
            params.member_specs(), "limited", timing=TIMING, unlink_on_close=True
        ) as group,
    ):
        with nodes.on(1), shmacc.AccumulatorGroup.attach("limited", timeout=60) as there:
            assert there.apply({"table": ([1, 2, 3, 4], np.ones((4, 2), np.float32))}, 0)
        with group.round(1, timeout=60) as taken:
            with pytest.raises(shmacc.errors.ResourceExhaustedError, match="max_rows is 3"):
                params.update(taken)
            assert params.step == 0
            assert len(params["table"]) == 0
            half: Any = {"table": ([1, 2], np.ones((2, 2), np.float32))}
            assert params.update({}, gradients=half)
            with pytest.raises(shmacc.errors.FailedPreconditionError, match="already"):
                params.update({}, gradients=half)
        assert params.step == group.global_step == 1
        for node in range(3):
            with nodes.on(node), shmacc.Parameters.attach("limited.params") as copy:
                assert copy["table"].ids().tolist() == [1, 2]


def test_after_a_worker_has_restored_a_copy_or_set_a_step_the_chief_goes_on(nodes: Nodes) -> None:
    """Gradients computed from the restored copy or at the other step are in no round."""
    with _made("restored") as (params, group):
        for node in 1, 0:
            with nodes.on(1), shmacc.Parameters.attach("restored.params") as copy:
                spoiled: Any = copy.state()
                key = next(key for key in spoiled if spoiled[key].shape == (4, 3))
                spoiled[key] = spoiled[key] + 5
                step = group.global_step
                copy.restore(spoiled)  # the owner does not know what is in it now
                wait_for(lambda before=step: group.global_step > before)  # a void step
            wait_for(lambda: len({_dense_on(nodes, each) for each in range(3)}) == 1)
            step = group.global_step
            assert _apply(nodes, node, step, "restored")
            with group.round(1, timeout=60) as taken:
                params.update(taken)
            assert params.step == step + 1
        with nodes.on(1), shmacc.AccumulatorGroup.attach("restored") as there:
            assert _apply(nodes, 1, step + 1, "restored")
            with group.round(1, timeout=60) as taken:
                there.set_global_step(step + 5)  # so the segment keeps the round's gradients
                params.update(taken)
            wait_for(lambda: group.global_step > step + 5)
            assert group.num_accumulated() == 0


def _dense_on(nodes: Nodes, node: int) -> bytes:
    with nodes.on(node), shmacc.Parameters.attach("restored.params") as copy:
        return bytes(copy["dense"].tobytes())


def _trained(nodes: Nodes, node: int, steps: int) -> None:
    with (
        nodes.on(node),
        shmacc.Parameters({"w": np.zeros(3)}, "best", optimizer=shmacc.optim.SGD(1.0)) as params,
        shmacc.AccumulatorGroup(params.member_specs()) as group,
    ):
        for step in range(steps):
            assert group.apply({"w": np.ones(3)}, step)
            with group.round(1) as taken:
                params.update(taken)


@pytest.mark.parametrize("own", [0, 3])
def test_a_group_goes_on_with_the_furthest_copy_of_all_nodes(
    nodes: Nodes, own: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier runs on one host have trained copies on two nodes, and perhaps on the chief's."""
    for node, steps in (0, own), (1, 2), (2, 5):
        _trained(nodes, node, steps)
    given: Any = {"w": np.zeros(3)}, "best"
    sgd: Any = {"optimizer": shmacc.optim.SGD(1.0)}
    with (
        shmacc.ray.Parameters(*given, **sgd) as params,
        shmacc.ray.AccumulatorGroup(params.member_specs(), "best.g") as group,
    ):
        assert (params.step, group.global_step) == (5, 5)
        for node in range(3):
            with nodes.on(node), shmacc.Parameters.attach("best") as copy:
                assert copy["w"].tolist() == [-5, -5, -5]
        group.unlink()
    assert re.search(f"the copy of node {nodes.shown(2)}, at step 5", caplog.text)
    assert "at step 2" in caplog.text
    assert ("at step 3" in caplog.text) == (own == 3)
    with shmacc.Parameters.attach("best") as mine:
        mine.unlink()
    with (
        shmacc.ray.Parameters(*given, **sgd, if_exists="error") as params,
        pytest.raises(shmacc.errors.AlreadyExistsError, match="at step 5"),
    ):
        shmacc.ray.AccumulatorGroup(params.member_specs(), "best.g")
    with shmacc.ray.Parameters(*given, **sgd, if_exists="replace", unlink_on_close=True) as params:
        assert not [name for name in nodes.left() if name.endswith(("n1:best", "n2:best"))]
        with shmacc.ray.AccumulatorGroup(
            params.member_specs(), "best.g", unlink_on_close=True
        ) as group:
            assert (params.step, group.global_step) == (0, 0)


def test_ftrls_power_and_hosts_without_the_chiefs_node_are_refused(nodes: Nodes) -> None:  # noqa: ARG001
    with pytest.raises(shmacc.errors.InvalidArgumentError, match="learning_rate_power"):
        shmacc.ray.Parameters(
            {"a": np.zeros(3, np.float32)},
            "ftrl",
            optimizer=shmacc.optim.Ftrl(0.5, learning_rate_power=-0.4),
        )
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    with shmacc.ray.Parameters({"a": np.zeros(3, np.float32)}, "away") as params:
        with pytest.raises(shmacc.errors.InvalidArgumentError, match="chief's own node"):
            shmacc.ray.AccumulatorGroup(params.member_specs(), "away.group", hosts=others)
        params.unlink()


def test_changes_end_by_their_timeout_while_a_part_is_stopped(nodes: Nodes) -> None:
    """The other nodes make the update. A restore that a stopped owner gets late is not made."""
    with _made("slow") as (params, group):
        own, owner = pid_of(f"slow/host {nodes.id(0)}"), pid_of("slow/owner")
        assert own is not None
        assert owner is not None
        assert _apply(nodes, 1, 0, "slow")
        with (
            pytest.raises(shmacc.errors.DeadlineExceededError, match="stopped, or cut off"),
            group.round(1, timeout=60) as taken,
            stopped(own),
        ):
            params.update(taken, timeout=2 * TIMING.lease)
        assert group.wait_step(0, timeout=60) == 1
        wait_for(lambda: params.step == 1)
        with stopped(owner), pytest.raises(shmacc.errors.DeadlineExceededError, match="owner"):
            params.restore(params.state(), timeout=0.5)
        assert _apply(nodes, 1, group.global_step, "slow")  # the owner gets the restore first
        with group.round(1, timeout=60) as taken:
            params.update(taken)
        assert params.step == group.global_step == 2


def test_parameters_belong_to_one_group_and_replace_begins_both_anew(nodes: Nodes) -> None:
    """``replace`` works even while actors of a dead chief are alive."""
    given: Any = {"optimizer": OPTIMIZERS}
    for first in True, False:
        params = shmacc.ray.Parameters(CONTENTS, "anew.params", **given, if_exists="replace")
        group = shmacc.ray.AccumulatorGroup(
            params.member_specs(), "anew", if_exists="replace", timing=TIMING
        )
        assert params.step == group.global_step == 0
        if first:
            with nodes.on(1), shmacc.AccumulatorGroup.attach("anew", timeout=60) as there:
                assert there.apply({"dense": np.ones((4, 3), np.float32)}, 0)
            with group.round(1, timeout=60) as taken:
                params.update(taken)
            params.close()
            group.close()
    with pytest.raises(shmacc.errors.FailedPreconditionError, match="the group 'anew' already"):
        shmacc.ray.AccumulatorGroup(params.member_specs(), "another")
    shmacc.ray.AccumulatorGroup.attach("anew").close()
    params.restore(params.state(), timeout=60)  # through the group that this process has open
    group.unlink()
    params.unlink()
    params.close()


def test_a_copys_name_that_is_removed_is_made_again_once_nobody_has_the_copy(
    nodes: Nodes,
) -> None:
    """While a process has it attached, the node reports a problem: the name leads to no copy."""
    with _made("gone") as (params, group):
        there = nodes.id(1)
        with nodes.on(1):
            worker = shmacc.Parameters.attach("gone.params")
            worker.unlink()
        wait_for(lambda: "was removed" in (group.hosts()[there].problem or ""))
        assert _apply(nodes, 1, 0, "gone")
        with group.round(1, timeout=60) as taken:
            params.update(taken)
        assert worker.step == 1
        worker.close()
        with nodes.on(1), shmacc.Parameters.attach("gone.params", timeout=60) as copy:
            wait_for(lambda: group.hosts()[there].problem is None)
            assert _apply(nodes, 1, 1, "gone")
            with group.round(1, timeout=60) as taken:
                params.update(taken)
            assert copy.step == 2
            assert copy["dense"].tolist() == params["dense"].tolist()
        with shmacc.ray.Parameters(CONTENTS, "gone.params", optimizer=OPTIMIZERS) as other:
            LocalParameters.unlink(other)
    # The actor of the chief's node still has the unlinked copy. New parameters do not match it.
    made = shmacc.ray.Parameters(CONTENTS, "gone.params", optimizer=OPTIMIZERS)
    group = shmacc.ray.AccumulatorGroup(made.member_specs(sparse=["sparse"]), "gone", timing=TIMING)
    LocalParameters.unlink(made)
    with (
        shmacc.ray.Parameters(CONTENTS, "gone.params", optimizer=OPTIMIZERS) as params,
        pytest.raises(shmacc.errors.FailedPreconditionError, match="remove the group, too"),
    ):
        shmacc.ray.AccumulatorGroup(params.member_specs(sparse=["sparse"]), "gone", timing=TIMING)
    group.unlink()
    params.unlink()
    made.close()


def test_a_block_goes_on_with_the_next_owner_if_its_owner_dies(nodes: Nodes) -> None:
    with _made("gone_on") as (params, group):
        for step, when in enumerate(("before", "after", "both", "without", "waiting")):
            timer = threading.Timer(1.0, kill, ["gone_on/owner"])
            if when == "waiting":
                timer.start()
                late = threading.Timer(3.0, _apply, [nodes, 1, step, "gone_on"])
                late.start()
            else:
                assert _apply(nodes, 1, step, "gone_on")
            with group.round(1, timeout=60) as taken:
                if when in {"before", "both", "without"}:
                    kill("gone_on/owner")
                if when != "without":
                    params.update(taken, timeout=60)
                if when in {"after", "both"}:
                    kill("gone_on/owner")
            assert group.wait_step(step, timeout=60) == step + 1
            assert params.step == (step + 1 if when != "without" else step)
