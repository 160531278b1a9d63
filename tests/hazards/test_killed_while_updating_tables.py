"""A chief that dies at any instruction of a table's update leaves all of it or nothing.

Readers, who take no lock, are judged at the same instants, row by row.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
from helpers import killing_updates as killing
from helpers.killing_tables import WIDTH, TableScene
from helpers.stepping_tracer import refusal

from shmacc import optim

pytestmark = [
    pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}"),
]

# A bucket of the index has ten entries, and an index of up to seven rows one bucket.
_SIX: Final = (1, 2, 3, 4, 5, 2**40)
SCENES: Final = (
    TableScene("the first rows", optim.SGD(0.5), changed=(0, 7, 2**63 - 1)),
    TableScene(
        "rows on free slots and new ones, rows removed",
        optim.Adagrad(0.1),
        there=_SIX,
        gone=(2, 3),
        changed=(1, 2, 4, 9, 10),
        removed=(2, 5, 10, 77),
    ),
    TableScene(
        "an id that comes again, with another index",
        optim.Adam(0.1),
        there=_SIX,
        gone=(2,),
        changed=(1, 2, 6, 7, 8, 9, 10, 11),
        removed=(3, 2**40),
    ),
    TableScene(
        "rows that are set",
        optim.SGD(0.5, momentum=0.5),
        there=_SIX,
        gone=(2,),
        changed=(1,),
        removed=(1, 4),
        values={"t": ([1, 2, 9], np.ones((3, WIDTH), np.float32))},
    ),
    TableScene(
        "a skipped round", optim.SGD(0.5), there=_SIX, gone=(2,), changed=(1, 9), skips=True
    ),
)


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: TableScene) -> None:
    killing.judge_every_instruction(scene)
