"""Numbers that an array's dtype cannot hold are refused everywhere, and the error names them."""

import warnings
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import same_bits, update_once
from helpers.training import training

from shmacc import AccumulatorGroup, Parameters, SharedArrays, TensorSpec, errors, optim

REFUSED: Final[list[tuple[str, Any, str]]] = [
    ("int32", np.array([2**31, 2**40]), "2147483648, which does not fit int32"),
    ("int32", [2**31, 2**40], "2147483648, which does not fit int32"),
    ("int64", np.array([2**63, 0], np.uint64), "9223372036854775808, which does not fit int64"),
    ("uint8", [300, 0], "300, which does not fit uint8"),
    ("uint8", [-1, 0], "-1, which does not fit uint8"),
    ("uint8", np.array([1, 2]), "same_kind"),
    ("bool", [1, 2], "2, which does not fit bool"),
    ("float16", np.array([1e9, 0]), "infinite in float16"),
    ("float16", [70000, 0], "infinite in float16"),
    ("bfloat16", [3.4e38, 0], "infinite in bfloat16"),
    ("float32", np.array([1e39, 0]), "infinite in float32"),
    ("complex64", np.array([1e39j, 0]), "infinite in complex64"),
    ("complex64", np.array([complex(np.nan, 1e39), 0]), "infinite in complex64"),
    ("complex64", np.array([complex(1e39, np.nan), 0]), "infinite in complex64"),
    ("float32", np.array([1j, 0]), "same_kind"),
    ("int32", [1.5, 0], "must be integers"),
    ("int32", np.array([1.0, 0]), "same_kind"),
    ("float32", [None, 0], "must be an array of numbers"),
    ("qint8", np.array([1.0, 0]), "same_kind"),
]
CONVERTED: Final[list[tuple[str, Any, list[Any]]]] = [
    ("int32", np.array([2**31 - 1, -(2**31)]), [2**31 - 1, -(2**31)]),
    ("int32", [1.0, 2.0], [1, 2]),
    ("bool", [1, 0], [True, False]),
    ("uint8", np.array([255, 0], np.uint64), [255, 0]),
    ("float16", np.array([1e-30, np.inf]), [0, np.inf]),
    ("float32", np.array([1, 2], np.int64), [1, 2]),
    ("qint8", np.array([1, -2], np.int64), [(1,), (-2,)]),
]


DTYPES: Final = sorted({dtype for dtype, *_ in REFUSED + CONVERTED})
OF_TWO: Final = {name: TensorSpec((2,), name) for name in DTYPES if name != "bool"}
CONTENTS: Final = {**OF_TWO, "bool": np.zeros(2, bool), "w": np.zeros(1)}


@pytest.mark.parametrize("told", ["warn", "raise"])
@pytest.mark.parametrize("by_rows", [False, True])
def test_an_update_refuses_numbers_that_do_not_fit(by_rows: bool, told: Any) -> None:
    with (
        warnings.catch_warnings(action="error"),
        np.errstate(all=told),
        Parameters(CONTENTS, optimizer={"w": optim.SGD(1)}) as params,
        AccumulatorGroup({"w": TensorSpec((1,), "f8")}) as group,
    ):
        group.apply({"w": [1.0]}, 0)
        with group.round(1) as taken:
            for dtype, given, said in REFUSED:
                with pytest.raises(errors.InvalidArgumentError, match=said):
                    params.update(taken, {dtype: ([1, 0], given) if by_rows else given})
            assert group.stats().update is None  # so the round is not final
            params.skip(taken)
        for dtype, given, expected in CONVERTED:
            update_once(params, group, {"w": [1.0]}, {dtype: ([1, 0], given) if by_rows else given})
            assert params[dtype][:: -1 if by_rows else 1].tolist() == expected


@pytest.mark.parametrize("told", ["warn", "raise"])
def test_an_assignment_to_shared_arrays_refuses_numbers_that_do_not_fit(told: Any) -> None:
    with (
        warnings.catch_warnings(action="error"),
        np.errstate(all=told),
        SharedArrays(CONTENTS) as shared,
    ):
        for dtype, given, said in REFUSED:
            with pytest.raises(errors.InvalidArgumentError, match=said):
                shared[dtype] = given
        for dtype, given, expected in CONVERTED:
            shared[dtype] = given
            assert shared[dtype].tolist() == expected


def test_row_numbers_that_do_not_fit_are_refused() -> None:
    with training({"a": np.zeros((2, 1))}, optim.SGD(1)) as (params, group):
        group.apply({}, 0)
        with group.round(1) as taken:
            for rows in np.array([2**63], np.uint64), [0.5], [np.nan], [True]:
                with pytest.raises(errors.InvalidArgumentError, match="row numbers of array 'a'"):
                    params.update(taken, {"a": (rows, [[1.0]])})
            params.skip(taken)


def test_a_learning_rate_that_does_not_fit_is_refused() -> None:
    """In float32 the rate would be infinite, and infinity times a zero gradient is NaN."""
    one = np.ones((1, 1), np.float32)
    for optimizer in (
        optim.SGD(0.1, 0.9, nesterov=True), optim.Adagrad(0.1), optim.Adagrad(0.1, rowwise=True),
        optim.RMSprop(0.1), optim.Adam(0.1), optim.Ftrl(0.1),
    ):  # fmt: skip
        with training({"a": one}, optimizer, sparse=["a"]) as (params, group):
            group.apply({"a": ([0], 0 * one)}, 0)
            with group.round(1) as taken:
                with pytest.raises(errors.InvalidArgumentError, match=r"learning_rate.*1e\+39"):
                    params.update(taken, learning_rate=1e39)
                assert group.stats().update is None
                params.update(taken, learning_rate=1e30)
            assert np.isfinite(params["a"]).all()


def test_an_optimizer_whose_numbers_do_not_fit_is_refused() -> None:
    for optimizer in (
        optim.SGD(1e39),
        optim.Adagrad(0.1, initial_accumulator_value=1e39),
        optim.Adagrad(0.1, epsilon=1e39),
        optim.RMSprop(0.1, epsilon=1e39),
        optim.Adam(1e39),
        optim.Adam(1e38, 0.999, 0.1),  # the bias correction makes the rate too large
        optim.Adam(0.1, epsilon=1e39),
        optim.AdamW(0.1, weight_decay=1e39),
        optim.Ftrl(1e39),
        optim.Ftrl(0.1, l1=1e39),
        optim.Ftrl(0.1, initial_accumulator_value=1e39),
    ):
        too_large = pytest.raises(errors.InvalidArgumentError, match=r"at most .*'s dtype")
        with np.errstate(all="raise"), too_large:
            Parameters({"a": np.ones(1, np.float32)}, optimizer=optimizer)
        Parameters({"a": np.ones(1)}, optimizer=optimizer).close()


@pytest.mark.parametrize(
    "kind",
    [kind for kind in optim.KINDS if hasattr(kind, "weight_decay")],
    ids=lambda k: k.__name__,
)
def test_a_decoupled_decay_times_the_rate_must_fit(kind: Any) -> None:
    """This holds for every optimizer with a decoupled decay; an L2 penalty has no such product."""
    array, given = {"a": np.ones(1, np.float32)}, kind(1e37, weight_decay=1e38)
    if not given.decoupled:
        Parameters(array, optimizer=given).close()
        return
    too_large = pytest.raises(errors.InvalidArgumentError, match="times weight_decay must be at m")
    with too_large:
        Parameters(array, optimizer=given)
    with training(array, kind(0, weight_decay=1e38)) as (params, group):
        group.apply(array, 0)
        with group.round(1) as taken:
            with too_large:
                params.update(taken, learning_rate=10.0)
            params.skip(taken)


def test_an_initial_value_too_small_for_the_dtype_becomes_0() -> None:
    tiny = optim.Adagrad(0.1, initial_accumulator_value=1e-46)
    with (
        np.errstate(all="raise"),
        Parameters({"a": np.ones(1, np.float32)}, optimizer=tiny) as params,
    ):
        same_bits(params.slots["a"]["accumulator"], np.zeros(1, np.float32))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float32", "bfloat16"])
def test_an_empty_array_fits_every_dtype(dtype: str) -> None:
    """An empty batch is often `np.array([])`, which has dtype float64."""
    nothing, table = np.array([]), np.zeros((2, 3), bool)
    w: Any = table if dtype == "bool" else TensorSpec((2, 3), dtype)
    empty: list[Any] = [([], []), (nothing, nothing), ((), nothing), (np.zeros(0, int), [])]
    with (
        Parameters({"w": w, "f": np.zeros(2)}, optimizer={"f": optim.SGD(0.1)}) as params,
        AccumulatorGroup({"f": TensorSpec((2,), "float64")}) as group,
    ):
        for given in empty:
            update_once(params, group, {"f": np.ones(2)}, values={"w": given})
        assert params.step == len(empty)
        assert not params["w"].astype(float).any()
