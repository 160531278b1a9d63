"""A torch program needs only other names to train over hosts, with the same bits as on one."""

import contextlib
import copy
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from helpers.support import LONG
from on_ray.nodes import Nodes, kill, wait_for
from on_ray.torch_program import (
    STEPS,
    Model,
    TorchTraining,
    Trio,
    block,
    check_same,
    chief,
    compared,
)
from torch import nn

import shmacc.ray
import shmacc.torch
from shmacc import errors, optim
from shmacc.ray._parts import find_actor


@pytest.fixture
def name() -> str:
    return f"torch{os.getpid()}x{random.randrange(10**6)}"


@pytest.fixture
def training(nodes: Nodes, name: str, tmp_path: Path) -> Iterator[TorchTraining]:
    made = TorchTraining(nodes, name, tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_three_nodes_train_as_one_host_to_the_bit_whatever_dies(training: TorchTraining) -> None:
    with Trio(shmacc.torch.SyncReplicas, "alone", lambda _: contextlib.nullcontext()) as alone:
        wanted = alone.train(STEPS)
        state = compared(alone.replicas.state_dict())
    training.start_workers()
    training.start_chief(STEPS)
    wait_for(lambda: training.step_on(0) > 0, 200)
    for part in ("owner", *(f"host {training.nodes.id(number)}" for number in range(3))):
        call = find_actor(f"{training.name}/{part}").__ray_call__  # type: ignore[union-attr]
        assert not ray.get(call.remote(lambda _: "torch" in sys.modules)), "nodes need no torch"
    for number, part in enumerate(("owner", "chief", "host 1", "host 0")):
        wait_for(lambda step=8 * number + 4: training.step_on(0) >= step, 120)
        kind, _, node = part.partition(" ")
        if kind == "chief":
            assert training.chief is not None
            training.chief.kill()
            training.chief.wait()
            training.start_chief(STEPS)
        else:
            kill(f"{training.name}/{f'host {training.nodes.id(int(node))}' if node else kind}")
    training.train_until(STEPS)
    assert training.seen() == [{each} for each in wanted]
    check_same(training.result(), state)
    for worker in training.workers.values():
        assert worker.wait(60) == 0
    assert not [each for each in training.nodes.left() if training.name in each]


def test_a_loaded_checkpoint_reaches_all_nodes_and_earlier_gradients_do_not_count(
    nodes: Nodes, name: str
) -> None:
    with Trio(shmacc.ray.SyncReplicas, name, nodes.on) as trio:
        trio.train(2)
        saved = copy.deepcopy(trio.replicas.state_dict())
        before = trio.train(3)
        trio.hand_over()
        trio.replicas.load_state_dict(saved)
        assert trio.replicas.global_step == 2
        assert not any(replica.step() for _, replica in trio.others)
        assert trio.train(2) == before[:2]
        trio.hand_over()
        with (
            pytest.raises(errors.FailedPreconditionError, match="outside of a round"),
            trio.replicas.round(timeout=LONG),
        ):
            trio.replicas.load_state_dict(saved)
        with trio.replicas.round(timeout=LONG) as update:  # the same gradients again
            block(trio.model, update)
        assert all(replica.step() for _, replica in trio.others)
        assert trio.train(1)


@pytest.mark.parametrize("has", [True, False], ids=["with torch", "without"])
def test_torch_is_imported_only_when_sync_replicas_is_looked_up(*, has: bool) -> None:
    code = "import sys, shmacc.ray; assert 'torch' not in sys.modules; from shmacc.ray import *\n"
    code += "assert 'SyncReplicas' in dir(shmacc.ray)\n"
    code += "" if has else "sys.modules['torch'] = None\n"
    code += "shmacc.ray.SyncReplicas"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == has, done.stderr
    assert has or "shmacc.ray.SyncReplicas needs torch where the chief is" in done.stderr


def names_on(nodes: Nodes, name: str) -> list[str]:
    return sorted(each for each in nodes.left() if name in each)


def test_an_optimizer_of_torch_is_refused_and_nothing_is_left(nodes: Nodes, name: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="Over hosts an optimizer must be given"):
        shmacc.ray.SyncReplicas(nn.Linear(2, 2), name, total_num_replicas=1)
    with pytest.raises(errors.InvalidArgumentError, match="returned None"):
        shmacc.ray.SyncReplicas(
            nn.Linear(2, 2),
            name,
            total_num_replicas=1,
            optimizer=optim.SGD(0.1),
            schedule=lambda _: None,
        )
    assert not names_on(nodes, name)


@pytest.mark.parametrize("number", [0, 1])
def test_a_copy_of_another_shape_is_refused_by_name_and_stays(
    nodes: Nodes, name: str, number: int
) -> None:
    there = f"{name}.params"
    with (
        nodes.on(number),
        shmacc.Parameters(
            {"weight": np.ones((5, 2), np.float32)}, there, optimizer=optim.SGD(0.1)
        ) as other,
    ):
        before = names_on(nodes, name)
        with nodes.on(0):
            kind: type[errors.ShmaccError] = errors.InvalidArgumentError
            if number:
                kind = errors.FailedPreconditionError
            with pytest.raises(kind, match=nodes.shown(1) if number else there):
                shmacc.ray.SyncReplicas(
                    nn.Linear(2, 2, bias=False),
                    name,
                    total_num_replicas=1,
                    optimizer=optim.SGD(0.1),
                )
        assert names_on(nodes, name) == before
        assert (other["weight"] == 1).all()
        other.unlink()


def test_a_second_chief_is_reported_and_ends_with_the_first(
    nodes: Nodes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Trio(shmacc.ray.SyncReplicas, name, nodes.on) as trio:
        trio.train(2)
        model = Model()
        second = chief(shmacc.ray.SyncReplicas, model, name)
        assert not [each for each in caplog.messages if "two chiefs" in each]
        first, trio.replicas, trio.model = (trio.replicas, trio.model), second, model
        trio.train(1)
        trio.replicas, trio.model = first
        trio.train(1)
        assert [each for each in caplog.messages if "two chiefs" in each]
    with pytest.raises(errors.FinishedError):
        second.round(timeout=LONG).__enter__()
    with chief(shmacc.ray.SyncReplicas, Model(), name) as third:
        before = names_on(nodes, name)
        second.close()
        assert names_on(nodes, name) == before, "these belong to another training"
        assert third.global_step == 0


def test_an_update_that_a_node_refuses_changes_nothing(nodes: Nodes, name: str) -> None:
    """The table has no room for the rows; the next round has the same gradients."""
    model = shmacc.torch.TableEmbedding(4, max_rows=3)
    with shmacc.ray.SyncReplicas(
        model, name, total_num_replicas=1, optimizer=optim.SGD(0.1)
    ) as replicas:
        other = copy.deepcopy(model)
        with nodes.on(1), shmacc.torch.Replica(other, name, 0, timeout=LONG) as replica:
            other(torch.arange(4)).sum().backward()
            replica._timeout = 0.0
            with pytest.raises(errors.DeadlineExceededError):
                replica.step()
            with (
                pytest.raises(errors.ResourceExhaustedError, match=r"Node .* 3"),
                replicas.round(timeout=LONG),
            ):
                pass
            with replicas.round(timeout=LONG) as update:
                assert update.ids(model).tolist() == [0, 1, 2, 3]
                update.skip()
            replica._timeout = LONG
            assert replica.step()
            assert replica.global_step == 1
            assert len(other.table) == 0
            replicas.close()
            wait_for(lambda: not replica.running)
