"""Updates of parameters equal TensorFlow's training ops.

TensorFlow runs in its own process, because torch's triton crashes beside it.
"""

import importlib
import traceback
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.optimizer_rounds import Ours, assert_close, beginning, gradients

from shmacc import optim

tf = cast("Any", None)  # TensorFlow, in its own process


class Op(NamedTuple):
    """A training op: its name, its slots' first contents, its numbers, other arguments."""

    name: str
    slots: dict[str, float]
    numbers: dict[str, float]
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def apply(self, variables: list[Any], gradient: Any, rows: Any, step: int) -> None:
        """Update the variables by a gradient of some rows, or of all."""
        by = "delta" if self.name == "GradientDescent" else "grad"
        arguments = {by: gradient, **self.more}
        names = ["var", *self.slots]
        arguments |= {name: each.handle for name, each in zip(names, variables, strict=True)}
        numbers = dict(self.numbers)
        if self.name == "Adam":
            numbers |= {f"beta{i}_power": numbers[f"beta{i}"] ** step for i in (1, 2)}
        arguments |= {name: np.asarray(each, gradient.dtype) for name, each in numbers.items()}
        if rows is None:
            getattr(tf.raw_ops, f"ResourceApply{self.name}")(**arguments)
        else:
            getattr(tf.raw_ops, f"ResourceSparseApply{self.name}")(**arguments, indices=rows)


_MOMENTUM: Final = {"lr": 0.1, "momentum": 0.9}
_OPS: Final = {
    optim.SGD(0.1): Op("GradientDescent", {}, {"alpha": 0.1}),
    optim.SGD(0.1, 0.9): Op("Momentum", {"accum": 0}, _MOMENTUM, {"use_nesterov": False}),
    optim.SGD(0.1, 0.9, nesterov=True): Op("Momentum", {"accum": 0}, _MOMENTUM,
        {"use_nesterov": True}),
    optim.Adagrad(0.05, epsilon=1e-7): Op("AdagradV2", {"accum": 0.1},
        {"lr": 0.05, "epsilon": 1e-7}),
    optim.RMSprop(0.01, 0.9, 0.5, 1e-7): Op("RMSProp", {"ms": 0, "mom": 0},
        {"lr": 0.01, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-7}),
    optim.Ftrl(0.1, l1=0.01, l2=0.1): Op("FtrlV2", {"accum": 0.1, "linear": 0},
        {"lr": 0.1, "l1": 0.01, "l2": 0.1, "l2_shrinkage": 0, "lr_power": -0.5}),
    optim.Adam(0.01): Op("Adam", {"m": 0, "v": 0},
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
}  # fmt: skip
_CASES: Final = [
    (optimizer, dtype, sparse)
    for optimizer, op in _OPS.items()
    for dtype, sparse in (("float32", True), ("float64", False), ("float32", False))
    if not (sparse and op.name in {"GradientDescent", "Adam"})  # TensorFlow has no such ops
]


def _compare(optimizer: optim.Optimizer, dtype: str, *, sparse: bool) -> None:
    op, table = _OPS[optimizer], beginning(dtype)
    first = [table, *(np.full_like(table, slot) for slot in op.slots.values())]
    variables = [tf.Variable(array) for array in first]
    ours = Ours(table, optimizer, sparse=sparse)
    before = [variable.numpy().copy() for variable in variables]
    histories = [np.abs(array) for array in before]
    for step, (rows, values) in enumerate(gradients(1, dtype, sparse=sparse), 1):
        ours.update((rows, values) if sparse else values)
        op.apply(variables, values, rows if sparse else None, step)
        found = [ours.params["table"], *ours.params.slots["table"].values()]
        for i, (own, variable) in enumerate(zip(found, variables, strict=True)):
            histories[i] += np.abs(variable.numpy() - before[i])
            before[i] = variable.numpy().copy()
            moment = dtype == "float32" and type(optimizer) is optim.Adam and i == 2
            assert_close(own, variable.numpy(), histories[i], 3e-5 if moment else 1e-6)
    ours.close()


def _differences() -> list[str | None] | None:
    """Return each case's failure (None: it passed), or None if there is no TensorFlow."""
    global tf  # noqa: PLW0603  see the head
    try:
        tf = importlib.import_module("tensorflow")
    except ModuleNotFoundError:
        return None
    found: list[str | None] = []
    for optimizer, dtype, sparse in _CASES:
        try:
            _compare(optimizer, dtype, sparse=sparse)
            found.append(None)
        except AssertionError:
            found.append(traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def differences() -> list[str | None]:
    found: list[str | None] | None = run_apart(_differences, method="spawn")
    if found is None:
        pytest.skip("No module named 'tensorflow'")
    return found


@pytest.mark.parametrize(
    "case", range(len(_CASES)), ids=lambda case: "-".join(map(str, _CASES[case]))
)
def test_updates_equal_tensorflows_ops(differences: list[str | None], case: int) -> None:
    assert differences[case] is None, differences[case]
