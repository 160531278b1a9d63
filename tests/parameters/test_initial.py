"""New rows of tables start with exactly the bits that the docstrings' formulas give."""

import statistics
from typing import Any

import numpy as np
import pytest
from helpers import numpy_initial

import shmacc
from shmacc import _core, errors, init

IDS = np.concatenate([np.arange(1500), 2**32 + np.arange(250), 2**63 - 1 - np.arange(250)]).astype(
    np.int64
)
ALL = [
    init.Constant(0.25),
    init.Uniform(-0.05, 0.05, seed=7),
    init.Uniform(0, 1, seed=2**64 - 1),
    init.Normal(0.5, 2.0, seed=3),
]


def _rows(initial: init.Initial, ids: Any, width: int, dtype: str) -> Any:
    to = np.empty((len(ids), width), dtype)
    as_bytes = to.reshape(-1).view(np.uint8)
    kind, numbers, seed = initial.config()
    _core.initial_rows((kind, list(numbers), seed), ids, width, dtype == "float64", as_bytes)
    return to


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("initial", ALL, ids=repr)
def test_new_rows_equal_docstrings_formulas_to_the_bit(initial: init.Initial, dtype: str) -> None:
    for width in (1, 3, 4, 16, 17):
        expected = numpy_initial.rows(initial, IDS, (width,), dtype)
        assert _rows(initial, IDS, width, dtype).tobytes() == expected.tobytes()


def test_the_model_gives_philoxs_known_answers() -> None:
    # These are the known answers from Random123's file kat_vectors.
    assert [f"{word:08x}" for word in numpy_initial.words(0, np.array([0]), 4)[0].tolist()] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]


def test_uniform_and_normal_have_their_distributions() -> None:
    uniform = _rows(init.Uniform(-1, 3, seed=1), IDS, 16, "float64")
    assert uniform.min() >= -1
    assert uniform.max() < 3
    assert abs(uniform.mean() - 1) < 0.03
    normal = _rows(init.Normal(1, 2, seed=1), IDS, 16, "float64")
    assert abs(normal.mean() - 1) < 0.03
    assert abs(normal.std() - 2) < 0.03
    p = np.array([2.0**-33, 1e-6, 0.075, 0.3, 0.5, 0.9, 1 - 2.0**-33])
    expected = [statistics.NormalDist().inv_cdf(float(x)) for x in p]
    np.testing.assert_allclose(numpy_initial.quantile(p), expected, rtol=1e-13, atol=1e-15)


def test_another_seed_or_id_gives_other_numbers() -> None:
    one, other = (init.Uniform(0, 1, seed=seed) for seed in (1, 2))
    assert not np.array_equal(_rows(one, IDS, 4, "float32"), _rows(other, IDS, 4, "float32"))
    assert len(np.unique(_rows(one, IDS, 1, "float64"))) == len(IDS)


def test_bad_arguments_are_refused() -> None:
    bad: list[tuple[Any, str]] = [
        (lambda: init.Constant(np.inf), "Constant's value must be a finite number"),
        (lambda: init.Uniform(1, 0), "low must not be above its high"),
        (lambda: init.Uniform(-1.7e308, 1.7e308), "high - low must be a finite number"),
        (lambda: init.Normal(0, -1), "stddev must not be negative"),
        (lambda: init.Normal(0, 1, seed=2**64), "seed must be an integer"),
    ]
    no_seeds: list[Any] = [-1, True, 1.5, np.array([1]), int]
    bad += [(lambda n=n: init.Uniform(0, 1, seed=n), "seed must be an integer") for n in no_seeds]
    for make, text in bad:
        with pytest.raises(errors.InvalidArgumentError, match=text):
            make()


def test_initials_are_frozen_and_comparable() -> None:
    assert init.Uniform(0, 1) == init.Uniform(0.0, 1.0, seed=0)
    assert init.Uniform(0, 1) != init.Uniform(0, 1, seed=1)
    assert repr(init.Normal(0, 1)) == "Normal(mean=0.0, stddev=1.0, seed=0)"
    assert shmacc.init.Constant() == init.Constant(0)
