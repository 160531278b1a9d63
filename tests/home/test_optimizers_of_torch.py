"""Updates of parameters are those of torch's optimizers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.optimizer_rounds import Ours, assert_close, beginning, gradients

from shmacc import optim

torch = pytest.importorskip("torch")
optimizer_of = pytest.importorskip("shmacc.torch").optimizer_of


@pytest.mark.parametrize(("first", "expected"), [("empty", -0.0744), (None, -0.1)])
def test_sparse_adam_counts_an_empty_gradient_and_ours_does_not(
    first: str | None, expected: float
) -> None:
    """docs/torch.md gives both numbers; where torch has no gradient, both are equal."""
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_adam_as_torchs_sparse_adam(dtype: str) -> None:
    table = beginning(dtype)
    theirs = torch.nn.Parameter(torch.from_numpy(table.copy()))
    adam = torch.optim.SparseAdam([theirs], lr=0.01)
    ours = Ours(table, optim.Adam(0.01), sparse=True)
    before, history = table, np.abs(table)
    for rows, values in gradients(2, dtype, sparse=True):
        ours.update((rows, values))
        theirs.grad = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None],
            torch.from_numpy(values),
            table.shape,
            check_invariants=True,
        )
        adam.step()
        history += np.abs(theirs.detach().numpy() - before)
        before = theirs.detach().numpy().copy()
        assert_close(ours.params["table"], theirs.detach().numpy(), history)
    state = adam.state[theirs]
    assert_close(ours.params.slots["table"]["m"], state["exp_avg"].numpy(), np.ones_like(table))
    assert_close(ours.params.slots["table"]["v"], state["exp_avg_sq"].numpy(), np.ones_like(table))
    ours.close()


@pytest.mark.parametrize("scale", [1, 1e-4, 1e-8])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "SparseAdam"])
def test_torchs_own_at_their_defaults(name: str, scale: float) -> None:
    """Of small gradients, too, where epsilon counts; and of ones without rows."""
    sparse = name == "SparseAdam"
    table = beginning("float32")
    theirs = torch.nn.Parameter(torch.from_numpy(table.copy()))
    optimizer = getattr(torch.optim, name)([theirs])
    ours = Ours(table, optimizer_of(optimizer).parts[0].optimizer, sparse=sparse)
    random = np.random.default_rng(3)
    for step in range(100):
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
