"""Optimizers compute exactly their docstrings' formulas, and change only a gradient's rows."""

import pickle
from typing import Any

import numpy as np
import pytest
from helpers.numpy_optimizers import ALL, OF_ROWS, Reference
from helpers.support import same_bits, update_once
from helpers.training import training

from shmacc import AccumulatorGroup, Parameters, TableSpec, TensorSpec, errors, optim
from shmacc._base import layout

named = pytest.mark.parametrize("optimizer", [*ALL, *OF_ROWS], ids=repr)


DTYPES, ROWS = ("float32", "float64"), 60


@named
def test_optimizers_give_the_bits_of_the_numpy_reference(optimizer: optim.Optimizer) -> None:
    """Sparse gradients have rows of several widths, dense gradients several shapes."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        f"rows {width}": (ROWS, width) for width in (1, 3, 16, 100)
    }
    shapes |= {str(shape): shape for shape in ((3, 5, 40), (2, 3000), (70, 7), (0, 4))}
    if optimizer not in OF_ROWS:
        shapes |= {"(7,)": (7,), "(1025,)": (1025,)}
    if not getattr(optimizer, "rowwise", False):
        shapes |= {"(4, 0)": (4, 0)} if optimizer in OF_ROWS else {"()": ()}
    contents = {
        f"{name} {dtype}": rng.standard_normal(shape).astype(dtype)
        for name, shape in shapes.items()
        for dtype in DTYPES
    }
    references = {name: Reference(optimizer, array) for name, array in contents.items()}
    sparse = [name for name in contents if name.startswith("rows")]
    with training(contents, optimizer, sparse=sparse, reduction_type="SUM") as (params, group):
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


def test_an_update_of_many_rows_gives_the_bits_of_the_numpy_reference() -> None:
    """With this many rows, their old values are written past the caches."""
    optimizer, rng = optim.Adam(0.1), np.random.default_rng(1)
    table = rng.standard_normal((9000, 64)).astype(np.float32)
    reference = Reference(optimizer, table)
    with Parameters({"table": table}, optimizer=optimizer) as params:
        with AccumulatorGroup(params.member_specs(sparse=["table"])) as group:
            for _ in range(2):
                rows = rng.permutation(9000)[:8000]
                values = rng.standard_normal((8000, 64)).astype(np.float32)
                assert update_once(params, group, {"table": (rows, values)})
                reference.update(values, rows)
        _same(params, "table", reference)


def test_slots_have_the_documented_names_and_shapes() -> None:
    """The names are TensorFlow's; a rowwise accumulator has one number for each row."""
    for optimizer, names in (
        (optim.SGD(0.1), []), (optim.SGD(0.1, 0.9), ["momentum"]),
        (optim.Adagrad(0.05), ["accumulator"]), (optim.RMSprop(0.01), ["rms"]),
        (optim.RMSprop(0.01, 0.8, 0.5, 1e-7), ["rms", "momentum"]), (optim.Adam(0.01), ["m", "v"]),
        (optim.Ftrl(0.1), ["accumulator", "linear"]),
    ):  # fmt: skip
        assert [slot.name for slot in optimizer.slots()] == names
    contents = {"a": np.zeros((5, 4)), "b": np.zeros((2, 3, 4))}
    with Parameters(contents, optimizer=optim.Adagrad(0.1, rowwise=True)) as params:
        assert params.slots["a"]["accumulator"].shape == (5,)
        assert params.slots["b"]["accumulator"].shape == (2, 3)


@named
def test_slots_of_new_rows_start_like_those_of_arrays(optimizer: optim.Optimizer) -> None:
    contents = {"array": np.zeros((1, 4), np.float32), "table": TableSpec((4,))}
    with Parameters(contents, optimizer=optimizer) as params:
        for slot, array in params.slots["array"].items():
            np.testing.assert_array_equal(params.slots["table"][slot][[7]], array)


def test_every_optimizer_is_tested() -> None:
    names = {type(optimizer).__name__ for optimizer in ALL}
    constraints = {type(each.constraint).__name__ for each in [*ALL, *OF_ROWS] if each.constraint}
    assert names == set(layout.OPTIMIZERS)
    assert constraints == set(layout.CONSTRAINTS)
    assert {*names, *constraints} <= set(optim.__all__)


def test_optimizers_are_equal_after_pickle_repr_and_config() -> None:
    for optimizer in [*ALL, *OF_ROWS]:
        assert eval(repr(optimizer), vars(optim)) == optimizer  # noqa: S307  its own repr
        assert pickle.loads(pickle.dumps(optimizer)) == optimizer
        assert hash(pickle.loads(pickle.dumps(optimizer))) == hash(optimizer)
        assert optim.of_config(optimizer.config()) == optimizer
        with pytest.raises(AttributeError):
            optimizer.learning_rate = 1.0  # type: ignore[misc]
    assert len(set(ALL)) == len(ALL)
    assert optim.Adagrad(1) == optim.Adagrad(1.0)
    assert repr(optim.Adagrad(1)) == repr(optim.Adagrad(1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "constraint",
    [optim.UnitNorm(), optim.MaxNorm(2.0), optim.MaxNorm(0), optim.NonNeg(), optim.Clip(0.5, 2)],
    ids=repr,
)
def test_a_constraint_keeps_rows_of_nans_or_zeros(constraint: optim.Constraint, dtype: str) -> None:
    """A NaN stays, and so does a row whose norm is not finite. Zeros stay, except with Clip."""
    nan, inf, most = np.nan, np.inf, float(np.finfo(dtype).max)
    rows = np.array(
        [[0, -0.0], [3, -4], [nan, 3], [-3, nan], [inf, 1], [-inf, -1], [most, most], [1e-40, 0]],
        dtype,
    )
    optimizer = optim.SGD(1.0, constraint=constraint)
    reference = Reference(optimizer, rows)
    contents = {"array": rows, "zeros": TensorSpec(rows.shape, dtype)}
    with (
        np.errstate(all="ignore"),
        training(contents, optimizer, sparse=["array"], reduction_type="SUM") as (params, group),
    ):
        same_bits(params["array"], reference.array)
        same_bits(params["zeros"], Reference(optimizer, np.zeros_like(rows)).array)
        assert update_once(params, group, {"array": (np.arange(len(rows)), np.zeros_like(rows))})
        reference.update(np.zeros_like(rows), np.arange(len(rows)))
        same_bits(params["array"], reference.array)


def test_new_contents_of_an_array_with_a_constraint_are_stored_as_given() -> None:
    """The constraint applies to rows that a later update changes; a skip changes no row."""
    contents = {"rows": np.ones((4, 2)), "table": TableSpec((2,), "float64")}
    given = np.array([[3.0, 4.0], [6.0, 8.0]])
    with training(contents, optim.SGD(0.0, constraint=optim.UnitNorm()), sparse=["rows"]) as (
        params,
        group,
    ):
        group.apply({"rows": ([0], [[1.0, 1.0]])}, 0)
        with group.round(1):
            params.update({}, {name: ([1, 2], given) for name in contents})
        group.apply({name: ([2], [[0.0, 0.0]]) for name in contents}, 1)
        with group.round(1) as taken:
            params.skip(taken)
        for name in contents:
            same_bits(params[name][[1, 2]], given)
        update_once(params, group, {name: ([2], [[0.0, 0.0]]) for name in contents})
        state = params.state()
        for name in contents:
            np.testing.assert_allclose(params[name][[1, 2]], [[3.0, 4.0], [0.6, 0.8]])
        params.restore(state)  # a row of this state violates the constraint
        for name in contents:
            np.testing.assert_allclose(params[name][[1, 2]], [[3.0, 4.0], [0.6, 0.8]])


def test_bad_constraints_are_refused() -> None:
    bad: list[tuple[Any, tuple[Any, ...], str]] = [
        (optim.MaxNorm, (-1,), "MaxNorm's max_value must not be negative, but was -1"),
        (optim.MaxNorm, (np.nan,), "MaxNorm's max_value must be a finite number, but was nan"),
        (optim.MaxNorm, ([1.0, 2.0],), "MaxNorm's max_value must be a finite number"),
        (optim.Clip, (np.nan, 1), "Clip's low must be a finite number, but was nan"),
        (optim.Clip, (0, np.inf), "Clip's high must be a finite number, but was inf"),
        (optim.Clip, (0, np.ones(1)), "Clip's high must be a finite number, but was array"),
        (optim.Clip, (1, 0.5), "Clip's low must not be above its high, but they were 1 and 0.5"),
    ]
    for kind, limits, what in bad:
        with pytest.raises(errors.InvalidArgumentError, match=what):
            kind(*limits)
    for wrong in (optim.UnitNorm, 1.0, "UnitNorm"):
        with pytest.raises(errors.InvalidArgumentError, match="SGD's constraint must be None or"):
            optim.SGD(0.1, constraint=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "why"), [
    (optim.NonNeg(), r"as in SGD\(0\.1, constraint=NonNeg\(\)\)"),
    (optim.SGD, "must be an object of shmacc.optim's SGD, .* but was <class"),
    (optim.SGD(0.1, constraint=optim.Clip(-1e300, 1)), "low must be at least -3.4e"),
    (optim.SGD(0.1, constraint=optim.Clip(-1, 1e300)), "high must be at most 3.4e"),
], ids=repr)  # fmt: skip
def test_a_wrong_optimizer_is_refused(wrong: Any, why: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=why):
        Parameters({"w": np.ones((2, 2), np.float32)}, optimizer=wrong)


@pytest.mark.parametrize("constraint", [optim.UnitNorm(), optim.MaxNorm(1.0)], ids=repr)
@pytest.mark.parametrize("one", [np.ones(3), np.float32(1), TableSpec(())], ids=repr)
def test_a_norm_of_single_number_rows_is_refused(constraint: optim.Constraint, one: Any) -> None:
    contents = {"rows": np.ones((3, 2)), "one": one}
    optimizer = optim.SGD(0.1, constraint=constraint)
    with pytest.raises(errors.InvalidArgumentError, match="two dimensions or more, but 'one' has"):
        Parameters(contents, "refused", optimizer=optimizer)
    Parameters(contents, "refused", optimizer={"rows": optimizer}, unlink_on_close=True).close()


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
        (optim.Ftrl, {"learning_rate": 0}, "learning_rate must be positive"),
        (optim.Ftrl, {"learning_rate_power": 0.5}, "learning_rate_power must not be positive"),
        (optim.Ftrl, {"l1": -1}, "l1 must not be negative"),
    ]
    for kind, numbers, what in bad:
        with pytest.raises(errors.InvalidArgumentError, match=what):
            kind(**{"learning_rate": 1} | numbers)


@pytest.mark.parametrize(("dtype", "rate"), [("float32", 1e-39), ("float64", 1e-310)])
def test_ftrl_refuses_a_rate_too_small_to_divide_by(dtype: str, rate: float) -> None:
    """The division happens in the dtype of the updated arrays."""
    contents = {"a": np.ones(2, dtype), "b": np.ones(2, dtype)}
    with pytest.raises(errors.InvalidArgumentError, match=r"learning_rate .* Ftrl, and at least"):
        Parameters(contents, optimizer=optim.Ftrl(rate))
    by = {"a": optim.SGD(1.0), "b": optim.Ftrl(1.0)}
    with training(contents, by) as (params, group):
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
