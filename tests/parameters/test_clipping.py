"""`clip_by_global_norm` uses TensorFlow's formula, also for rows and tables."""

import math
from typing import Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import errors, optim

# The norm of 3, 4 and 12 is 13.
GRADIENT: Final[dict[str, Any]] = {
    "fc": np.array([3.0, 0.0]),
    "emb": ([4, 1], np.array([[0.0, 4.0], [0.0, 0.0]])),
    "ids": ([2**62], np.array([[0.0, 12.0]])),
}


def clipped_to(limit: float, factor: float = 1.0) -> tuple[Any, dict[str, Any], float]:
    with (
        shmacc.Parameters(
            {"fc": np.zeros(2), "emb": np.zeros((5, 2)), "ids": shmacc.TableSpec((2,), "f8")},
            optimizer=optim.SGD(1.0),
        ) as params,
        shmacc.AccumulatorGroup(
            {**params.member_specs(sparse=["emb"]), "seen": shmacc.TensorSpec((), "i8")}
        ) as group,
    ):
        scaled = {"fc": GRADIENT["fc"] * factor, "seen": 1}
        scaled |= {
            name: (rows[0], rows[1] * factor) for name, rows in GRADIENT.items() if name != "fc"
        }
        group.apply(scaled, 0)
        with group.round(1) as taken:
            before = {name: np.copy(_values(taken[name])) for name in GRADIENT}
            clipped, norm = optim.clip_by_global_norm(taken.without("seen"), limit)
            for name, values in before.items():
                np.testing.assert_array_equal(_values(taken[name]), values)  # unchanged
            params.update(taken.only(), gradients=clipped)
        assert params["ids"].ids().tolist() == [2**62]
        found = {"fc": params["fc"].copy(), "emb": params["emb"].copy()}
        return {**found, "ids": params["ids"][[2**62]]}, clipped, norm


def _values(part: Any) -> Any:
    return part.values if hasattr(part, "indices") else part.value


@pytest.mark.parametrize(("limit", "scale"), [(6.5, 0.5), (13.0, 1.0), (math.inf, 1.0), (0, 0.0)])
def test_the_norm_of_all_members_together_is_limited(limit: float, scale: float) -> None:
    arrays, clipped, norm = clipped_to(limit)
    assert norm == 13.0
    assert type(norm) is float
    assert arrays["fc"].tolist() == [-3 * scale, 0]
    assert arrays["emb"][4].tolist() == [0, -4 * scale]
    assert arrays["ids"].tolist() == [[0, -12 * scale]]
    assert list(clipped) == ["fc", "emb", "ids"]
    assert isinstance(clipped["emb"], shmacc.IndexedSlices)
    assert clipped["emb"].indices.tolist() == [1, 4]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_makes_all_gradients_nan(factor: float) -> None:
    with np.errstate(invalid="ignore"):
        arrays, _, norm = clipped_to(1.0, factor)
    assert not math.isfinite(norm)
    assert np.isnan(arrays["fc"]).all()
    assert np.isnan(arrays["emb"][[1, 4]]).all()


def test_the_norm_without_gradients_is_0() -> None:
    assert optim.clip_by_global_norm({}, 1.0) == ({}, 0.0)
    with shmacc.SparseConditionalAccumulator("f4", (None, 2)) as acc:
        clipped, norm = optim.clip_by_global_norm({"rows": acc.snapshot()}, 0.1)
        assert norm == 0.0
        assert clipped["rows"].values.shape == (0, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_formula_is_tensorflows_in_the_dtype_given(dtype: str) -> None:
    """Each number is computed in float64 and rounded once."""
    with shmacc.ConditionalAccumulator(dtype, (1000,)) as acc:
        numbers = np.random.default_rng(1).standard_normal(1000)
        acc.apply_grad(numbers)
        taken = acc.take(1)
        clipped, norm = optim.clip_by_global_norm({"w": taken}, 0.3)
        wide = taken.value.astype(np.float64)
        assert clipped["w"].dtype == taken.value.dtype
        np.testing.assert_allclose(norm, np.linalg.norm(wide), rtol=1e-12)
        expected = (wide * (0.3 / norm)).astype(taken.value.dtype)
        np.testing.assert_array_equal(clipped["w"].astype(np.float64), expected.astype(np.float64))


def test_squares_that_float32_cannot_hold_are_added_up() -> None:
    with shmacc.ConditionalAccumulator("float32", (2,)) as acc:
        acc.apply_grad([3e30, 4e30])
        clipped, norm = optim.clip_by_global_norm({"w": acc.take(1)}, 1.0)
    np.testing.assert_allclose((norm, *clipped["w"]), (5e30, 0.6, 0.8), rtol=1e-6)


@pytest.mark.parametrize(
    "limit", [-1.0, -math.inf, math.nan, 10**400, "1", None, True, np.ones(1), np.ones(2)]
)
def test_a_norm_limit_that_is_negative_or_not_finite_is_refused(limit: Any) -> None:
    with pytest.raises(
        errors.InvalidArgumentError, match=r"clip_norm must (not be neg|be a finite)"
    ):
        optim.clip_by_global_norm({}, limit)


@pytest.mark.parametrize("dtype", ["int64", "complex64", "bool"])
def test_a_value_that_is_no_gradient_is_refused(dtype: str) -> None:
    name = "uint8" if dtype == "bool" else dtype
    with shmacc.ConditionalAccumulator(name, (2,), reduction_type="SUM") as acc:
        acc.apply_grad(np.ones(2, name))
        taken = acc.take(1)
        with pytest.raises(errors.InvalidArgumentError, match="leave it out, by taken"):
            optim.clip_by_global_norm({"seen": taken}, 1.0)
        with pytest.raises(errors.InvalidArgumentError, match="must be a mapping"):
            optim.clip_by_global_norm(taken, 1.0)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match="must be a part of a round"):
            optim.clip_by_global_norm({"seen": [1.0]}, 1.0)
