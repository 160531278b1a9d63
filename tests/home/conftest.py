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
    from home.torch_training import start_server, within  # late: most tests do without torch

    start_server()
    crew = Crew("forkserver")
    yield functools.partial(crew.start, within, namespace)
    crew.end()
