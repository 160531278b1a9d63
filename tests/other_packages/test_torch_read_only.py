"""torch writes to read-only memory: an exception says what to do, and nothing has changed."""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch
from helpers.denied_calls import MAP_ANEW, deny, needs_denials
from helpers.support import LONG
from other_packages.torch_training import NAME, contents, hand_over, make_round, pair, same
from torch import nn

import shmacc
from shmacc import errors
from shmacc.optim import SGD, Adam
from shmacc.torch import Replica, SyncReplicas

ADAM: Final = Adam(0.1)


class Words(nn.Module):
    """A model with rows, and with a layer of several pages of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.rows = nn.Embedding(100, 64)
        self.layer = nn.Linear(64, 200)

    def forward(self, words: torch.Tensor) -> Any:
        return self.layer(self.rows(words))


def chief_of(model: nn.Module, optimizer: Any = ADAM, total: int = 1) -> SyncReplicas:
    return SyncReplicas(model, NAME, total_num_replicas=total, optimizer=optimizer)


def step(optimizer: Any, model: nn.Module, **options: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer(model.parameters(), lr=0.1, **options).step()
    finally:
        for parameter in model.parameters():
            parameter.grad = None


def to_numpy(model: Any) -> None:
    model.layer.weight.detach().numpy()[3] = 1
    len(())  # Python raises at the end of a call


@torch.no_grad()
def in_place(write: Callable[[torch.Tensor], Any], model: Any) -> None:
    write(model.layer.weight)
    len(())


def ones_like(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.ones_like(value) for name, value in state.items()}


def look_up(model: Any) -> None:
    nn.functional.embedding(torch.tensor([3, 4]), model.rows.weight, max_norm=0.01)


WRITES: Final[dict[str, Callable[[Any], Any]]] = {
    "load_state_dict": lambda model: model.load_state_dict(ones_like(model.state_dict())),
    "SGD": lambda model: step(torch.optim.SGD, model),
    "Adam, fused": lambda model: step(torch.optim.Adam, model, fused=True),
    "embedding with max_norm": look_up,
    "nn.init": lambda model: nn.init.xavier_uniform_(model.layer.weight),
    "clipping rows": lambda model: in_place(
        lambda weight: weight.copy_(torch.renorm(weight, 2, 0, 0.1)), model
    ),
    "one number": lambda model: in_place(lambda weight: weight[-1, -1].fill_(7), model),
    "out=": lambda model: in_place(lambda weight: torch.mul(weight, 2, out=weight), model),
    "numpy": to_numpy,
}


class Training:
    """A chief and a replica; a test writes to the model of one of them."""

    def __init__(self, which: str) -> None:
        """Make the models of chief and replica; `which` says whose model is written to."""
        self.of_chief, self.of_replica = Words(), Words()
        self.written = self.of_chief if which == "chief" else self.of_replica
        self.of_torch = "torch" in which
        self.chief = chief_of(self.of_chief, None if self.of_torch else ADAM)
        self.replica = Replica(self.of_replica, NAME, 0, timeout=0.01)

    def hand_over(self) -> None:
        self.of_replica(torch.tensor([1, 2])).sum().backward()
        hand_over(self.replica)

    def update(self) -> None:
        self.hand_over()
        with self.chief.round(timeout=LONG):
            if self.of_torch:
                torch.optim.SGD(self.of_chief.parameters(), 0.1).step()
        assert self.replica.step()

    def close(self) -> None:
        self.replica.close()
        self.chief.close()


@pytest.fixture(params=["chief"])
def training(request: pytest.FixtureRequest, namespace: str) -> Iterator[Training]:  # noqa: ARG001
    made = Training(request.param)
    yield made
    made.close()


def _and_go_on(write: Any, model: Any) -> None:
    """Write; Python raises a pending exception at the latest where the loop goes back."""
    write(model)
    for _ in range(2):
        pass


READ_ONLY: Final = ["chief", "replica", "replica of torch's optimizer"]


@pytest.mark.parametrize(
    ("training", "name"),
    [(READ_ONLY[i % 3], name) for i, name in enumerate(WRITES)],
    indirect=["training"],
)
def test_a_write_to_a_model_raises_and_changes_nothing(training: Training, name: str) -> None:
    write = WRITES[name]
    before = contents(training.of_chief)
    with pytest.raises(RuntimeError, match="read-only in this process") as caught:
        _and_go_on(write, training.written)
    # torch's load_state_dict turns each exception into a RuntimeError.
    loads = name == "load_state_dict"
    assert isinstance(caught.value, errors.FailedPreconditionError) != loads
    assert "copy.deepcopy(model)" in str(caught.value)
    same(contents(training.of_chief), before)
    same(contents(training.of_replica), before)
    training.update()
    assert not torch.equal(training.of_chief.layer.weight, before["layer.weight"])
    same(contents(training.of_replica), contents(training.of_chief))


@pytest.mark.parametrize("write", ["clipping rows", "SGD"])
def test_a_write_in_the_block_does_not_change_the_round(training: Training, write: str) -> None:
    before = contents(training.of_chief)
    training.hand_over()
    with (
        pytest.raises(errors.FailedPreconditionError, match=r"in a round change \.grad"),
        training.chief.round(timeout=LONG),
    ):
        _and_go_on(WRITES[write], training.of_chief)
    same(contents(training.of_chief), before)
    with training.chief.round(timeout=LONG) as update:
        assert update.step == 0


@pytest.mark.parametrize("training", ["replica"], indirect=True)
def test_a_threads_write_raises_at_its_next_step(training: Training) -> None:
    """The exception may be raised in the main thread instead, if that thread is first."""
    before = contents(training.of_chief)

    def work() -> None:
        _and_go_on(WRITES["one number"], training.of_replica)
        training.replica.step()

    with (
        ThreadPoolExecutor() as executor,
        pytest.raises(errors.FailedPreconditionError, match="read-only in this process"),
    ):
        executor.submit(work).result(LONG)
    same(contents(training.of_replica), before)


def test_a_tensor_on_an_array_is_guarded_without_a_model() -> None:
    """The page on torch shows this: torch.from_numpy(params["layer"])."""
    with shmacc.Parameters({"layer": torch.ones(50, 50)}, optimizer=ADAM) as params:
        with warnings.catch_warnings(action="ignore"):  # torch warns once about the read-only array
            tensor = torch.from_numpy(params["layer"])
        with pytest.raises(errors.FailedPreconditionError, match="Array 'layer'"):
            _and_go_on(torch.Tensor.zero_, tensor)
        assert torch.equal(tensor, torch.ones(50, 50))


def test_copies_and_unshared_models_may_be_written() -> None:
    """A copy of a shared model may be written, and so may a model before it is shared."""
    model = Words()
    WRITES["load_state_dict"](model)
    with pair(model, Words(), optimizer=ADAM):
        assert torch.equal(model.layer.weight, torch.ones(200, 64))
        for name, write in WRITES.items():
            if name != "clipping rows":
                write(copy.deepcopy(model))
        same(contents(model), ones_like(model.state_dict()))


@pytest.mark.parametrize(
    ("optimizer", "write"), [((ADAM, None)[i % 2], name) for i, name in enumerate(WRITES)]
)
def test_torch_alone_can_go_on_training_models_after_the_end(optimizer: Any, write: str) -> None:
    """Only the model of a chief with torch's optimizer stays in memory that others read."""
    models = Words(), Words()
    with pair(*models, optimizer=optimizer):
        pass
    for model, other in (models[::-1], models):
        before, others = contents(model), contents(other)
        alone = copy.deepcopy(model)
        torch.manual_seed(3)
        WRITES[write](alone)
        torch.manual_seed(3)
        WRITES[write](model)
        same(contents(model), contents(alone))
        assert any(not torch.equal(before[name], value) for name, value in contents(model).items())
        same(contents(other), others)  # a replica's model is private after its first write


def test_a_replica_that_has_left_trains_on_by_itself() -> None:
    """The replica follows the others until its first write; then its parameters are its own."""
    model, leaves, stays = Words(), Words(), Words()
    with chief_of(model, SGD(0.1), 2) as chief, Replica(stays, NAME, 1, timeout=0.01) as replica:

        def update() -> None:
            stays(torch.tensor([1, 2])).sum().backward()
            make_round(chief, replica)

        with Replica(leaves, NAME, 0, timeout=LONG):
            pass
        update()
        same(contents(leaves), contents(model))
        own = contents(leaves)
        _and_go_on(WRITES["numpy"], leaves)
        update()
        own["layer.weight"][3] = 1
        same(contents(leaves), own)
        assert not torch.equal(model.rows.weight, own["rows.weight"])
        same(contents(stays), contents(model))


def _write_for_good(which: str) -> None:
    training = Training(which)
    deny("madvise")
    deny("mmap", a3=MAP_ANEW)
    with pytest.raises(errors.FailedPreconditionError, match="could not be undone") as caught:
        _and_go_on(WRITES["one number"], training.written)
    said = re.escape(str(caught.value))
    for _ in range(2):
        training.of_replica(torch.tensor([1, 2])).sum().backward()
        if which == "replica":
            with pytest.raises(errors.FailedPreconditionError, match=said):
                training.replica.step()
        else:
            hand_over(training.replica)
            with (
                pytest.raises(errors.FailedPreconditionError, match=said),
                training.chief.round(timeout=LONG),
            ):
                pass
    training.close()


@needs_denials
@pytest.mark.parametrize("which", ["chief", "replica"])
def test_training_is_refused_after_a_write_that_cannot_be_undone(start: Any, which: str) -> None:
    start(_write_for_good, which).result()


def _train_on_without_a_guard() -> None:
    os.environ["SHMACC_GUARD"] = "0"
    models = Words(), Words()
    with pair(*models, optimizer=ADAM):
        pass
    for model, other in (models[::-1], models):
        before, others = contents(model), contents(other)
        WRITES["SGD"](model)
        assert not torch.equal(before["layer.weight"], model.layer.weight)
        same(contents(other), others)


def test_without_a_guard_models_can_be_trained_on_too(start: Any) -> None:
    start(_train_on_without_a_guard).result()
