"""Optimizers compute as their docstrings say, to the bit, and touch a gradient's rows alone."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from helpers.numpy_optimizers import ALL, Reference

from shmacc import AccumulatorGroup, Parameters, errors, optim

named = pytest.mark.parametrize("optimizer", ALL, ids=repr)


def _any(value: object) -> Any:
    """What a type checker would refuse."""
    return value


def _same(params: Parameters, name: str, reference: Reference) -> None:
    assert params[name].tobytes() == reference.array.tobytes()
    assert params.slots[name].keys() == reference.slots.keys()
    for slot, expected in reference.slots.items():
        assert params.slots[name][slot].tobytes() == expected.tobytes(), slot


@named
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 3, 16, 64, 100])
def test_rows_are_updated_as_numpy_does_it(
    optimizer: optim.Optimizer, dtype: str, width: int
) -> None:
    rng = np.random.default_rng(width)
    table = rng.standard_normal((500, width)).astype(dtype)
    reference = Reference(optimizer, table)
    with Parameters({"table": table}, optimizer=optimizer) as params:
        specs = params.member_specs(sparse=["table"])
        with AccumulatorGroup(specs, reduction_type="SUM") as group:
            for step, count in enumerate([1, 300, 0, 17, 500]):
                rows = rng.permutation(500)[:count]
                values = (rng.standard_normal((count, width)) * 10.0**step).astype(dtype)
                rate = 0.25 if step == 1 else None
                assert group.apply({"table": (rows, values)}, step)
                with group.round(1) as taken:
                    assert params.update(taken, learning_rate=rate)
                reference.update(values, rows, rate)
                _same(params, "table", reference)


@named
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (7,), (1025,), (3, 5, 40), (2, 3000), (0, 4)])
def test_arrays_are_updated_as_numpy_does_it(
    optimizer: optim.Optimizer, dtype: str, shape: tuple[int, ...]
) -> None:
    if getattr(optimizer, "rowwise", False) and not shape:
        return
    rng = np.random.default_rng(len(shape))
    array = rng.standard_normal(shape).astype(dtype)
    reference = Reference(optimizer, array)
    with (
        Parameters({"array": array}, optimizer=optimizer) as params,
        AccumulatorGroup(params.member_specs()) as group,
    ):
        for step in range(4):
            value = np.asarray(rng.standard_normal(shape)).astype(dtype)
            assert group.apply({"array": value}, step)
            with group.round(1) as taken:
                assert params.update(taken)
            reference.update(value)
            _same(params, "array", reference)


@pytest.mark.parametrize("optimizer", [optim.Adagrad(0.1), optim.Adam(0.1)], ids=repr)
def test_many_rows_are_the_same(optimizer: optim.Optimizer) -> None:
    """Enough for their old values to be streamed past the caches."""
    rng = np.random.default_rng(1)
    table = rng.standard_normal((9000, 64)).astype(np.float32)
    reference = Reference(optimizer, table)
    with Parameters({"table": table}, optimizer=optimizer) as params:
        with AccumulatorGroup(params.member_specs(sparse=["table"])) as group:
            for step in range(3):
                rows = rng.permutation(9000)[:8000]
                values = rng.standard_normal((8000, 64)).astype(np.float32)
                assert group.apply({"table": (rows, values)}, step)
                with group.round(1) as taken:
                    assert params.update(taken)
                reference.update(values, rows)
        _same(params, "table", reference)


def test_a_rowwise_accumulator_is_one_number_a_row() -> None:
    optimizer = optim.Adagrad(0.1, rowwise=True)
    with Parameters(
        {"a": np.zeros((5, 4)), "b": np.zeros((2, 3, 4))}, optimizer=optimizer
    ) as params:
        assert params.slots["a"]["accumulator"].shape == (5,)
        assert params.slots["b"]["accumulator"].shape == (2, 3)


def test_slots_have_tensorflows_names() -> None:
    names = {repr(optimizer): [slot.name for slot in optimizer.slots()] for optimizer in ALL}
    assert names[repr(optim.SGD(0.1))] == []
    assert names[repr(optim.SGD(0.1, 0.9))] == ["momentum"]
    assert names[repr(optim.Adagrad(0.05))] == ["accumulator"]
    assert names[repr(optim.RMSprop(0.01))] == ["rms"]
    assert names[repr(optim.RMSprop(0.01, 0.8, 0.5, 1e-7))] == ["rms", "momentum"]
    assert names[repr(optim.Adam(0.01))] == ["m", "v"]
    assert names[repr(optim.Ftrl(0.1))] == ["accumulator", "linear"]


@named
def test_they_are_values(optimizer: optim.Optimizer) -> None:
    assert eval(repr(optimizer), vars(optim)) == optimizer  # noqa: S307  its own repr
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert hash(pickle.loads(pickle.dumps(optimizer))) == hash(optimizer)
    assert optim.of_config(optimizer.config()) == optimizer
    with pytest.raises(AttributeError):
        optimizer.learning_rate = 1.0  # type: ignore[misc]


def test_they_differ_by_class_and_numbers() -> None:
    assert len(set(ALL)) == len(ALL)
    assert optim.Adagrad(1) == optim.Adagrad(1.0)
    assert repr(optim.Adagrad(1)) == repr(optim.Adagrad(1.0))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: optim.SGD(_any("fast")), "learning_rate must be a finite number"),
        (lambda: optim.SGD(_any(np.True_)), "learning_rate must be a finite number"),
        (lambda: optim.SGD(float("nan")), "learning_rate must be a finite number"),
        (lambda: optim.SGD(-1), "learning_rate must not be negative"),
        (lambda: optim.SGD(1, 2), "momentum must be between 0 and 1"),
        (lambda: optim.SGD(1, nesterov=_any(1)), "nesterov must be True or False"),
        (lambda: optim.Adam(1, beta_1=1), "beta_1 must be between 0 and 1"),
        (lambda: optim.AdamW(1, weight_decay=-1), "weight_decay must not be negative"),
        (lambda: optim.Adam(1, as_torch=_any(1)), "as_torch must be True or False"),
        (lambda: optim.Adagrad(1, rowwise=True, weight_decay=1), "rowwise Adagrad has no weight"),
        (lambda: optim.Ftrl(0), "learning_rate must be positive"),
        (lambda: optim.Ftrl(1, 0.5), "learning_rate_power must not be positive"),
        (lambda: optim.Ftrl(1, l1=-1), "l1 must not be negative"),
    ],
)
def test_bad_numbers_are_refused(make: object, what: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=what):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("dtype", "rate"), [("float32", 1e-39), ("float64", 1e-310)])
def test_ftrl_refuses_a_rate_by_which_it_cannot_divide(dtype: str, rate: float) -> None:
    """In the array's dtype; and of the arrays that are updated, no others."""
    contents = {"a": np.ones(2, dtype), "b": np.ones(2, dtype)}
    with pytest.raises(errors.InvalidArgumentError, match=r"learning_rate .* Ftrl, and at least"):
        Parameters(contents, optimizer=optim.Ftrl(rate))
    by = {"a": optim.SGD(1.0), "b": optim.Ftrl(1.0)}
    with (
        Parameters(contents, optimizer=by) as params,
        AccumulatorGroup(params.member_specs()) as group,
    ):
        group.apply({"a": contents["a"], "b": contents["b"]}, 0)
        with group.round(1) as taken:
            for bad in (rate, 0.0):
                with pytest.raises(errors.InvalidArgumentError, match="at least"):
                    params.update(taken, learning_rate=bad)
            assert params.update(taken)
        group.apply({"a": contents["a"]}, 1)
        with group.round(1) as taken:
            assert params.update(taken, learning_rate=0.0), "it is an SGD's"
        assert np.isfinite(params["b"]).all()
