"""Replicas of a torch model compute the right updates, also after deaths and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from helpers.apart import Apart
from helpers.support import LONG, until
from other_packages.torch_training import NAME, Words, hand_over, make_round, pair
from torch import nn

import shmacc
import shmacc.torch
from shmacc import errors, inspection
from shmacc.torch import AsyncReplicas, Replica, SyncReplicas, _block, _model, _run

BATCH: Final = 8  # a power of two: so gradients are scaled without rounding


class Tied(nn.Module):
    """A model with rows by number, dense, frozen and unused layers, and tied weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)  # noqa: FBT003 - torch's signature
        self.unused = nn.Linear(2, 2)
        self.out = nn.Linear(4, 2)
        self.to(dtype)

    def forward(self, words: torch.Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(self.rows(words))))
        return self.out(self.frozen(hidden))


def batch(rank: int, step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(0, 20, (size,), generator=random)
    return words, words % 2


def loss_of(model: nn.Module, words: torch.Tensor, labels: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(model(words).float(), labels)


def size_of(rank: int, step: int, *, even: bool) -> int:
    return BATCH if even else 2 + (rank + step) % 4


def compute(rank: int, steps: int = 2**30, dtype: Any = torch.float32, even: bool = True) -> int:
    """Be a replica for `steps` steps or until the chief ends; return how many steps counted."""
    counted = 0
    model = Tied(dtype)
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        for _ in range(steps):
            if not replica.running:
                break
            size = size_of(rank, replica.global_step, even=even)
            loss_of(model, *batch(rank, replica.global_step, size)).backward()
            counted += replica.step(weight=size)
    return counted


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def alone(
    steps: int, *lengths: int, even: bool = True, dtype: Any = torch.float32, make: Any = None
) -> Tied:
    """Return the model that one process trains with the batches of all replicas."""
    model = Tied(dtype)
    optimizer = (make or optimizer_of)(model)
    for step in range(steps):
        parts = [
            batch(rank, step, size_of(rank, step, even=even))
            for rank, length in enumerate(lengths)
            if step < length
        ]
        words, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss_of(model, words, labels).backward()
        nn.utils.clip_grad_norm_(model.out.parameters(), 1.0)
        model.rows.weight.grad = model.rows.weight.grad.coalesce()  # repeated rows are summed first
        optimizer.step()
    return model


def same(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    theirs = expected.state_dict()
    for name, value in model.state_dict().items():
        if tolerance:
            torch.testing.assert_close(value, theirs[name], **tolerance)
        else:
            assert torch.equal(value, theirs[name]), name


def train(replicas: Any, optimizer: torch.optim.Optimizer, model: Any, steps: int) -> None:
    while replicas.global_step < steps:
        with replicas.round(timeout=LONG):
            nn.utils.clip_grad_norm_(model.out.parameters(), 1.0)
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_replica_trains_to_torchs_bits(start: Callable[..., Apart], dtype: torch.dtype) -> None:
    model = Tied(dtype)
    frozen, first = model.frozen.weight.clone(), model.first.weight
    with SyncReplicas(model, NAME, total_num_replicas=1) as replicas:
        child = start(compute, 0, 2**30, dtype)
        train(replicas, optimizer_of(model), model, 5)
    assert child.result() >= 5
    same(model, alone(5, 5, dtype=dtype))
    assert torch.equal(model.frozen.weight, frozen)
    assert model.first.weight is model.second.weight is first


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven batches by weight"])
def test_three_replicas_equal_one_large_batch(start: Callable[..., Apart], *, even: bool) -> None:
    model = Tied()
    with SyncReplicas(model, NAME, total_num_replicas=3) as replicas:
        children = [start(compute, rank, 2**30, torch.float32, even) for rank in range(3)]
        with replicas.round(timeout=LONG) as update:
            assert update.replicas == (0, 1, 2)
            assert update.weight == sum(size_of(rank, 0, even=even) for rank in range(3))
            assert model.rows.weight.grad is not None
            assert model.rows.weight.grad.is_coalesced()
            assert model.unused.weight.grad is None
            assert model.frozen.weight.grad is None
            nn.utils.clip_grad_norm_(model.out.parameters(), 1.0)
            optimizer = optimizer_of(model)
            optimizer.step()
        train(replicas, optimizer, model, 8)
    assert [child.result() >= 8 for child in children] == [True] * 3
    same(model, alone(8, 8, 8, 8, even=even), rtol=1e-4, atol=1e-6)


def compute_and_say(rank: int, pipe: Any) -> None:
    """Be a replica that reports before each step, and then waits until it may go on."""
    model = Tied()
    replica = Replica(model, NAME, rank, timeout=LONG)
    while replica.running:
        loss_of(model, *batch(rank, replica.global_step)).backward()
        pipe.say(replica.global_step)
        pipe.hear()
        replica.step(weight=BATCH)


@pytest.mark.parametrize("counted", [True, False], ids=["its gradient is in", "it is not"])
def test_a_killed_replicas_batch_counts_once(start: Callable[..., Apart], *, counted: bool) -> None:
    """The replica is killed before or after it has applied its gradient."""
    model = Tied()
    optimizer = optimizer_of(model)
    with SyncReplicas(model, NAME, total_num_replicas=2) as replicas:
        other, victim = start(compute, 0), start(compute_and_say, 1)
        assert victim.hear() == 0
        victim.say()
        train(replicas, optimizer, model, 1)
        assert victim.hear() == 1
        if counted:
            victim.say()
            with shmacc.AccumulatorGroup.attach(NAME) as group:
                until(lambda: 1 in group.contributors())
        victim.kill()
        again = start(compute, 1)
        train(replicas, optimizer, model, 5)
    assert other.result() >= 5
    assert again.result() >= 3
    same(model, alone(5, 5, 5), rtol=1e-4, atol=1e-6)


def say_nothing(rank: int) -> None:
    """Be a replica that makes no step, and stays until the training ends."""
    model = Tied()
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        until(lambda: not replica.running)


def test_a_round_does_not_wait_for_backup_replicas(start: Callable[..., Apart]) -> None:
    model = Tied()
    with SyncReplicas(model, NAME, total_num_replicas=3, replicas_to_aggregate=2) as replicas:
        children = [start(say_nothing, 2)]
        # The replica attaches to the parameters last; the others must not finish before that.
        until(lambda: len(inspection.describe(_run.of_params(NAME)).processes) == 2)
        children += [start(compute, rank) for rank in range(2)]
        train(replicas, optimizer_of(model), model, 10)
    for child in children:
        child.result()
    same(model, alone(10, 10, 10), rtol=1e-4, atol=1e-6)


def test_a_replica_that_runs_out_of_data_leaves(start: Callable[..., Apart]) -> None:
    """The chief no longer waits for this replica."""
    model = Tied()
    seen: dict[tuple[int, ...], int] = {}
    with SyncReplicas(model, NAME, total_num_replicas=3) as replicas:
        optimizer = optimizer_of(model)
        lengths = (2, 7, 4)
        children = [start(compute, rank, steps) for rank, steps in enumerate(lengths)]
        while replicas.active:
            with replicas.round(timeout=LONG) as update:
                nn.utils.clip_grad_norm_(model.out.parameters(), 1.0)
                optimizer.step()
            seen[update.replicas] = seen.get(update.replicas, 0) + 1
        with (
            pytest.raises(errors.FailedPreconditionError, match="have left"),
            replicas.round(timeout=LONG),
        ):
            pass
        assert replicas.global_step == 7
    assert [child.result() for child in children] == list(lengths)
    assert seen == {(0, 1, 2): 2, (1, 2): 2, (1,): 3}, "no round without gradients"
    same(model, alone(7, *lengths), rtol=1e-4, atol=1e-6)


def adagrad_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def lead(path: Path, pipe: Any) -> dict[str, Any]:
    """Be a chief that goes on from a checkpoint, or makes one and stops in a block."""
    model = Tied()
    optimizer = adagrad_of(model)
    with SyncReplicas(model, NAME, total_num_replicas=2) as replicas:
        first = not path.exists()
        if not first:
            state = torch.load(path, weights_only=True)
            replicas.load_state_dict(state["replicas"])
            optimizer.load_state_dict(state["optimizer"])
            pipe.say(replicas.global_step)
        while replicas.global_step < 7:
            with replicas.round(timeout=LONG):
                nn.utils.clip_grad_norm_(model.out.parameters(), 1.0)
                optimizer.step()
                if first and replicas.global_step == 4:
                    pipe.say("half way")
                    pipe.hear()
            if first and replicas.global_step == 3:
                state = {"replicas": replicas.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, path)
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_a_chief_that_is_killed_in_its_block_goes_on_from_a_checkpoint(
    start: Callable[..., Apart], tmp_path: Path
) -> None:
    """The replicas go on without a restart; the end equals that of a run without deaths."""
    children = [start(compute, rank) for rank in range(2)]
    chief = start(lead, tmp_path / "checkpoint")
    assert chief.hear() == "half way"
    chief.kill()
    late = SyncReplicas(Tied(), NAME, total_num_replicas=2)
    with pytest.raises(errors.FailedPreconditionError, match="half updated"):
        late.round(timeout=LONG).__enter__()
    late._group.close()  # this does not end the training
    late._shared.close()
    chief = start(lead, tmp_path / "checkpoint")
    assert chief.hear() == 3
    got = chief.result()
    for child in children:
        assert child.result() >= 7
    expected = alone(7, 7, 7, make=adagrad_of)
    for name, value in expected.state_dict().items():
        np.testing.assert_allclose(got[name], value.numpy(), rtol=1e-3, atol=1e-5)


def test_a_chief_that_dies_between_update_and_commit_updates_once() -> None:
    """The next chief gets the same gradients, and does not add them twice."""
    model, other = Tied(), Tied()
    optimizer = optimizer_of(model)
    with pair(model, other) as (replicas, replica):
        loss_of(other, *batch(0, 0)).backward()
        group = replicas._group
        left = replica._gradients.begin(replica._at, 0, BATCH).gradients
        gradient = dict(_model.gradients(left, replica._sparse))
        group.apply(gradient, 0, contributor=0, weight=BATCH)
        with pytest.raises(KeyError), group.round(1) as taken:  # noqa: PT012
            replicas._begin(taken)
            optimizer.step()
            replicas._end(taken, _block.BlockChanges({}, {}))
            raise KeyError("killed here, before the commit")
        assert group.num_accumulated() == 1
        updated = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(errors.DeadlineExceededError), replicas.round(timeout=0.2):
            optimizer.step()
        assert replicas.global_step == group.global_step == 1
        assert all(map(torch.equal, updated, model.parameters()))
        replica.close()


def test_after_an_exception_in_the_block_a_checkpoint_must_be_loaded() -> None:
    model, other = Tied(), Tied()
    with pair(model, other) as (replicas, replica):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        checkpoint = replicas.state_dict() | {"model": before}
        replicas._group.apply({}, 0, contributor=0)
        with pytest.raises(ZeroDivisionError), replicas.round(timeout=LONG):  # noqa: PT012
            model.out.bias.data.add_(1)
            raise ZeroDivisionError
        with pytest.raises(errors.FailedPreconditionError), replicas.round(timeout=LONG):
            pass
        replicas.load_state_dict(checkpoint)
        same(model, Tied())
        assert replicas._group.num_accumulated() == 0
        # An earlier gradient is stale, and the replica goes on by itself.
        loss_of(other, *batch(0, 0)).backward()
        assert replica.step() is False
        assert replica.global_step == 0


def test_asynchronous_replicas_learn(start: Callable[..., Apart]) -> None:
    model = Tied()
    before = loss_of(model, *batch(9, 9, 100)).item()
    updates, gradients = 0, 0
    with AsyncReplicas(model, NAME, total_num_replicas=2, capacity=3) as replicas:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
        children = [start(compute, rank, 20) for rank in range(2)]
        while replicas.active:
            with replicas.round(timeout=LONG) as update:
                optimizer.step()
            assert len(update.replicas) <= 3
            gradients += len(update.replicas)
            updates += 1
        assert replicas.global_step == updates
    assert gradients == 40
    assert [child.result() for child in children] == [20, 20]
    assert loss_of(model, *batch(9, 9, 100)).item() < before


def test_an_asynchronous_replica_waits_for_room() -> None:
    model, other = Tied(), Tied()
    with AsyncReplicas(model, NAME, total_num_replicas=2, capacity=2) as replicas:
        replica = Replica(other, NAME, 1, timeout=0.1)
        for _ in range(2):
            loss_of(other, *batch(1, 0)).backward()
            assert replica.step()
        loss_of(other, *batch(1, 0)).backward()
        with pytest.raises(errors.DeadlineExceededError):
            replica.step()
        assert other.out.weight.grad is not None  # so the step can be tried again
        with replicas.round(timeout=LONG) as update:
            assert update.replicas == (1, 1)
        assert replica.step()
        replica.close()


def test_running_statistics_are_the_mean_over_replicas() -> None:
    models = [Words() for _ in range(3)]
    with (
        pair(models[0], models[1], total=2) as (replicas, first),
        Replica(models[2], NAME, 1, timeout=0.01) as second,
    ):
        expected = []
        for rank, (model, replica) in enumerate(zip(models[1:], (first, second), strict=True)):
            model(batch(rank, 0)[0]).sum().backward()
            expected.append(model.norm.running_mean.clone())
            hand_over(replica)
        make_round(replicas, first)
        assert second.step()
        torch.testing.assert_close(models[0].norm.running_mean, (expected[0] + expected[1]) / 2)
        assert int(models[0].norm.num_batches_tracked) == 1
        for model in models[1:]:
            same(model, models[0])


def test_a_replica_of_another_model_is_refused() -> None:
    with SyncReplicas(Tied(), NAME, total_num_replicas=2):
        with pytest.raises(errors.InvalidArgumentError, match="rank must be 0 to 1"):
            Replica(Tied(), NAME, 2)
        with pytest.raises(
            errors.InvalidArgumentError, match=r"'first.bias', and this one has not"
        ):
            Replica(nn.Linear(4, 2, bias=False), NAME, 0)
        with pytest.raises(errors.InvalidArgumentError, match="bfloat16"):
            Replica(Tied(torch.bfloat16), NAME, 0)
        with pytest.raises(errors.InvalidArgumentError, match="are synchronous"):
            AsyncReplicas(Tied(), NAME, total_num_replicas=2)
        with pytest.raises(errors.InvalidArgumentError, match=r"\.left") as caught:
            SyncReplicas(Tied(), NAME, total_num_replicas=3)
        (note,) = caught.value.__notes__
        assert f"{NAME!r} and {NAME + '.params'!r}, that belong together" in note
