"""`exits.way` decides how a handle ends, for all combinations of its arguments."""

import itertools
from typing import Final

import pytest

from shmacc._segment.exits import Hook, Way, way

# The columns: hook, main_over, others and failed (arguments of `way`; "*": any), and the result.
# The first row that fits decides.
TABLE: Final = (
    (Hook.OBJECT, "*", True, "*", Way.ANNOUNCE_END), (Hook.OBJECT, "*", False, "*", Way.CLOSE),
    ("*", "*", False, "*", Way.LEAVE), ("*", True, True, "*", Way.ANNOUNCE_END),
    ("*", False, True, True, Way.ANNOUNCE_END), ("*", False, True, False, Way.LEAVE_LAST),
)  # fmt: skip


@pytest.mark.parametrize("hook", Hook)
def test_every_combination_of_arguments_ends_as_in_the_table(hook: Hook) -> None:
    for facts in itertools.product([False, True], repeat=3):
        over, others, failed = facts
        expected = next(
            chosen
            for *given, chosen in TABLE
            if all(one in {"*", other} for one, other in zip(given, (hook, *facts), strict=True))
        )
        assert way(hook, main_over=over, others=others, failed=failed) is expected
