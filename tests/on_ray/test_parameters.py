"""Parameters over hosts: every node's copy has the same bits, whatever dies."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.support import stopped
from on_ray.nodes import Nodes, kill, pid_of, wait_for
from on_ray.replicated import CONTENTS, OPTIMIZERS, TIMING, Replicated

import shmacc
import shmacc.ray


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
    training.move((2, 5), 0)  # workers of that node: the others apply for them
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
    """Its memory has a copy of an earlier step; its workers see no later step with that."""
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


@contextlib.contextmanager
def _made(name: str) -> Iterator[tuple[shmacc.ray.Parameters, shmacc.ray.AccumulatorGroup]]:
    """Make parameters, and a group of theirs with this name, until the end of the block."""
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
        _apply(nodes, 2, 2)  # stale after the restore
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
        ]
        for call in calls:  # each finds a new owner, which learns the step first
            kill("kept/owner")
            assert call() == 3


def _apply(nodes: Nodes, node: int, step: int, name: str = "kept") -> bool:
    from on_ray.replicated import gradient

    with nodes.on(node), shmacc.AccumulatorGroup.attach(name, timeout=60) as group:
        group.wait_step(step - 1, timeout=60)
        return bool(group.apply(gradient(node), step, contributor=node))


def test_what_one_node_refuses_changes_nothing(nodes: Nodes) -> None:
    """A table's limit is the same everywhere; the round stays open for another update."""
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
        with nodes.on(1), shmacc.Parameters.attach("limited.params") as copy:
            copy.restore(copy.state())  # by a worker: nobody knows what is in it now
        for error in shmacc.errors.FailedPreconditionError, None:
            with nodes.on(1), shmacc.AccumulatorGroup.attach("limited", timeout=60) as there:
                step = there.wait_step(group.global_step - 1, timeout=60)
                assert there.apply({"table": ([1], np.ones((1, 2), np.float32))}, step)
            with (
                contextlib.nullcontext() if error is None else pytest.raises(error, match="Node"),
                group.round(1, timeout=60) as taken,
            ):
                params.update(taken)
            wait_for(lambda: len({_bytes_on(nodes, node) for node in range(3)}) == 1)
            wait_for(lambda: _is_in_line(group))


def _bytes_on(nodes: Nodes, node: int) -> bytes:
    with nodes.on(node), shmacc.Parameters.attach("limited.params") as copy:
        return bytes(copy["table"][[1, 2]].tobytes())


def _is_in_line(group: shmacc.ray.AccumulatorGroup) -> bool:
    """Whether all nodes are at the group's step: after a void one they have other copies."""
    return {host.step for host in group.hosts().values()} == {group.global_step}


def test_a_second_group_and_powers_that_differ_are_refused(nodes: Nodes) -> None:  # noqa: ARG001
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
    """The chief's own node: others make the update. The owner: a restore is not made later."""
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
        assert _apply(nodes, 1, group.global_step, "slow")  # it is after the restore in the queue
        with group.round(1, timeout=60) as taken:
            params.update(taken)
        assert params.step == group.global_step == 2


def test_parameters_belong_to_one_group_and_both_begin_anew(nodes: Nodes) -> None:
    """After a chief that died without removing anything, ``replace`` works while actors live."""
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
    params.restore(params.state(), timeout=60)  # by the group that is still open
    group.unlink()
    params.unlink()
    params.close()


def test_a_group_of_parameters_whose_name_was_removed_is_refused(
    nodes: Nodes,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its actors would change those that nobody can attach to any more."""
    monkeypatch.setattr("shmacc.ray._making._OWN", 2.0)
    with shmacc.ray.Parameters(CONTENTS, "gone.params", optimizer=OPTIMIZERS) as params:
        group = shmacc.ray.AccumulatorGroup(params.member_specs(), "gone", timing=TIMING)
        params.unlink()
    with (
        shmacc.ray.Parameters(
            CONTENTS, "gone.params", optimizer=OPTIMIZERS, unlink_on_close=True
        ) as params,
        pytest.raises(shmacc.errors.FailedPreconditionError, match="remove the group, too"),
    ):
        shmacc.ray.AccumulatorGroup(params.member_specs(), "gone", timing=TIMING)
    group.unlink()
