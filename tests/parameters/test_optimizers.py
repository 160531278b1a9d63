"""Optimizers compute their docstrings' formulas to the bit, and change a gradient's rows only."""

import pickle
from typing import Any

import numpy as np
import pytest
from helpers.numpy_optimizers import ALL, Reference

from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, optim
from shmacc._base import layout

named = pytest.mark.parametrize("optimizer", ALL, ids=repr)


DTYPES, ROWS = ("float32", "float64"), 60


@named
def test_optimizers_equal_numpy(optimizer: optim.Optimizer) -> None:
    """With rows of several widths, and whole arrays of several shapes."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        f"rows {width}": (ROWS, width) for width in (1, 3, 16, 100)
    }
    shapes |= {str(shape): shape for shape in ((7,), (1025,), (3, 5, 40), (0, 4))}
    if not getattr(optimizer, "rowwise", False):
        shapes["()"] = ()
    contents = {
        f"{name} {dtype}": rng.standard_normal(shape).astype(dtype)
        for name, shape in shapes.items()
        for dtype in DTYPES
    }
    references = {name: Reference(optimizer, array) for name, array in contents.items()}
    sparse = [name for name in contents if name.startswith("rows")]
    with (
        Parameters(contents, optimizer=optimizer) as params,
        AccumulatorGroup(params.member_specs(sparse=sparse), reduction_type="SUM") as group,
    ):
        for step, count in enumerate([1, 40, 0, 17, ROWS]):
            gradient: dict[str, Any] = {}
            for name, array in contents.items():
                shape = (count, *array.shape[1:]) if name in sparse else array.shape
                values = np.asarray(rng.standard_normal(shape) * 10.0**step, array.dtype)
                gradient[name] = values
                if name in sparse:
                    gradient[name] = rng.permutation(ROWS)[:count], values
            assert group.apply(gradient, step)
            rate = 0.25 if step == 1 else None
            with group.round(1) as taken:
                assert params.update(taken, learning_rate=rate)
            for name, reference in references.items():
                if name in sparse:
                    reference.update(gradient[name][1], gradient[name][0], rate)
                else:
                    reference.update(gradient[name], rate=rate)
                _same(params, name, reference)


def _same(params: Parameters, name: str, reference: Reference) -> None:
    assert params[name].tobytes() == reference.array.tobytes(), name
    assert params.slots[name].keys() == reference.slots.keys()
    for slot, expected in reference.slots.items():
        assert params.slots[name][slot].tobytes() == expected.tobytes(), (name, slot)


def test_many_rows_equal_numpy() -> None:
    """So many that their old values are streamed past the caches."""
    optimizer, rng = optim.Adam(0.1), np.random.default_rng(1)
    table = rng.standard_normal((9000, 64)).astype(np.float32)
    reference = Reference(optimizer, table)
    with Parameters({"table": table}, optimizer=optimizer) as params:
        with AccumulatorGroup(params.member_specs(sparse=["table"])) as group:
            for step in range(2):
                rows = rng.permutation(9000)[:8000]
                values = rng.standard_normal((8000, 64)).astype(np.float32)
                assert group.apply({"table": (rows, values)}, step)
                with group.round(1) as taken:
                    assert params.update(taken)
                reference.update(values, rows)
        _same(params, "table", reference)


def test_names_and_shapes_of_slots() -> None:
    """Names are TensorFlow's; a rowwise accumulator has one number a row."""
    for optimizer, names in (
        (optim.SGD(0.1), []),
        (optim.SGD(0.1, 0.9), ["momentum"]),
        (optim.Adagrad(0.05), ["accumulator"]),
        (optim.RMSprop(0.01), ["rms"]),
        (optim.RMSprop(0.01, 0.8, 0.5, 1e-7), ["rms", "momentum"]),
        (optim.Adam(0.01), ["m", "v"]),
        (optim.Ftrl(0.1), ["accumulator", "linear"]),
    ):
        assert [slot.name for slot in optimizer.slots()] == names
    contents = {"a": np.zeros((5, 4)), "b": np.zeros((2, 3, 4))}
    with Parameters(contents, optimizer=optim.Adagrad(0.1, rowwise=True)) as params:
        assert params.slots["a"]["accumulator"].shape == (5,)
        assert params.slots["b"]["accumulator"].shape == (2, 3)


@named
def test_slots_of_new_rows_start_as_those_of_arrays(optimizer: optim.Optimizer) -> None:
    contents = {"array": np.zeros((1, 4), np.float32), "table": TableSpec((4,))}
    with Parameters(contents, optimizer=optimizer) as params:
        for slot, array in params.slots["array"].items():
            np.testing.assert_array_equal(params.slots["table"][slot][[7]], array)


def test_every_optimizer_is_tested() -> None:
    names = {type(optimizer).__name__ for optimizer in ALL}
    assert names == set(layout.OPTIMIZERS) == set(optim.__all__) - {"Optimizer"}


def test_optimizers_are_values() -> None:
    for optimizer in ALL:
        assert eval(repr(optimizer), vars(optim)) == optimizer  # noqa: S307  its own repr
        assert pickle.loads(pickle.dumps(optimizer)) == optimizer
        assert hash(pickle.loads(pickle.dumps(optimizer))) == hash(optimizer)
        assert optim.of_config(optimizer.config()) == optimizer
        with pytest.raises(AttributeError):
            optimizer.learning_rate = 1.0  # type: ignore[misc]
    assert len(set(ALL)) == len(ALL)
    assert optim.Adagrad(1) == optim.Adagrad(1.0)
    assert repr(optim.Adagrad(1)) == repr(optim.Adagrad(1.0))


def test_bad_numbers_are_refused() -> None:
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (optim.SGD, {"learning_rate": "fast"}, "learning_rate must be a finite number"),
        (optim.SGD, {"learning_rate": np.True_}, "learning_rate must be a finite number"),
        (optim.SGD, {"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        (optim.SGD, {"learning_rate": -1}, "learning_rate must not be negative"),
        (optim.SGD, {"momentum": 2}, "momentum must be between 0 and 1"),
        (optim.SGD, {"nesterov": 1}, "nesterov must be True or False"),
        (optim.Adam, {"beta_1": 1}, "beta_1 must be between 0 and 1"),
        (optim.AdamW, {"weight_decay": -1}, "weight_decay must not be negative"),
        (optim.Adam, {"as_torch": 1}, "as_torch must be True or False"),
        (optim.Adagrad, {"rowwise": True, "weight_decay": 1}, "rowwise Adagrad has no weight"),
        (optim.Ftrl, {"learning_rate": 0}, "learning_rate must be positive"),
        (optim.Ftrl, {"learning_rate_power": 0.5}, "learning_rate_power must not be positive"),
        (optim.Ftrl, {"l1": -1}, "l1 must not be negative"),
    ]
    for kind, numbers, what in bad:
        with pytest.raises(errors.InvalidArgumentError, match=what):
            kind(**{"learning_rate": 1} | numbers)


@pytest.mark.parametrize(("dtype", "rate"), [("float32", 1e-39), ("float64", 1e-310)])
def test_ftrl_refuses_a_rate_by_which_it_cannot_divide(dtype: str, rate: float) -> None:
    """In the dtype of the arrays that are updated."""
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
