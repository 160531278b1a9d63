"""Every test has names of its own in shared memory, and must leave none of them behind."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from support import Crew

from shmacc import testing

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def namespace() -> Iterator[str]:
    """Put the test into a namespace of its own and hold it to leaving that empty."""
    with testing.isolated_namespace() as own:
        yield own
        # Finalizers fire in the test that made the objects, not in whichever comes next.
        gc.collect()
        left = testing.leaked_names(own)
    assert left == (), f"left in /dev/shm: {left}"


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Child processes, by fork unless the test is parametrised with another start method."""
    made = Crew(getattr(request, "param", "fork"))
    yield made
    made.end()
