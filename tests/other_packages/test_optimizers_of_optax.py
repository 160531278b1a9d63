"""Updates of parameters equal optax's optimizers, a third reference beside TensorFlow and torch.

Optax has no sparse rows, so gradients are dense. Where its formula differs, ``as_torch`` or an
epsilon of 0 makes both equal.
"""

from typing import Any, Final

import jax
import numpy as np
import optax
import pytest
from helpers.optimizer_rounds import Ours, assert_close, beginning, gradients

from shmacc import optim

_PAIRS: Final[dict[optim.Optimizer, Any]] = {
    optim.SGD(0.1): optax.sgd(0.1), optim.SGD(0.1, 0.9): optax.sgd(0.1, 0.9),
    optim.SGD(0.1, 0.9, nesterov=True): optax.sgd(0.1, 0.9, nesterov=True),
    optim.SGD(0.1, weight_decay=0.01): optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.1)),
    optim.Adagrad(0.05, epsilon=0.0): optax.adagrad(0.05, eps=0.0),
    optim.RMSprop(0.01, epsilon=1e-7): optax.rmsprop(0.01, eps=1e-7),
    optim.RMSprop(0.01, 0.8, 0.5, 1e-3, as_torch=True): optax.chain(
        optax.scale_by_rms(0.8, 1e-3, eps_in_sqrt=False), optax.sgd(0.01, 0.5)),
    optim.Adam(0.01, as_torch=True): optax.adam(0.01),
    optim.Adam(0.1, 0.8, 0.99, 1e-3, as_torch=True): optax.adam(0.1, 0.8, 0.99, 1e-3),
    optim.AdamW(0.1, 0.8, 0.99, 1e-3, 0.1, as_torch=True): optax.adamw(0.1, 0.8, 0.99, 1e-3,
        weight_decay=0.1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", _PAIRS, ids=repr)
def test_updates_equal_optax(optimizer: optim.Optimizer, dtype: str) -> None:
    theirs, contents = _PAIRS[optimizer], beginning(dtype)
    ours = Ours(contents, optimizer, sparse=False)
    with jax.enable_x64(dtype == "float64"):
        array = jax.numpy.asarray(contents)
        state, history = theirs.init(array), np.abs(contents)
        for _, gradient in gradients(5, dtype, sparse=False):
            ours.update(gradient)
            change, state = theirs.update(jax.numpy.asarray(gradient), state, array)
            array = optax.apply_updates(array, change)
            history += np.abs(change)
        assert array.dtype == dtype
        tolerance = 3e-6 if dtype == "float32" else 1e-12
        assert_close(ours.params["table"], np.asarray(array), history, tolerance)
    ours.close()


def test_every_optimizer_of_optax_is_compared() -> None:
    """Add a line above for a new optimizer; optax has no Ftrl."""
    assert {type(optimizer) for optimizer in _PAIRS} == {*optim.KINDS} - {optim.Ftrl}
