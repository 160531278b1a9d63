"""Two cleaners that meet over one segment remove each file once, and each tells what it removed."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from helpers.stepping_calls import NAMES, Calling, needs_failures

from shmacc import ConditionalAccumulator, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from helpers.stepping_tracer import Mark

pytestmark = pytest.mark.beyond_asan


def clean_up() -> list[str]:
    """Remove what nobody has any more; what was removed."""
    found = inspection.leftovers(namespace=names.current_namespace())
    return [name for leftover in found for name in inspection.clean(leftover)]


def clean_and_tell(said: int, mark: Mark) -> None:
    mark()
    removed = clean_up()
    mark()
    os.write(said, json.dumps(removed).encode())


@needs_failures
@pytest.mark.parametrize("unlinked", [1, 2])
def test_a_cleaner_between_the_names_that_another_removes(unlinked: int) -> None:
    ConditionalAccumulator("float32", [2], "left").close()
    expected = sorted(testing.leaked_names(names.current_namespace()))
    reader, writer = os.pipe()
    with Calling(lambda mark: clean_and_tell(writer, mark)) as first:
        first.run_to_mark()
        seen = 0
        for call in first.calls_to_mark():
            seen += call.before and NAMES.get(call.number) == "unlink"
            if seen == unlinked and not call.before:
                break
        removed = clean_up()
        first.finish()
    os.close(writer)
    removed += json.loads(os.read(reader, 1000))
    os.close(reader)
    assert sorted(removed) == expected
    assert len(expected) == 2
