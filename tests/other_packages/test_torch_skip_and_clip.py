"""A chief skips a round of bad gradients, and clips dense and sparse gradients together."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.support import LONG
from other_packages.torch_training import Words, contents, pair
from other_packages.torch_training import hand_over as pass_on
from torch import nn

from shmacc import errors
from shmacc.optim import SGD, Adam
from shmacc.torch import (
    AsyncReplicas,
    Replica,
    SyncReplicas,
    TableEmbedding,
    clip_grad_norm_,
    clip_grad_value_,
)


def slots_of(replicas: Any) -> dict[str, Any]:
    """Return the optimizer's slots, and how many updates each array has had."""
    state = replicas._shared.state()
    slots = {
        name: numbers for name, numbers in state.items() if name.endswith((".m", ".v", ".momentum"))
    }
    assert slots
    return slots | {"updates": state["updates"]}


def backward(model: nn.Module, scale: float) -> None:
    words = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    (scale * nn.functional.cross_entropy(model(words), words % 2)).backward()


def hand_over(replica: Replica, model: nn.Module, scale: float = 1.0) -> None:
    backward(model, scale)
    pass_on(replica)


@pytest.mark.parametrize(
    ("optimizer", "kind"), [(SGD(0.3, momentum=0.9), SyncReplicas), (Adam(0.05), AsyncReplicas)]
)
def test_a_skipped_round_changes_nothing(optimizer: Any, kind: Any) -> None:
    """Not even momentum changes parameters; with a gradient of zeros it would."""
    model, other = Words(), Words()
    with pair(model, other, kind, optimizer=optimizer) as (replicas, replica):
        hand_over(replica, other)
        with replicas.round(timeout=LONG):
            pass
        assert kind is AsyncReplicas or replica.step()
        before, slots = contents(model), slots_of(replicas)
        hand_over(replica, other, scale=float("nan"))
        with replicas.round(timeout=LONG) as update:
            assert model.layer.weight.grad is not None
            assert model.layer.weight.grad.isnan().all()
            update.skip()
        with pytest.raises(errors.FailedPreconditionError, match="has ended"):
            update.skip()
        assert replicas.global_step == 2
        assert model.layer.weight.grad is None
        for name, value in contents(model).items():
            assert torch.equal(value, before[name]), name
        for name, numbers in slots_of(replicas).items():
            np.testing.assert_array_equal(numbers, slots[name], name)


def test_a_skip_in_a_block_that_raises_is_forgotten() -> None:
    """The same round comes again, and its gradients count."""
    model, other = Words(), Words()
    with pair(model, other, optimizer=SGD(0.3)) as (replicas, replica):
        before = contents(model)
        hand_over(replica, other)
        with pytest.raises(KeyError), replicas.round(timeout=LONG) as update:  # noqa: PT012
            update.skip()
            raise KeyError
        with replicas.round(timeout=LONG) as update:
            assert update.step == 0
        assert not torch.equal(model.layer.weight, before["layer.weight"])


def test_a_chief_and_a_replica_cannot_be_copied() -> None:
    with pair(Words(), Words(), optimizer=SGD(0.3)) as (replicas, replica):
        for one in replicas, replica:
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copy.deepcopy(one)


def with_gradients(*, sparse: bool) -> Words:
    """Return a model with gradients, in which some rows occur twice."""
    model = Words(sparse=sparse)
    backward(model, 100)
    return model


def same_gradients(model: nn.Module, expected: nn.Module) -> None:
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.to_dense(), wanted.grad)


@pytest.mark.parametrize(
    ("order", "limit"), [(1.0, 0.5), (2.0, 0.5), (float("inf"), 0.5), (2.0, 1e6)]
)
def test_norms_with_sparse_gradients_equal_torchs_of_dense_ones(order: float, limit: float) -> None:
    model, dense = with_gradients(sparse=True), with_gradients(sparse=False)
    found = clip_grad_norm_(model.parameters(), limit, order)
    wanted = nn.utils.clip_grad_norm_(dense.parameters(), limit, order)
    torch.testing.assert_close(found, wanted)
    assert model.rows.weight.grad is not None
    assert model.rows.weight.grad.is_sparse
    same_gradients(model, dense)


def test_values_are_clamped_as_in_torch() -> None:
    model, dense = with_gradients(sparse=True), with_gradients(sparse=False)
    clip_grad_value_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(dense.parameters(), 0.1)
    same_gradients(model, dense)


def test_a_sparse_gradient_without_rows_has_the_norm_zero() -> None:
    rows = nn.Embedding(20, 4, sparse=True)
    rows(torch.tensor([], dtype=torch.int64)).sum().backward()
    assert clip_grad_norm_(rows.parameters(), 1.0) == 0
    assert clip_grad_norm_(rows.weight, 1.0, float("inf")) == 0


def test_a_norm_that_is_not_finite_is_an_error_if_asked() -> None:
    model = with_gradients(sparse=True)
    assert model.layer.weight.grad is not None
    model.layer.weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


class Tower(nn.Module):
    """A model: tables inside and outside a submodule, a sparse embedding, a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.part = nn.ModuleDict({"ids": TableEmbedding(2), "layer": nn.Linear(2, 2)})
        self.rows = nn.Embedding(20, 2, sparse=True)
        self.alone = TableEmbedding(2, mode="sum")
        self.beside = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> Any:
        found = self.part["layer"](self.part["ids"](ids) + self.part["ids"](ids + 1))
        return self.beside(found + self.rows(ids) + self.alone(ids[:, None])).square().sum()


def dense_of(model: Any, table: Callable[[Any], Any]) -> list[Any]:
    """Return the model with all gradients dense, for torch's own functions."""
    found = [one.grad.to_dense() for one in model.parameters()]
    found += [table(one) for one in (model.part["ids"], model.alone)]
    return [SimpleNamespace(grad=one.clone()) for one in found]


WHOLE: dict[str, Callable[[Any], Any]] = {
    "the model": lambda model: model,
    "its modules, generated": lambda model: (one for one in model.children()),
    "all in a list, and twice": lambda model: [*model.parameters(), model, model.alone],
}
SOME: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda model: model.parameters(),
    "a list": lambda model: list(model.parameters()),
    "those that require grad": lambda model: filter(lambda p: p.requires_grad, model.parameters()),
    "those with a gradient": lambda model: [p for p in model.parameters() if p.grad is not None],
    "of the part that has a table": lambda model: model.part.parameters(),
    "of the table": lambda model: model.part["ids"].parameters(),
    "parameters, and a module": lambda model: [*model.parameters(), model.beside],
}


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("where", ["block", "replica"])
def test_all_is_clipped_or_an_error_says_what_is_not(where: str, *, foreach: bool | None) -> None:
    """Dense and sparse gradients and tables, in the chief's block or before a replica's step."""
    with pair(Tower(), Tower(), optimizer=SGD(0.1)) as (replicas, replica):
        ids = torch.tensor([3, 1, 1, 4])

        def check(model: Any, table: Callable[[Any], Any]) -> None:
            for some in SOME.values():
                for call in (clip_grad_norm_, clip_grad_value_):
                    with pytest.raises(errors.InvalidArgumentError, match=r"\(model, ...\)"):
                        call(some(model), 1e-6)
            for whole in WHOLE.values():
                wanted = dense_of(model, table)
                total = nn.utils.clip_grad_norm_(wanted, 0.5)
                found = clip_grad_norm_(whole(model), 0.5, foreach=foreach)
                torch.testing.assert_close(found, total)
                nn.utils.clip_grad_value_(wanted, 0.01)
                clip_grad_value_(whole(model), 0.01, foreach=foreach)
                for one, other in zip(dense_of(model, table), wanted, strict=True):
                    torch.testing.assert_close(one.grad, other.grad)
                    one.grad.mul_(7)
            clip_grad_norm_(model.beside.parameters(), 1e-3)  # a part of the model, on purpose
            clip_grad_norm_(model.beside.weight, 1e-4)
            clip_grad_value_([model.beside, model.rows.weight, model.alone], 1e-5)
            assert (
                float(table(model.alone).abs().max())
                <= 1e-5
                < float(table(model.part["ids"]).max())
            )
            wrong: Any
            for wrong in (model.named_parameters(), ["beside"], [model.beside.weight.grad, 3]):
                with pytest.raises(errors.InvalidArgumentError, match="of a model, of param"):
                    clip_grad_value_(wrong, 1.0)

        replica._model(ids).backward()
        replica._model(ids).backward()
        if where == "replica":
            check(replica._model, lambda one: one._own.merged())
        pass_on(replica)
        with replicas.round(timeout=LONG):
            if where == "block":
                check(replicas._model, lambda one: one.grad)
        for model in (replicas._model, replica._model):
            assert clip_grad_norm_(model.parameters(), 1.0) == 0, "nothing has gradients now"
            clip_grad_value_(model, 1.0)
        replica.close()


def test_a_model_of_tables_alone_is_clipped() -> None:
    """Such a model has no parameters besides its tables."""
    model, other = (cast("Any", nn.ModuleList([TableEmbedding(2)])) for _ in range(2))
    with pair(model, other, optimizer=SGD(0.1)) as (replicas, replica):
        other[0](torch.arange(3)).sum().backward()
        pass_on(replica)
        with replicas.round(timeout=LONG):
            with pytest.raises(errors.InvalidArgumentError, match="'0', a TableEmbedding"):
                clip_grad_norm_(model.parameters(), 1.0)
            torch.testing.assert_close(clip_grad_norm_(model[0], 1.0), torch.tensor(6.0).sqrt())
            model[0].grad.fill_(float("inf"))
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        replica.close()
    assert clip_grad_norm_([], 1.0) == 0


def test_clipping_in_a_round_is_in_the_update() -> None:
    model, other, alone = Words(), Words(), Words()
    with pair(model, other, optimizer=SGD(0.5)) as (replicas, replica):
        hand_over(replica, other, scale=100)
        with replicas.round(timeout=LONG):
            clip_grad_norm_(model.parameters(), 1.0)
        backward(alone, 100)
        clip_grad_norm_(alone.parameters(), 1.0)
        torch.optim.SGD(alone.parameters(), 0.5).step()
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), wanted.detach())
