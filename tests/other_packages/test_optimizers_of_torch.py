"""Updates of parameters equal torch's optimizers."""

import numpy as np
import pytest
import torch
from helpers.optimizer_rounds import Ours, beginning

from shmacc import optim
from shmacc.torch import optimizer_of


@pytest.mark.parametrize(("first", "expected"), [("empty", -0.0744), (None, -0.1)])
def test_only_torchs_sparse_adam_counts_empty_gradients(first: str | None, expected: float) -> None:
    """docs/torch.md gives both results. Neither optimizer counts a step without any gradient."""
    theirs = torch.nn.Parameter(torch.zeros(4, 1))
    adam = torch.optim.SparseAdam([theirs], lr=0.1)
    ours = Ours(np.zeros((4, 1), np.float32), optim.Adam(0.1), sparse=True)
    for rows in [], [1]:
        values = np.ones((len(rows), 1), np.float32)
        ours.update((np.array(rows, np.int64), values))
        theirs.grad = None
        if rows or first == "empty":
            theirs.grad = torch.sparse_coo_tensor(
                torch.tensor([rows], dtype=torch.int64),
                torch.from_numpy(values),
                (4, 1),
                check_invariants=True,
            )
        adam.step()
    assert theirs[1].item() == pytest.approx(expected, abs=1e-4)
    assert ours.params["table"][1, 0] == pytest.approx(-0.1, abs=1e-4)
    ours.close()


@pytest.mark.parametrize(("name", "scale"), [
    *((name, 1e-8) for name in ("Adagrad", "Adam", "AdamW", "RMSprop", "SparseAdam")), ("SGD", 1),
    ("Adam", 1e-4), ("SparseAdam", 1),
])  # fmt: skip
def test_updates_equal_torchs_optimizers_at_their_defaults(name: str, scale: float) -> None:
    """Also with gradients so small that epsilon counts, and with gradients without rows."""
    sparse = name == "SparseAdam"
    table = beginning("float32")
    theirs = torch.nn.Parameter(torch.from_numpy(table.copy()))
    optimizer = getattr(torch.optim, name)([theirs])
    ours = Ours(table, optimizer_of(optimizer).parts[0].optimizer, sparse=sparse)
    random = np.random.default_rng(3)
    for step in range(50):
        rows = np.sort(random.choice(len(table), 0 if step % 5 == 2 else 10, replace=False))
        shape = (len(rows), *table.shape[1:]) if sparse else table.shape
        values = (scale * random.standard_normal(shape)).astype(np.float32)
        ours.update((rows, values) if sparse else values)
        gradient = torch.from_numpy(values.copy())
        if sparse:
            numbers = torch.from_numpy(rows)[None]
            gradient = torch.sparse_coo_tensor(
                numbers, gradient, table.shape, check_invariants=True
            )
        theirs.grad = gradient
        optimizer.step()
    np.testing.assert_allclose(ours.params["table"], theirs.detach().numpy(), rtol=0, atol=1e-6)
    ours.close()
