"""Numbers that only a newer version knows are refused by name.

A new number needs no new layout version: an older library refuses the segment (CONTRIBUTING.md).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import damage
from helpers.inspect_tool import ask, path_of
from helpers.segment_file import SegmentFile

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, inspection
from shmacc.optim import SGD

NAME = "newer"


def group() -> Any:
    return AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, NAME)


def parameters() -> Any:
    return Parameters({"w": np.zeros(2, np.float32)}, NAME, optimizer=SGD(0.5))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    inspection.remove(NAME, force=True)


@pytest.mark.parametrize(
    ("what", "make"),
    [("dtype", group), ("sum", parameters), ("reduction", group), ("optimizer", parameters)],
)
def test_an_unknown_number_is_refused_and_the_error_names_it(
    make: Callable[[], Any], what: str
) -> None:
    make().close()
    file = SegmentFile(path_of(NAME))
    damage.Directory(what, 77).do(file, file)
    for call in (make, lambda: shmacc.attach(NAME), lambda: inspection.describe(NAME)):
        with pytest.raises(
            errors.DataLossError, match=rf"{what}.* of number 77, which this version"
        ):
            call()
    (listed,) = ask("list", NAME)["segments"]
    assert "of number 77" in listed["detail"]
