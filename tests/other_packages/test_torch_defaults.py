"""torch's default device and dtype apply to the program's tensors, not to the library's."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.support import LONG
from other_packages.torch_training import Mixed, contents, hand_over, pair, same
from torch import nn
from torch.utils import _device

import shmacc
from shmacc import optim
from shmacc.torch import (
    AsyncReplicas,
    StepSampler,
    SyncReplicas,
    TableEmbedding,
    Viewer,
    clip_grad_norm_,
    clip_grad_value_,
    optimizer_of,
)

LIBRARY = Path(shmacc.__file__).parent


def test_each_tensor_that_the_library_makes_names_its_device() -> None:
    """Every call of torch that would use the default device is checked."""
    makers = {made.__name__ for made in _device._device_constructors()} | {"Generator"}
    assert {"zeros", "sparse_coo_tensor", "randperm", "tensor"} <= makers
    calls = 0
    for path in sorted(LIBRARY.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "torch"
                and node.func.attr in makers
                and path.name != "taken.py"  # `torch` is a module of this library there
            ):
                calls += 1
                given = {word.arg for word in node.keywords}
                assert "device" in given or ast.unparse(node).startswith("torch.Generator('cpu')")
    assert calls > 3


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Set the program's defaults, and set them back."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


class Model(Mixed):
    """A model with a table, all on the CPU."""

    def __init__(self) -> None:
        with torch.device("cpu"):
            super().__init__()
        self.ids = TableEmbedding(2, initial=shmacc.init.Normal(0, 1, seed=3), mode="mean")


def train(kind: Any, optimizer: Any) -> dict[str, Any]:
    """Make three rounds; return the model's contents."""
    with torch.device("cpu"):
        words = torch.arange(8)
        bags = torch.tensor([0, 3, 8])
    model, other, third = (cast("Any", Model()) for _ in range(3))
    if optimizer is None:
        for one in (model, other, third):
            one.ids = nn.Identity()
    steps = torch.optim.SGD(model.layer.parameters(), 0.1)
    with pair(model, other, kind, optimizer=optimizer) as (replicas, replica):
        assert len(StepSampler(range(8), replica, 2, epochs=1).batch(0)) == 2
        for step in range(3):
            loss = nn.functional.cross_entropy(other(words), words % 2)
            if optimizer is not None:
                loss = loss + other.ids(words + step, bags).square().sum()
            loss.backward()
            hand_over(replica)
            with replicas.round(timeout=LONG) as update:
                assert model.rows.weight.grad is not None
                assert model.rows.weight.grad.is_sparse
                clip_grad_norm_(model, 1.0)
                clip_grad_value_(model.rows.weight, 0.5)
                if optimizer is None:
                    steps.step()
                else:
                    assert update.ids(model.ids).size
            assert kind is AsyncReplicas or replica.step()
        replicas.load_state_dict(replicas.state_dict())
        with Viewer(third, replicas.shared_name) as viewer:
            viewer.snapshot()
        found = contents(third)
        assert {value.device.type for value in found.values()} == {"cpu"}
        replica.close()
    return found


BY_NAME = {"rows*": optim.Adagrad(0.1), "ids*": optim.Adagrad(0.1), "*": optim.Adam(0.1)}


@pytest.mark.parametrize("optimizer", [None, BY_NAME], ids=["of torch", "of shmacc"])
@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
def test_training_does_not_depend_on_the_defaults(kind: Any, optimizer: Any) -> None:
    expected = train(kind, optimizer)
    with defaults("meta", torch.float32):
        same(train(kind, optimizer), expected)
    with torch.device("meta"):
        same(train(kind, optimizer), expected)


def test_another_default_dtype_changes_new_tables_only() -> None:
    """What `optimizer_of` returns for torch's optimizers stays the same."""
    model, other = Model(), Model()
    with defaults("meta", torch.float64):
        assert TableEmbedding(2)._own.spec.dtype == "float64"
        found = optimizer_of(torch.optim.AdamW(model.layer.parameters(), 0.1))
        assert {part.optimizer for part in found.parts} == {
            optim.AdamW(0.1, weight_decay=0.01, as_torch=True)
        }
        with pair(model, other, optimizer=BY_NAME) as (replicas, replica):
            state = replicas.state_dict()["model"]
            assert {value.dtype for value in state.values() if value.is_floating_point()} == {
                torch.float32,
                torch.bfloat16,
            }
            replica.close()


def test_results_become_tensors_under_any_default() -> None:
    rows = torch.tensor([[0, 2, 2], [1, 0, 0]])
    elements = torch.sparse_coo_tensor(rows, torch.ones(3), (4, 2))
    with defaults("meta", torch.bfloat16):
        members = {
            "dense": shmacc.TensorSpec((), torch.float32),
            "rows": shmacc.IndexedSlicesSpec((4, 2), torch.float32),
        }
        with shmacc.AccumulatorGroup(members) as group:
            dense = torch.ones((), device="cpu", dtype=torch.float32)
            group.apply({"dense": dense, "rows": elements}, 0)
            taken = group.take(1).to_torch()
        assert taken["rows"].device.type == taken["dense"].device.type == "cpu"
        assert taken["dense"].dtype == taken["rows"].dtype == torch.float32
        assert torch.equal(taken["rows"].to_dense(), elements.to_dense())
