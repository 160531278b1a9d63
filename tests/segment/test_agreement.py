"""Opening an existing segment with other properties is refused; the error names each difference."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from helpers.opening import KINDS, NAME, apply, in_shared_memory
from helpers.support import refused

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    Parameters,
    SharedArrays,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)


def test_bad_modes_are_refused(namespace: str) -> None:
    for bad in (-1, 0o10000, 6.0, "600", 0o400):
        mode: Any = bad
        with refused():
            ConditionalAccumulator(np.float32, mode=mode)
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "what", "existing", "asked"),
    [
        ({"dtype": "f8"}, "dtype", "float32", "float64"),
        ({"reduction_type": "SUM"}, "reduction_type", "MEAN", "SUM"),
        ({"shape": (3, 4)}, "shape", "[3,2]", "[3,4]"),
        ({"shape": (3,)}, "shape", "[3,2]", "[3]"),
        ({"shape": (None, 2)}, "shape", "[3,2]", "[?,2]"),
        ({"shape": ()}, "shape", "[3,2]", "[]"),
        ({"mode": 0o666}, "mode", "0600", "0666"),
    ],
)
def test_a_difference_names_both_values_and_how_to_remove_the_old_segment(
    kind: Any, other: dict[str, Any], what: str, existing: str, asked: str
) -> None:
    first = {"dtype": "f4", "shape": (3, 2), "shared_name": NAME}
    with kind(**first) as acc:
        apply(acc)
        with refused() as caught:
            kind(**first | other)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.what, error.existing, error.asked) == (what, existing, asked)
        assert f"exists with {what} {existing}, but {asked} was asked for" in str(error)
        assert f"shmacc-inspect remove {error.segment}" in str(error)
        with kind(**first) as same:
            assert same.num_accumulated() == 1
        acc.unlink()


# How one is made, and attached. Read-only, shared arrays may be parameters.
OF_KIND: Final[dict[str, tuple[Callable[[], Any], Callable[[str], Any]]]] = {
    "dense": (lambda: ConditionalAccumulator("f4", None, NAME), ConditionalAccumulator.attach),
    "sparse": (
        lambda: SparseConditionalAccumulator("f4", None, NAME),
        SparseConditionalAccumulator.attach,
    ),
    "group": (lambda: AccumulatorGroup({"a": TensorSpec((4, 3))}, NAME), AccumulatorGroup.attach),
    "arrays": (
        lambda: SharedArrays({"a": np.zeros((4, 3), bool)}, NAME),
        partial(SharedArrays.attach, writable=True),
    ),
    "parameters": (lambda: Parameters({"a": np.zeros((4, 3))}, NAME), Parameters.attach),
}


@pytest.mark.parametrize("kind", OF_KIND)
def test_another_kind_is_refused(kind: str) -> None:
    with OF_KIND[kind][0]() as made:
        for other in OF_KIND.keys() - {kind}:
            construct, attach = OF_KIND[other]
            with refused() as caught:
                construct()
            error = caught.value
            assert (error.what, error.existing, error.asked) == ("kind", kind, other)
            said = r"is the name of.*shmacc\.attach returns whatever has a name"
            with pytest.raises(errors.InvalidArgumentError, match=said) as caught:
                attach(NAME)
            assert "if_exists" not in str(caught.value)
            assert "remove" not in str(caught.value)
        with shmacc.attach(NAME) as found:
            assert type(found) is type(made)
        made.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_an_undeclared_shape_agrees_with_any_shape(kind: Any) -> None:
    with kind(np.float32, (3, 2), "one") as acc:
        with kind(np.float32, None, "one") as taken_over, kind.attach("one") as attached:
            assert acc.shape == taken_over.shape == attached.shape == (3, 2)
        acc.unlink()
    with kind(np.float32, None, "two") as acc:
        # The reverse is a difference: the segment's own shape is unknown.
        with refused():
            kind(np.float32, (3, 2), "two")
        acc.unlink()
