"""What an opener asks for, held against the segment that is there."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
from helpers.opening import KINDS, NAME, apply, in_shared_memory
from helpers.support import refused

import shmacc
from shmacc import ConditionalAccumulator, errors


def test_mode_refused(namespace: str) -> None:
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
def test_a_disagreement_names_both_values_and_how_to_get_rid_of_the_old_one(
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


@pytest.mark.parametrize("kind", KINDS)
def test_disagreement_of_kind(kind: Any) -> None:
    (other,) = set(KINDS) - {kind}
    with kind(np.float32, shared_name="one") as acc:
        with pytest.raises(errors.InvalidArgumentError, match=r"(?i)sparse") as caught:
            other(np.float32, shared_name="one")
        assert re.search("(?i)dense|(?<!Sparse)ConditionalAccumulator", str(caught.value))
        with shmacc.attach("one") as attached:
            assert type(attached) is kind
        acc.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_no_shape_agrees_with_any_shape(kind: Any) -> None:
    with kind(np.float32, (3, 2), "one") as acc:
        with kind(np.float32, None, "one") as taken_over, kind.attach("one") as attached:
            assert acc.shape == taken_over.shape == attached.shape == (3, 2)
        acc.unlink()
    with kind(np.float32, None, "two") as acc:
        # The other way round it is a disagreement: the segment's own is "unknown".
        with refused():
            kind(np.float32, (3, 2), "two")
        acc.unlink()
