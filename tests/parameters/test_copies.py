"""copy.deepcopy is refused, because the copy would use the same shared memory."""

import copy
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import errors

MADE: Final[dict[str, Callable[[], Any]]] = {
    "parameters": lambda: shmacc.Parameters({"a": np.ones(2)}, optimizer=shmacc.optim.SGD(1)),
    "shared arrays": lambda: shmacc.SharedArrays({"a": np.ones(2)}),
    "a group": lambda: shmacc.AccumulatorGroup({"a": shmacc.TensorSpec((2,))}),
    "an accumulator": lambda: shmacc.ConditionalAccumulator("f4", (2,)),
    "a sparse one": lambda: shmacc.SparseConditionalAccumulator("f4", (2,)),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_deep_copy_is_refused_and_names_the_ways_to_copy(kind: str) -> None:
    with MADE[kind]() as made:
        for holder in made, [made], {"model": made}:
            with pytest.raises(
                errors.InvalidArgumentError, match=r"same memory.*\(\) has|copy\(\)"
            ):
                copy.deepcopy(holder)
        with copy.copy(made) as handle:
            assert handle.shared_name == made.shared_name


def test_the_calls_that_the_error_of_deepcopy_names_make_copies() -> None:
    with MADE["parameters"]() as params, MADE["shared arrays"]() as arrays:
        copies = {name: array.copy() for name, array in arrays.items()}
        copies["a"][:] = 5
        params.snapshot()[1]["a"][:] = 5
        copy.deepcopy(arrays["a"])[:] = 5
        assert arrays["a"].tolist() == params["a"].tolist() == [1, 1]


def test_slots_equal_those_in_a_saved_state() -> None:
    for shape in ((3, 1), (3, 2), (3, 0), (0, 2), (2, 3, 1), (4,), (1,), ()):
        for optimizer in shmacc.optim.Adagrad(1, rowwise=True), shmacc.optim.Adam(1):
            with shmacc.Parameters({"a": np.ones(shape)}, optimizer=optimizer) as params:
                state = params.state()
                for name, slot in params.slots["a"].items():
                    assert slot.shape == state[f"0.{name}"].shape
                    assert slot.tobytes() == state[f"0.{name}"].tobytes()
