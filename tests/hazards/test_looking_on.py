"""Whoever looks at a segment without its lock sees what was committed at some instant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from helpers.apart import Apart
from helpers.support import until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, _core
from shmacc._layout import names

if TYPE_CHECKING:
    from helpers.apart import Pipe

NAME: Final = "looked-at"
SHAPES: Final = [(1,), (2, 3), (4, 5, 6), (7,) * 4]
LOOKS: Final = 20_000


def _turn(*, pipe: Pipe) -> None:
    gradients = [np.ones(shape, np.float32) for shape in SHAPES]
    acc: Any = shmacc.attach(NAME)
    pipe.say("turning")
    while True:
        for gradient in gradients:
            acc.apply_grad(gradient, NEVER_STALE)
            acc.take_grad(1)


def test_a_rounds_shape() -> None:
    """Each round has another one, and its place in the header is used by every other round."""
    with ConditionalAccumulator("f4", None, NAME) as acc:
        view = _core.view(names.segment_name(NAME).path)[2]
        assert view is not None
        with Apart(_turn) as turning:
            turning.hear()
            seen: set[Any] = set()

            def look() -> bool:
                for _ in range(LOOKS):
                    shape = view.state()["round_shape"]
                    seen.add(None if shape is None else tuple(shape))
                return seen >= set(SHAPES)

            until(look)
        assert seen <= {None, *SHAPES}
        acc.unlink()
