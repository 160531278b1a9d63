"""Rounds update as torch's optimizers do, with each parameter group's own settings."""

import copy
from collections.abc import Callable
from typing import Any, Final, cast

import pytest
import torch
from helpers.support import LONG
from other_packages.torch_training import NAME, hand_over, make_round, pair
from torch import nn

from shmacc import errors
from shmacc.optim import SGD, Adagrad, AdamW, Clip
from shmacc.torch import AsyncReplicas, SyncReplicas, optimizer_of

STEPS: Final = 12
OF = torch.optim


class Words(nn.Module):
    """Rows by number, and dense layers, one of which only some batches use."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.emb = nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse)
        self.layer = nn.Linear(4, 3)
        self.seldom = nn.Linear(3, 3)

    def forward(self, words: torch.Tensor, *, seldom: bool = False) -> Any:
        offsets = torch.arange(len(words)) * words.shape[1]
        found = self.layer(self.emb(words.flatten(), offsets))
        return self.seldom(found) if seldom else found


def backward(model: nn.Module, step: int) -> None:
    """Compute a batch. At some steps the batch has no words; at others `seldom` has no gradient."""
    random = torch.Generator().manual_seed(step)
    words = torch.randint(0, 20, (8, 0 if step % 7 == 3 else 3), generator=random)
    labels = torch.randint(0, 3, (8,), generator=random)
    nn.functional.cross_entropy(model(words, seldom=step % 3 > 0), labels).backward()


def train_as_torch(
    ours: Any,
    theirs: Callable[[Words], list[torch.optim.Optimizer]],
    *,
    sparse: bool = False,
    kind: Any = SyncReplicas,
) -> None:
    """Train by rounds of one replica, and by torch alone; the results must be equal."""
    model, other, alone = (Words(sparse=sparse) for _ in range(3))
    with pair(model, other, kind, optimizer=ours(model)) as (replicas, replica):
        for step in range(STEPS):
            backward(other, step)
            make_round(replicas, replica)
    optimizers = theirs(alone)
    for step in range(STEPS):
        alone.zero_grad()
        backward(alone, step)
        for optimizer in optimizers:
            optimizer.step()
    close(model, alone)


def close(model: nn.Module, alone: nn.Module) -> None:
    for (name, found), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=name)


# test_optimizers_of_torch.py compares optimizers at their defaults.
DENSE: Final[dict[str, Callable[[Any], Any]]] = {
    "momentum": lambda of: OF.SGD(of, 0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda of: OF.SGD(of, 0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "Adagrad": lambda of: OF.Adagrad(of, 0.1, weight_decay=1e-2, initial_accumulator_value=0.2),
    "Adam": lambda of: OF.Adam(of, 1e-2, (0.8, 0.99), 1e-3, weight_decay=1e-2),
    "AdamW": lambda of: OF.AdamW(of, 1e-2, weight_decay=0.5),
    "RMSprop": lambda of: OF.RMSprop(of, 1e-3, momentum=0.9, weight_decay=1e-2),
}
SPARSE: Final[dict[str, Callable[[Any], Any]]] = {
    "SGD": OF.SGD,
    "Adagrad": OF.Adagrad,
    "SparseAdam": lambda of: OF.SparseAdam(of, 0.1, (0.8, 0.99), 1e-3),
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_dense_updates_equal_torchs(make: Any) -> None:
    def theirs(model: Words) -> list[Any]:
        return [make(model.parameters())]

    train_as_torch(lambda model: optimizer_of(*theirs(model)), theirs)


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_updates_equal_torchs_even_without_rows(make: Any) -> None:
    """SparseAdam counts a step whose gradient has no rows."""

    def theirs(model: Words) -> list[Any]:
        dense = [*model.layer.parameters(), *model.seldom.parameters()]
        return [make([model.emb.weight]), OF.Adam(dense)]

    train_as_torch(lambda model: optimizer_of(*theirs(model)), theirs, sparse=True)


def test_a_constraint_holds_for_each_optimizer_that_optimizer_of_translates() -> None:
    clip = Clip(-0.01, 0.01)
    model = nn.Linear(3, 2)
    made = optimizer_of(OF.RMSprop(model.parameters(), 1e-3), constraint=clip)
    assert [part.optimizer.constraint for part in made.parts] == [clip, clip]
    with SyncReplicas(model, "clipped", total_num_replicas=1, optimizer=made):
        for parameter in model.parameters():
            assert float(parameter.detach().abs().max()) <= 0.010001


def test_under_another_constraint_a_checkpoints_rows_stay_until_they_change() -> None:
    """docs/torch.md says so."""
    model, other = Words(sparse=True), Words(sparse=True)
    with SyncReplicas(model, NAME, total_num_replicas=1, optimizer=SGD(0.1)) as replicas:
        state = copy.deepcopy(replicas.state_dict())
    before = model.emb.weight.detach().clone()
    clip = SGD(0.1, constraint=Clip(-0.01, 0.01))
    with pair(Words(sparse=True), other, optimizer=clip) as (replicas, replica):
        replicas.load_state_dict(state)
        replica._follow(replicas._group.global_step)
        backward(other, 1)
        gradient = other.emb.weight.grad
        assert gradient is not None
        changed = torch.zeros(20, dtype=torch.bool).index_fill(
            0, gradient.coalesce().indices()[0], 1
        )
        make_round(replicas, replica)
        rows = other.emb.weight.detach()
        assert bool((rows[changed].abs() <= 0.010001).all())
        assert torch.equal(rows[~changed], before[~changed])


def test_groups_of_parameters_keep_their_settings() -> None:
    def theirs(model: Words) -> list[Any]:
        groups = [
            {"params": [model.emb.weight], "lr": 0.1, "weight_decay": 0.0},
            {"params": [model.layer.weight, model.seldom.weight]},
            {"params": [model.layer.bias, model.seldom.bias], "weight_decay": 0.5},
        ]
        return [OF.AdamW(groups, lr=1e-2)]

    train_as_torch(lambda model: optimizer_of(*theirs(model)), theirs)


def refused(words: str, optimizer: Any, model: Words | None = None, **options: Any) -> None:
    chosen = {"optimizer": optimizer} | options
    with pytest.raises(errors.InvalidArgumentError, match=words):
        SyncReplicas(model or Words(), NAME, total_num_replicas=1, **chosen)


@pytest.mark.parametrize(("make", "words"), [
    (lambda of: OF.Adam(of, amsgrad=True), "Adam with amsgrad=True is not honoured"),
    (lambda of: OF.Adam(of, foreach=True), "foreach=True"),
    (lambda of: OF.AdamW(of, maximize=True), "maximize=True"),
    (lambda of: OF.SGD(of, momentum=0.9, dampening=0.1), "dampening=0.1"),
    (lambda of: OF.Adagrad(of, lr_decay=0.1), "lr_decay=0.1"),
    (lambda of: OF.RMSprop(of, centered=True), "centered=True"),
    (OF.NAdam, "must be of torch.optim's SGD, .* but was a NAdam"),
    (OF.SparseAdam, "has dense gradients, which torch's SparseAdam"),
])  # fmt: skip
def test_settings_without_support_are_refused_by_name(make: Any, words: str) -> None:
    def chief() -> Any:
        optimizer = optimizer_of(make(model.parameters()))
        return SyncReplicas(model, NAME, total_num_replicas=1, optimizer=optimizer)

    model = Words()
    with pytest.raises(errors.InvalidArgumentError, match=words):
        chief()


@pytest.mark.parametrize("make", [
    OF.Adam, OF.AdamW, OF.RMSprop, lambda of: OF.SGD(of, momentum=0.9),
    lambda of: OF.Adagrad(of, weight_decay=0.1),
])  # fmt: skip
def test_optimizers_that_torch_lacks_for_sparse_gradients_are_refused(make: Any) -> None:
    model = Words(sparse=True)
    refused("'emb.weight' has sparse gradients", optimizer_of(make(model.parameters())), model)


def test_optimizers_of_another_model_or_that_made_steps_are_refused() -> None:
    model = Words()
    refused("that is not the model's", optimizer_of(OF.SGD(Words().parameters())), model)
    part = OF.SGD([*model.emb.parameters(), *model.layer.parameters()], 0.1)
    refused(r"'seldom.weight' requires grad, but", optimizer_of(part), model)
    for other in OF.Adam(model.layer.parameters()), OF.SGD(model.layer.parameters(), 0.1):
        both = optimizer_of(OF.SGD(model.parameters(), 0.1), other)
        refused("'layer.weight' is a parameter of torch's optimizers twice", both, model)
    for made in OF.Adam(model.parameters()), OF.SGD(model.parameters(), 0.1, momentum=0.9):
        backward(model, 1)
        optimizer_of(made)
        made.step()
        with pytest.raises(errors.InvalidArgumentError, match="has made steps"):
            optimizer_of(made)
    made = OF.SGD(model.parameters(), 0.1)
    OF.lr_scheduler.ExponentialLR(made, 0.9)
    with pytest.raises(errors.InvalidArgumentError, match="schedule="):
        optimizer_of(made)


def by_pattern(model: Words) -> list[Any]:
    return [
        OF.Adagrad([model.emb.weight], 0.05, initial_accumulator_value=0.1, eps=0),
        OF.SGD([model.layer.bias, model.seldom.bias], 0.1),
        OF.SGD([model.layer.weight, model.seldom.weight], 0.1, 0.9, weight_decay=0.01),
    ]


PATTERNS: Final = {"emb*": Adagrad(0.05), "*.bias": SGD(0.1), "*": SGD(0.1, 0.9, weight_decay=0.01)}


def test_the_first_matching_pattern_is_used() -> None:
    train_as_torch(lambda _: PATTERNS, by_pattern, kind=AsyncReplicas)


@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
def test_patterns_may_name_optimizers_of_shmacc_and_of_torch(kind: Any) -> None:
    """An optimizer of torch applies to its parameters that match no earlier pattern."""

    def ours(model: Words) -> Any:
        return {
            "emb*": Adagrad(0.05),
            "*.bias": optimizer_of(OF.SGD([model.layer.bias, model.seldom.bias], 0.1)),
            "*": optimizer_of(OF.AdamW(model.parameters(), 0.1)),
        }

    def theirs(model: Words) -> list[Any]:
        sgd = OF.SGD([model.layer.bias, model.seldom.bias], 0.1)
        emb = OF.Adagrad([model.emb.weight], 0.05, initial_accumulator_value=0.1, eps=0)
        return [emb, sgd, OF.AdamW([model.layer.weight, model.seldom.weight], 0.1)]

    train_as_torch(ours, theirs, kind=kind)
    train_as_torch(ours, theirs, kind=kind, sparse=True)


def test_contradictory_patterns_of_both_kinds_are_refused() -> None:
    model = Words(sparse=True)
    adam = optimizer_of(OF.Adam(model.parameters()))
    refused(
        "'emb.weight' has sparse .*\"emb.weight\": shmacc", {"layer*": SGD(1), "*": adam}, model
    )
    some = optimizer_of(OF.Adam(model.layer.parameters()))
    refused("'seldom.weight' requires grad, but", {"emb*": SGD(1), "*": some}, model)
    refused("not the model's", {"emb*": SGD(1), "*": adam})
    bare: Any = {"emb*": SGD(1), "*": torch.optim.Adam(model.parameters())}
    refused("torch's Adam: optimizer_of", bare, model)


def test_bad_patterns_are_refused() -> None:
    refused("'layer.weight' requires grad, but there is no", {"emb*": SGD(1), "*.bias": SGD(1)})
    more = {"emb*": SGD(1), "*": SGD(1), "head*": SGD(1)}
    refused("'head.', which matches no array$", more)
    late = {"*": SGD(1), "emb*": SGD(1)}
    refused("'emb.', which matches no array, or each has an earlier", late)
    refused("optimizer_of", torch.optim.Adam(Words().parameters()))


@pytest.mark.parametrize("by", ["schedule", "round"])
def test_rates_by_pattern_follow_the_step(by: str) -> None:
    """Parameters that match no pattern of rates keep their optimizer's rate."""

    def rates(step: int) -> dict[str, float]:
        return {"emb*": 0.05 / (1 + step)}

    model, alone, other = Words(), Words(), Words()
    schedule = rates if by == "schedule" else None
    with pair(model, other, optimizer=PATTERNS, schedule=schedule) as (replicas, replica):
        for step in range(4):
            backward(other, step)
            make_round(replicas, replica, learning_rate=None if schedule else rates(step))
    optimizers = by_pattern(alone)
    for step in range(4):
        alone.zero_grad()
        backward(alone, step)
        optimizers[0].param_groups[0]["lr"] = rates(step)["emb*"]
        for optimizer in optimizers:
            optimizer.step()
    close(model, alone)


def test_a_bad_schedule_is_refused() -> None:
    refused("schedule is for optimizer=", None, schedule=lambda step: 0.1 / (step + 1))
    scheduler = OF.lr_scheduler.ConstantLR(OF.SGD(Words().parameters(), 0.1))
    for wrong in 0.1, {"*": 0.1}, scheduler:
        refused("schedule must be a function from", SGD(1), schedule=cast("Any", wrong))
    wrong_rates: dict[str, Any] = {
        r"schedule\(0\) returned None, .* may lack a `return`": None,
        "must not be negative": -1,
        "must be a finite number, but was 'fast'": "fast",
        "'head.', which matches no array with an optimizer": {"head*": 0.1},
        "'emb.', which .* or each has an earlier one": {"*": 0.1, "emb*": 0.1},
        "must be a finite number, but was None": {"*": None},
    }
    for words, rate in wrong_rates.items():
        refused(words, SGD(1), schedule=lambda _, rate=rate: rate)
    rates: list[Any] = [{}, *wrong_rates.values(), {}]
    other = Words()
    options: dict[str, Any] = {"optimizer": AdamW(0.1), "schedule": lambda _: rates.pop(0)}
    with pair(Words(), other, **options) as (replicas, replica):
        backward(other, 1)
        hand_over(replica)
        for words in wrong_rates:
            with (
                pytest.raises(errors.InvalidArgumentError, match=words),
                replicas.round(timeout=LONG),
            ):
                pass
        make_round(replicas, replica)
        assert replicas.global_step == 1
