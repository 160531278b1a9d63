"""Whoever looks at a segment without its lock sees what was committed at some instant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from helpers.apart import Apart
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import stops
from helpers.support import EVERY_INSTANT, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, _core
from shmacc._layout import names
from shmacc._records.stats import stats_of

if TYPE_CHECKING:
    from helpers.apart import Pipe
    from helpers.stepping_tracer import Mark

NAME: Final = "looked-at"
SHAPES: Final = [(1,), (2, 3), (4, 5, 6), (7,) * 4]
LOOKS: Final = 2_000
_STOPS: Final = 400 if EVERY_INSTANT else 16


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


def _count(mark: Mark) -> None:
    acc: Any = shmacc.attach(NAME)
    with acc:
        acc._handle.state()
        mark()
        state = acc._handle.state()
        mark()
        seen = stats_of(state)
        assert seen.applied == seen.taken + seen.discarded + seen.num_accumulated, seen


def _apply_to_both(acc: Any) -> None:
    for contributor in range(2):
        acc.apply_grad([1.0], NEVER_STALE, contributor=contributor)


@needs_ptrace
def test_counts_of_two_lanes() -> None:
    """A reader that stands still between two lanes does not add up two rounds."""
    with ConditionalAccumulator("f4", None, NAME, lanes=2) as acc:
        _apply_to_both(acc)
        # Then it asks the kernel who is alive.
        for _ in stops(_count, _STOPS, 0.04, 0.25):
            acc.take_grad(2)
            _apply_to_both(acc)
        acc.unlink()
