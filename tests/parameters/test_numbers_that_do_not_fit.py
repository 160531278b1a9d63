"""Numbers that an array's dtype does not have are refused wherever they come in, and named."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.support import same_bits

from shmacc import AccumulatorGroup, Parameters, SharedArrays, TensorSpec, errors, optim

if TYPE_CHECKING:
    from collections.abc import Callable

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


def by_update(dtype: str, *, rows: bool) -> Callable[[Any], np.ndarray[Any, Any]]:
    """Return what gives an array new contents by an update, and returns them."""

    def put(value: Any) -> np.ndarray[Any, Any]:
        specs = {"a": TensorSpec((2,), dtype) if dtype != "bool" else np.zeros(2, bool)}
        with (
            Parameters({**specs, "w": np.zeros(1)}, optimizer={"w": optim.SGD(1)}) as params,
            AccumulatorGroup({"w": TensorSpec((1,), "f8")}) as group,
        ):
            group.apply({"w": [1.0]}, 0)
            with group.round(1) as taken:
                try:
                    params.update(taken, {"a": ([1, 0], value) if rows else value})
                finally:
                    update = group.stats().update
                    if update is None:  # refused, so the round is not final
                        params.skip(taken)
            return np.array(params["a"][:: -1 if rows else 1])

    return put


def by_assignment(dtype: str) -> Callable[[Any], np.ndarray[Any, Any]]:
    def put(value: Any) -> np.ndarray[Any, Any]:
        given = np.zeros(2, bool) if dtype == "bool" else TensorSpec((2,), dtype)
        with SharedArrays({"a": given}) as shared:
            shared["a"] = value
            return shared["a"].copy()

    return put


WAYS: Final[dict[str, Callable[[str], Callable[[Any], np.ndarray[Any, Any]]]]] = {
    "update, all of it": lambda dtype: by_update(dtype, rows=False),
    "update, rows": lambda dtype: by_update(dtype, rows=True),
    "an assignment to shared arrays": by_assignment,
}


@pytest.mark.parametrize("told", ["warn", "raise"])
@pytest.mark.parametrize(("dtype", "given", "said"), REFUSED)
@pytest.mark.parametrize("way", WAYS)
def test_refused(way: str, dtype: str, given: Any, said: str, told: Any) -> None:
    put = WAYS[way](dtype)
    with (
        warnings.catch_warnings(action="error"),
        np.errstate(all=told),
        pytest.raises(errors.InvalidArgumentError, match=said),
    ):
        put(given)


@pytest.mark.parametrize("told", ["warn", "raise"])
@pytest.mark.parametrize(("dtype", "given", "expected"), CONVERTED)
@pytest.mark.parametrize("way", WAYS)
def test_converted(way: str, dtype: str, given: Any, expected: list[Any], told: Any) -> None:
    put = WAYS[way](dtype)
    with warnings.catch_warnings(action="error"), np.errstate(all=told):
        assert put(given).tolist() == expected


def test_row_numbers_that_do_not_fit() -> None:
    with (
        Parameters({"a": np.zeros((2, 1))}, optimizer=optim.SGD(1)) as params,
        AccumulatorGroup(params.member_specs()) as group,
    ):
        group.apply({}, 0)
        with group.round(1) as taken:
            for rows in np.array([2**63], np.uint64), [0.5], [np.nan], [True]:
                with pytest.raises(errors.InvalidArgumentError, match="row numbers of array 'a'"):
                    params.update(taken, {"a": (rows, [[1.0]])})
            params.skip(taken)


OPTIMIZERS: Final = [
    optim.SGD(0.1),
    optim.SGD(0.1, 0.9, nesterov=True),
    optim.Adagrad(0.1),
    optim.Adagrad(0.1, rowwise=True),
    optim.RMSprop(0.1),
    optim.RMSprop(0.1, momentum=0.9),
    optim.Adam(0.1),
    optim.Ftrl(0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_learning_rate_that_does_not_fit(optimizer: optim.Optimizer) -> None:
    """It would be infinite, and 0 times infinity is no number: of a zero gradient, too."""
    one = np.ones((1, 1), np.float32)
    with (
        Parameters({"a": one}, optimizer=optimizer) as params,
        AccumulatorGroup(params.member_specs(["a"])) as group,
    ):
        group.apply({"a": ([0], 0 * one)}, 0)
        with group.round(1) as taken:
            with pytest.raises(errors.InvalidArgumentError, match=r"learning_rate.*1e\+39"):
                params.update(taken, learning_rate=1e39)
            assert group.stats().update is None
            params.update(taken, learning_rate=1e30)
        assert np.isfinite(params["a"]).all()


TOO_LARGE: Final = [
    optim.SGD(1e39),
    optim.Adagrad(1e39),
    optim.Adagrad(0.1, initial_accumulator_value=1e39),
    optim.Adagrad(0.1, epsilon=1e39),
    optim.RMSprop(0.1, epsilon=1e39),
    optim.Adam(1e39),
    optim.Adam(1e38, 0.999, 0.1),  # the correction makes it larger
    optim.Adam(0.1, epsilon=1e39),
    optim.AdamW(0.1, weight_decay=1e39),
    optim.AdamW(1e37, weight_decay=1e38),
    optim.Ftrl(1e39),
    optim.Ftrl(0.1, l1=1e39),
    optim.Ftrl(0.1, initial_accumulator_value=1e39),
]


@pytest.mark.parametrize("optimizer", TOO_LARGE, ids=str)
def test_an_optimizer_whose_numbers_do_not_fit(optimizer: optim.Optimizer) -> None:
    with (
        np.errstate(all="raise"),
        pytest.raises(
            errors.InvalidArgumentError, match=r"must be at most .* in the array's dtype"
        ),
    ):
        Parameters({"a": np.ones(1, np.float32)}, optimizer=optimizer)
    with Parameters({"a": np.ones(1)}, optimizer=optimizer):
        pass


def test_an_initial_value_that_is_tiny() -> None:
    tiny = optim.Adagrad(0.1, initial_accumulator_value=1e-46)
    with (
        np.errstate(all="raise"),
        Parameters({"a": np.ones(1, np.float32)}, optimizer=tiny) as params,
    ):
        same_bits(params.slots["a"]["accumulator"], np.zeros(1, np.float32))
