"""A chief that dies at any instruction of a table's update leaves all of it or nothing.

Readers, who take no lock, are judged at the same instants, row by row.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers import killing_updates as killing
from helpers.killing_tables import WIDTH, TableScene
from helpers.stepping_tracer import refusal

from shmacc import optim

if TYPE_CHECKING:
    from shmacc import AccumulatorGroup, Parameters

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
# Of the instants at which nothing but contents had changed, one in so many is judged.
_ONE_IN: Final = 1 if os.environ.get("SHMACC_EVERY_INSTANT") else 4


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_at_every_instruction(scene: TableScene) -> None:
    def made(params: Parameters, group: AccumulatorGroup) -> None:
        with group.round(1) as taken:
            scene.update(params, taken)

    before, known = killing.images(scene), killing.states(scene)
    looks = killing.walk(before, killing.images(scene, made), scene.act)
    is_in = False
    for number, look in enumerate(looks):
        if look.in_records or number % _ONE_IN == 0 or number == len(looks) - 1:
            killing.write(look.images)
            found = killing.testify(scene, known)
            assert found or not is_in, f"taken back after {look.step} instructions"
            is_in = found
    assert is_in
    for part in (1, 2, 3):
        with killing.begun(before, scene.act) as child:
            deque(islice(child.steps_to_mark(), looks[len(looks) * part // 4].step), maxlen=0)
            child.kill()
        killing.testify(scene, known)
