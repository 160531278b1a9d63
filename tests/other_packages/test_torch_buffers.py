"""A chief's writes to buffers in its block are part of the round's update."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from helpers.support import LONG
from other_packages.torch_training import NAME, backward, hand_over, in_a_round, make_round, pair
from torch import nn

from shmacc import errors
from shmacc.optim import SGD
from shmacc.torch import AsyncReplicas, Replica, SyncReplicas, Viewer

SHARED: Final = pytest.mark.parametrize("optimizer", [SGD(0.1), None], ids=["shmacc", "torch"])


class Noted(nn.Module):
    """A model of words with state of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(20, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("best", torch.tensor(9.0))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("rough", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex128))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, words: torch.Tensor) -> Any:
        return self.norm(self.rows(words))


OWN: Final = ("best", "seen", "mask", "rough", "phase", "hidden")


def ones(model: nn.Module) -> list[Any]:
    return [model.get_buffer(name).sum().item() for name in OWN]


def write_in_place(model: nn.Module) -> None:
    for name in OWN:
        model.get_buffer(name).fill_(1)


def write_by_data(model: nn.Module) -> None:
    for name in OWN:
        model.get_buffer(name).data.fill_(1)


def write_by_assignment(model: nn.Module) -> None:
    for name in OWN:
        setattr(model, name, torch.ones_like(model.get_buffer(name)))


def write_what_requires_grad(model: Any) -> None:
    write_by_assignment(model)
    model.best = torch.ones((), requires_grad=True)


WRITES: Final = (write_in_place, write_by_data, write_by_assignment, write_what_requires_grad)
AFTER: Final = [1, 2, 2, 2, 1, 1]


@SHARED
@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_the_block_is_in_the_update(write: Any, kind: Any, optimizer: Any) -> None:
    model, other, third = Noted(), Noted(), Noted()
    buffers = dict(model.named_buffers())
    with pair(model, other, kind, optimizer=optimizer) as (replicas, replica):
        backward(other, 0)
        hand_over(replica)
        with replicas.round(timeout=LONG):
            write(model)
            assert ones(other) == [9, 0, 1, 0, 0, 0]
        assert {name: id(one) for name, one in model.named_buffers()} == {
            name: id(one) for name, one in buffers.items()
        }
        if kind is SyncReplicas:
            assert replica.step()
        else:
            make_round(replicas, replica)
        assert ones(model) == ones(other) == AFTER
        state = replicas.state_dict()["model"]
        assert [state[name].sum().item() for name in OWN[:-1]] == AFTER[:-1]
        with Viewer(third, NAME, timeout=LONG) as viewer:
            viewer.snapshot()
        assert ones(third) == AFTER


@SHARED
def test_a_chiefs_write_counts_and_not_the_replicas_mean(optimizer: Any) -> None:
    """A buffer that the chief does not write is still the mean over the replicas."""
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        for value in (3.0, float("nan"), float("nan"), 9.0):
            backward(other, 0)
            other.get_buffer("best").fill_(5)
            mean = other.norm.running_mean.clone()
            with in_a_round(replicas, replica):
                model.get_buffer("best").fill_(value)
            expected = torch.tensor(value)
            for each in (model, other):
                assert torch.equal(each.get_buffer("best").isnan(), expected.isnan())
                assert torch.equal(each.get_buffer("best").nan_to_num(), expected.nan_to_num())
                assert torch.equal(each.norm.running_mean, mean)
        backward(other, 0)
        other.get_buffer("best").fill_(5)
        make_round(replicas, replica)
        assert model.get_buffer("best") == 5


@SHARED
def test_a_skipped_round_undoes_its_writes(optimizer: Any) -> None:
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        backward(other, 0)
        hand_over(replica)
        with replicas.round(timeout=LONG) as update:
            write_by_assignment(model)
            update.skip()
        replica.step()
        assert ones(model) == ones(other) == [9, 0, 1, 0, 0, 0]
        assert replicas.state_dict()["model"]["best"] == 9


def raising_block(replicas: Any, write: Callable[[], Any], error: type[BaseException]) -> None:
    with replicas.round(timeout=LONG):
        write()
        raise error


def look_at(replicas: Any, how: str) -> None:
    if how == "state_dict":
        replicas.state_dict()
    else:
        with replicas.round(timeout=LONG):
            pytest.fail("the block must not begin")


def test_a_write_of_a_block_that_raises_is_undone() -> None:
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=SGD(0.1)) as (replicas, replica):
        backward(other, 0)
        hand_over(replica)
        for error in (KeyError, KeyboardInterrupt):
            with pytest.raises(error):
                raising_block(replicas, lambda: write_in_place(model), error)
            assert replicas.state_dict()["model"]["best"] == 9
        with pytest.raises(KeyError):
            raising_block(replicas, lambda: setattr(model, "best", torch.tensor(4.0)), KeyError)
        with replicas.round(timeout=LONG):
            assert ones(model) == [9, 0, 1, 0, 0, 0]
            model.get_buffer("best").fill_(2)
        assert replica.step()
        assert other.get_buffer("best") == 2


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("look", ["round", "state_dict", "active"])
def test_a_write_between_blocks_raises_and_is_undone(write: Any, look: str) -> None:
    """Writes to parameters are treated in the same way."""
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=SGD(0.1)) as (replicas, replica):
        make_round(replicas, replica)
        hand_over(replica)
        if look == "active":
            assert replicas.active  # enters the next round
        write(model)
        with pytest.raises(errors.FailedPreconditionError, match="'best' was written outside"):
            look_at(replicas, look)
        assert ones(model) == [9, 0, 1, 0, 0, 0]
        with replicas.round(timeout=LONG):
            pass
        assert replica.step()
        assert ones(other) == [9, 0, 1, 0, 0, 0]


@SHARED
def test_a_forward_pass_of_the_chief_is_no_write(optimizer: Any) -> None:
    """The statistics are the mean over the replicas, but the chief may set them."""
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        for reset in (False, True):
            model(torch.tensor([1, 2]))
            backward(other, 0)
            mean = torch.zeros(2) if reset else other.norm.running_mean.clone()
            with in_a_round(replicas, replica):
                model(torch.tensor([1, 2]))
                if reset:
                    model.norm.reset_running_stats()
            for each in (model, other):
                assert torch.equal(each.norm.running_mean, mean)
                assert int(each.norm.num_batches_tracked) == (0 if reset else 1)


@SHARED
@pytest.mark.parametrize("wrong", [None, torch.zeros(2), torch.zeros((), dtype=torch.int64)])
def test_another_kind_of_tensor_in_a_buffers_place_is_refused(wrong: Any, optimizer: Any) -> None:
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        backward(other, 0)
        hand_over(replica)
        with (
            pytest.raises(errors.InvalidArgumentError, match="assigned to buffer 'best'"),
            replicas.round(timeout=LONG),
        ):
            model.best = wrong
        if optimizer is None:  # as after any exception in a block with torch's optimizer
            replica.close()
            return
        with replicas.round(timeout=LONG):
            model.get_buffer("best").fill_(4)
        assert replica.step()
        assert other.get_buffer("best") == 4


def test_a_checkpoint_has_the_chiefs_state() -> None:
    model, other = Noted(), Noted()
    with pair(model, other, optimizer=SGD(0.1)) as (replicas, replica):
        for value in (1.0, 2.0):
            with in_a_round(replicas, replica):
                model.get_buffer("best").fill_(value)
            if value == 1.0:
                state = {**replicas.state_dict(), "model": model.state_dict().copy()}
                state["model"] = {k: v.clone() for k, v in state["model"].items()}
        model.get_buffer("best").fill_(7)  # the load replaces it
        replicas.load_state_dict(state)
        assert model.get_buffer("best") == 1
        assert not replica.step()
        make_round(replicas, replica)
        assert ones(model)[0] == ones(other)[0] == 1


@SHARED
@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
def test_a_load_does_not_bring_back_replicas_that_have_left(kind: Any, optimizer: Any) -> None:
    """A replica may leave before any round notes it. In a new training all replicas count."""
    model, other = Noted(), Noted()
    with pair(model, other, kind, total=3, optimizer=optimizer) as (replicas, replica):
        state = replicas.state_dict()
        with Replica(Noted(), NAME, 1, timeout=LONG):
            pass
        hand_over(replica)
        if kind is AsyncReplicas:
            with replicas.round(timeout=LONG):
                pass
        replicas.load_state_dict(state)
        with Replica(Noted(), NAME, 2, timeout=LONG):
            pass
        replicas.load_state_dict(state)
        assert replicas.global_step == 0
        replica.step()  # what it computed before the load is dropped
        make_round(replicas, replica)
        assert (replicas.global_step, replicas._present) == (1, 1)
        replica.leave()
        replicas.load_state_dict(replicas.state_dict())
        assert replicas.active == 0
    with kind(Noted(), NAME, total_num_replicas=2, optimizer=optimizer) as later:
        later.load_state_dict(state)
        assert later.round(timeout=0) is not None
        assert later._present == 2
