"""Updates of parameters are those of torch's optimizers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.optimizer_rounds import Ours, assert_close, beginning, gradients

from shmacc import optim

torch = pytest.importorskip("torch")


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
