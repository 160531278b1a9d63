"""torch models that `shmacc.Parameters` updates stay equal, whoever dies."""

import io
import itertools
import signal
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from helpers.apart import Apart
from helpers.support import EVERY_INSTANT, LONG
from other_packages.torch_training import (
    NAME,
    PLACES,
    Mixed,
    Words,
    backward,
    contents,
    hand_over,
    in_a_round,
    in_the_update,
    make_round,
    pair,
    same,
)
from torch import nn

import shmacc
from shmacc import errors, testing
from shmacc.optim import SGD, Adagrad, Adam, AdamW
from shmacc.torch import Replica, SyncReplicas, _run

ADAM: Final = Adam(0.05)
DEATHS: Final = 50 if EVERY_INSTANT else 6
UPDATES: Final = 20 if EVERY_INSTANT else 5


def parameters_of(replicas: SyncReplicas) -> shmacc.Parameters:
    found = replicas._shared
    assert isinstance(found, shmacc.Parameters)
    return found


@pytest.mark.parametrize(
    "optimizer",
    [
        ADAM,
        {"rows.weight": Adagrad(0.1, rowwise=True)}
        | {
            f"{layer}.{name}": SGD(0.3, momentum=0.9)
            for layer in ("layer", "unused", "norm")
            for name in ("weight", "bias")
        },
    ],
    ids=["one for all", "by name"],
)
def test_updates_of_a_model_equal_updates_of_parameters(optimizer: Any) -> None:
    """Gradients are scaled, rates follow a schedule; frozen and unused parameters stay."""
    model, other = Mixed(), Mixed()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    by_hand = shmacc.Parameters(
        {name: value.detach().clone() for name, value in trained.items()}, optimizer=optimizer
    )
    group = shmacc.AccumulatorGroup(by_hand.member_specs(sparse=["rows.weight"]))
    before = contents(model)
    with by_hand, group, pair(model, other, optimizer=optimizer) as (replicas, replica):
        for step in range(4):
            backward(other, step)
            hand_over(replica)
            rate = 0.1 / (1 + step)
            with replicas.round(timeout=LONG, learning_rate=rate) as update:
                assert (update.step, update.replicas) == (step, (0,))
                assert model.unused.weight.grad is None
                for parameter in trained.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
                gradient = {
                    name: parameter.grad.clone()
                    for name, parameter in trained.items()
                    if parameter.grad is not None
                }
            assert model.rows.weight.grad is None
            statistics = other.norm.running_var.clone()
            assert replica.step()
            group.apply(gradient, step)
            with group.round(1) as taken:
                assert by_hand.update(taken, learning_rate=rate)
            for name, value in by_hand.items():
                np.testing.assert_array_equal(trained[name].detach().numpy(), value, name)
            assert torch.equal(model.norm.running_var, statistics)
        same(contents(other), contents(model))
        assert replica.global_step == replicas.global_step == 4
    for name in ("frozen", "unused.weight", "mask"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert not torch.equal(model.rows.weight, before["rows.weight"])
    assert int(model.norm.num_batches_tracked) == 4


def compute(rank: int) -> None:
    model = Mixed()
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        while replica.running:
            backward(model, replica.global_step, rank)
            replica.step()


def lead(die: Callable[[], None] | None) -> dict[str, bytes]:
    """Be a chief that dies in its first block, or trains to the end; return its whole state."""
    model = Mixed()
    chosen = {"rows*": Adagrad(0.1), "*": AdamW(0.05, as_torch=True)}
    with SyncReplicas(
        model, NAME, total_num_replicas=2, optimizer=chosen, schedule=lambda step: 0.05 / (1 + step)
    ) as replicas:
        while replicas.global_step < UPDATES:
            with replicas.round(timeout=LONG):
                nn.utils.clip_grad_norm_(model.layer.parameters(), 0.1)
                model.get_buffer("mask").logical_not_()  # the chief's own state
                model.norm.get_buffer("running_mean").add_(1)
                if die is not None:
                    die()
        found = {key: value.tobytes() for key, value in parameters_of(replicas).state().items()}
        own = b"".join(value.float().numpy().tobytes() for value in model.state_dict().values())
        return found | {"the chief's": own}


@pytest.mark.timeout(300)
def test_deaths_in_the_block_change_nothing(start: Callable[..., Apart]) -> None:
    """Parameters, slots, buffers, steps and rates equal those without deaths, to the bit."""
    ends = []
    for deaths in (0, DEATHS):
        children = [start(compute, rank) for rank in range(2)]
        for die, update in itertools.islice(itertools.cycle(PLACES), deaths):
            status = start(lead, die).wait()
            assert status == (signal.SIGSEGV if die is in_the_update else signal.SIGKILL)
            with shmacc.AccumulatorGroup.attach(NAME) as group:
                assert group.stats().update == update
        ends.append(start(lead, None).result())
        for child in children:
            child.result()
    undisturbed, disturbed = ends
    assert undisturbed.keys() == disturbed.keys()
    for key, value in undisturbed.items():
        assert disturbed[key] == value, key
    assert np.frombuffer(undisturbed["step"], np.int64)[0] == UPDATES


def test_an_exception_in_the_block_changes_nothing() -> None:
    model, other = Mixed(), Mixed()
    before = contents(model)
    with pair(model, other, optimizer=ADAM) as (replicas, replica):
        backward(other, 0)
        hand_over(replica)
        with pytest.raises(ZeroDivisionError), replicas.round(timeout=LONG):
            raise ZeroDivisionError
        wrong = {"layer.bias": None, "rows.weight": torch.ones(20, 4)}
        for name, gradient in wrong.items():
            with (
                pytest.raises(errors.InvalidArgumentError, match=f".grad of '{name}' is not as"),
                replicas.round(timeout=LONG),
            ):
                model.get_parameter(name).grad = gradient
        same(contents(model), before)
        assert (replicas.global_step, replicas._group.num_accumulated()) == (0, 1)
        with replicas.round(timeout=LONG):
            model.layer.bias.grad = torch.zeros(2)
        assert replica.step()
        assert torch.equal(model.layer.bias, before["layer.bias"])
        assert not torch.equal(model.layer.weight, before["layer.weight"])


@pytest.mark.parametrize("optimizer", [None, SGD(0.5)], ids=["of torch", "of shmacc"])
def test_a_block_may_give_gradients_that_the_round_lacks(optimizer: Any) -> None:
    """For example, the chief computes a penalty on all parameters."""
    model, other, alone = Words(sparse=False), Words(sparse=False), Words(sparse=False)
    mine, theirs = (torch.optim.SGD(one.parameters(), 0.5) for one in (alone, model))

    def penalise(model: nn.Module) -> None:
        sum((one**2).sum() for one in model.parameters()).backward()

    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        for step in range(2):
            for one in (alone, other):
                rows = one.rows(torch.tensor([step, 3]))
                rows.square().sum().backward()
            penalise(alone)
            mine.step()
            mine.zero_grad()
            with in_a_round(replicas, replica):
                assert model.layer.bias.grad is None
                penalise(model)
                if optimizer is None:
                    theirs.step()
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found, wanted)
        replica.close()


@pytest.mark.parametrize(
    "view", [torch.Tensor.t, torch._neg_view, lambda gradient: gradient[:1].expand_as(gradient)]
)
def test_a_gradient_may_be_another_view_of_the_given_one(view: Any) -> None:
    model, other = (nn.Linear(2, 2, bias=False) for _ in range(2))
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with pair(model, other, optimizer=SGD(1.0)) as (replicas, replica):
        expected = model.weight - view(gradient)
        other.weight.grad = gradient.clone()
        with in_a_round(replicas, replica):
            model.weight.grad = view(model.weight.grad)
        assert torch.equal(model.weight, expected)


def test_two_chiefs_take_over_when_the_others_block_raises() -> None:
    one, two, other = Mixed(), Mixed(), Mixed()
    undisturbed, alone = [], Mixed()
    with pair(alone, other, optimizer=ADAM) as (replicas, replica):
        for step in range(4):
            backward(other, step)
            make_round(replicas, replica)
            undisturbed.append(contents(alone))
    other = Mixed()
    with (
        SyncReplicas(one, NAME, total_num_replicas=1, optimizer=ADAM) as first,
        pair(two, other, optimizer=ADAM) as (second, replica),
    ):
        for step, expected in enumerate(undisturbed):
            backward(other, step)
            hand_over(replica)
            raises, goes_on, model = (first, second, two) if step % 2 else (second, first, one)
            with pytest.raises(ZeroDivisionError), raises.round(timeout=LONG):
                raise ZeroDivisionError
            make_round(goes_on, replica)
            assert first.global_step == second.global_step == step + 1
            same(contents(model), expected)  # the other chief's buffers follow at its next round
            for name, value in (one if model is two else two).named_parameters():
                assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("final", [False, True], ids=["between rounds", "an update has begun"])
def test_a_checkpoint_restores_all_of_a_run(start: Callable[..., Apart], *, final: bool) -> None:
    """This holds even if a dead chief had begun an update."""
    model, other = Mixed(), Mixed()
    first = SyncReplicas(model, NAME, total_num_replicas=1, optimizer=ADAM)
    with Replica(other, NAME, 0, timeout=0.01) as replica:

        def train(replicas: SyncReplicas, updates: int) -> None:
            for _ in range(updates):
                backward(other, replica.global_step)
                make_round(replicas, replica)

        train(first, 2)
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        saved.seek(0)
        train(first, 2)
        expected = contents(model), parameters_of(first).slots["rows.weight"]["v"].copy()
        if final:
            backward(other, replica.global_step)
            hand_over(replica)
            assert start(lead_alone, in_the_update).wait() == signal.SIGSEGV
        checkpoint = torch.load(saved, weights_only=True)
        first.load_state_dict(checkpoint)
        assert (first.global_step, first._group.num_accumulated()) == (2, 0)
        same(contents(model), dict(checkpoint["model"]))
        replica._handed = None
        replica._follow(first._group.global_step)
        train(first, 2)
        same(contents(model), expected[0])
        np.testing.assert_array_equal(parameters_of(first).slots["rows.weight"]["v"], expected[1])
        for wrong in ({}, {"0.accumulator": torch.ones(1)}):
            with pytest.raises(errors.InvalidArgumentError, match="'optimizer' is not that"):
                first.load_state_dict(checkpoint | {"optimizer": wrong})
        same(contents(model), expected[0])
    first.close()


def lead_alone(die: Callable[[], None]) -> None:
    """Be a chief of one replica that dies in its block."""
    chief = SyncReplicas(Mixed(), NAME, total_num_replicas=1, optimizer=ADAM)
    with chief.round(timeout=LONG):
        die()


def test_a_chief_may_evaluate_in_training_mode() -> None:
    """The round's statistics replace those of the chief's own forward pass."""
    model, other = Mixed(), Mixed()
    with pair(model, other, optimizer=ADAM) as (replicas, replica):
        model(torch.arange(8))
        backward(other, 0)
        make_round(replicas, replica)
        same(contents(model), contents(other))


def test_bad_arguments_are_refused(namespace: str) -> None:
    def refused(optimizer: Any, words: str, model: nn.Module | None = None) -> None:
        with pytest.raises(errors.InvalidArgumentError, match=words):
            SyncReplicas(model or Mixed(), NAME, total_num_replicas=1, optimizer=optimizer)

    linear = nn.Linear(2, 1)
    refused({"weight": ADAM, "bias": None}, "'bias' requires grad, but there is no", linear)
    refused(ADAM, "float32 or float64, but array 'weight' has bfloat16", linear.bfloat16())
    assert not testing.leaked_names(namespace)
    with SyncReplicas(Mixed(), NAME, total_num_replicas=1, optimizer=ADAM) as replicas:
        refused(Adam(0.1), "optimizer of array")
        refused(None, _run.of_params(NAME))
        with pytest.raises(errors.InvalidArgumentError, match="learning_rate must not be negative"):
            replicas.round(learning_rate=-1)
    with (
        SyncReplicas(Mixed(), NAME, total_num_replicas=1) as replicas,
        pytest.raises(errors.InvalidArgumentError, match=r"learning_rate is for .*shmacc.optim"),
    ):
        replicas.round(learning_rate=0.1)
