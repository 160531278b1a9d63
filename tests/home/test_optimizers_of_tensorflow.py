"""Updates of parameters are those of TensorFlow's training ops.

TensorFlow runs in a process of its own, as for other tests: torch's triton crashes beside it.
"""

from __future__ import annotations

import importlib
import traceback
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.optimizer_rounds import Ours, assert_close, beginning, gradients

from shmacc import optim

tf = cast("Any", None)  # in that process: TensorFlow

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Array = npt.NDArray[Any]


def _variables(table: Array, *slots: float) -> list[Any]:
    return [tf.Variable(table), *(tf.Variable(np.full_like(table, slot)) for slot in slots)]


def _sgd(v: list[Any], g: Any, _: Any) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=v[0].handle, alpha=np.asarray(0.1, g.dtype), delta=g
    )


def _momentum(*, nesterov: bool) -> Callable[..., None]:
    def apply(v: list[Any], g: Any, rows: Any) -> None:
        numbers = {"lr": np.asarray(0.1, g.dtype), "momentum": np.asarray(0.9, g.dtype)}
        given = {"var": v[0].handle, "accum": v[1].handle, "grad": g, "use_nesterov": nesterov}
        if rows is None:
            tf.raw_ops.ResourceApplyMomentum(**given, **numbers)
        else:
            tf.raw_ops.ResourceSparseApplyMomentum(**given, **numbers, indices=rows)

    return apply


def _adagrad(v: list[Any], g: Any, rows: Any) -> None:
    given = {"var": v[0].handle, "accum": v[1].handle, "grad": g}
    numbers = {"lr": np.asarray(0.05, g.dtype), "epsilon": np.asarray(1e-7, g.dtype)}
    if rows is None:
        tf.raw_ops.ResourceApplyAdagradV2(**given, **numbers)
    else:
        tf.raw_ops.ResourceSparseApplyAdagradV2(**given, **numbers, indices=rows)


def _rmsprop(v: list[Any], g: Any, rows: Any) -> None:
    given = {"var": v[0].handle, "ms": v[1].handle, "mom": v[2].handle, "grad": g}
    floats = {"lr": 0.01, "rho": 0.9, "momentum": 0.5, "epsilon": 1e-7}
    numbers = {name: np.asarray(number, g.dtype) for name, number in floats.items()}
    if rows is None:
        tf.raw_ops.ResourceApplyRMSProp(**given, **numbers)
    else:
        tf.raw_ops.ResourceSparseApplyRMSProp(**given, **numbers, indices=rows)


def _ftrl(v: list[Any], g: Any, rows: Any) -> None:
    given = {"var": v[0].handle, "accum": v[1].handle, "linear": v[2].handle, "grad": g}
    floats = {"lr": 0.1, "l1": 0.01, "l2": 0.1, "l2_shrinkage": 0.0, "lr_power": -0.5}
    numbers = {name: np.asarray(number, g.dtype) for name, number in floats.items()}
    if rows is None:
        tf.raw_ops.ResourceApplyFtrlV2(**given, **numbers)
    else:
        tf.raw_ops.ResourceSparseApplyFtrlV2(**given, **numbers, indices=rows)


def _adam() -> Callable[..., None]:
    done = 0

    def apply(v: list[Any], g: Any, rows: Any) -> None:
        nonlocal done
        assert rows is None
        done += 1
        numbers = {
            "beta1_power": 0.9**done,
            "beta2_power": 0.999**done,
            "lr": 0.01,
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-8,
        }
        tf.raw_ops.ResourceApplyAdam(
            var=v[0].handle,
            m=v[1].handle,
            v=v[2].handle,
            grad=g,
            **{name: np.asarray(number, g.dtype) for name, number in numbers.items()},
        )

    return apply


_OPS: dict[optim.Optimizer, tuple[Callable[[], Callable[..., None]], tuple[float, ...]]] = {
    optim.SGD(0.1): (lambda: _sgd, ()),
    optim.SGD(0.1, 0.9): (lambda: _momentum(nesterov=False), (0.0,)),
    optim.SGD(0.1, 0.9, nesterov=True): (lambda: _momentum(nesterov=True), (0.0,)),
    optim.Adagrad(0.05, epsilon=1e-7): (lambda: _adagrad, (0.1,)),
    optim.RMSprop(0.01, 0.9, 0.5, 1e-7): (lambda: _rmsprop, (0.0, 0.0)),
    optim.Ftrl(0.1, l1=0.01, l2=0.1): (lambda: _ftrl, (0.1, 0.0)),
    optim.Adam(0.01): (_adam, (0.0, 0.0)),
}
_WITHOUT_ROWS = {optim.SGD(0.1), optim.Adam(0.01)}  # TensorFlow has no such ops


_CASES = [
    (optimizer, dtype, sparse)
    for optimizer in _OPS
    for dtype in ("float32", "float64")
    for sparse in (False, True)
    if not (sparse and optimizer in _WITHOUT_ROWS)
]


def _compare(optimizer: optim.Optimizer, dtype: str, *, sparse: bool) -> None:
    make, initial = _OPS[optimizer]
    table = beginning(dtype)
    variables, apply = _variables(table, *initial), make()
    ours = Ours(table, optimizer, sparse=sparse)
    before = [variable.numpy().copy() for variable in variables]
    histories = [np.abs(array) for array in before]
    for rows, values in gradients(1, dtype, sparse=sparse):
        ours.update((rows, values) if sparse else values)
        apply(variables, values, rows if sparse else None)
        found = [ours.params["table"], *ours.params.slots["table"].values()]
        for i, (own, variable) in enumerate(zip(found, variables, strict=True)):
            histories[i] += np.abs(variable.numpy() - before[i])
            before[i] = variable.numpy().copy()
            moment = dtype == "float32" and type(optimizer) is optim.Adam and i == 2
            assert_close(own, variable.numpy(), histories[i], 3e-5 if moment else 1e-6)
    ours.close()


def _differences() -> list[str | None] | None:
    """What each case came to: None, or its failure; None for all: there is no TensorFlow."""
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
    """What each case came to."""
    found: list[str | None] | None = run_apart(_differences, method="spawn")
    if found is None:
        pytest.skip("No module named 'tensorflow'")
    return found


@pytest.mark.parametrize(
    "case", range(len(_CASES)), ids=lambda case: "-".join(map(str, _CASES[case]))
)
def test_as_tensorflows_ops(differences: list[str | None], case: int) -> None:
    assert differences[case] is None, differences[case]
