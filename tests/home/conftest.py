"""Children for the tests beside other packages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from helpers.apart import Apart, Crew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def start(namespace: str) -> Iterator[Callable[..., Apart]]:
    """Start a child that has torch, and calls a function with arguments."""
    from home.torch_training import within  # late: most tests here do without torch

    crew = Crew("forkserver")
    yield functools.partial(crew.start, within, namespace)
    crew.end()
