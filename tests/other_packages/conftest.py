"""A fixture that starts child processes with torch."""

import functools
from collections.abc import Callable, Iterator

import pytest
from helpers.apart import Apart, Crew


@pytest.fixture
def start(namespace: str) -> Iterator[Callable[..., Apart]]:
    """Yield a function that calls another function in a child process with torch."""
    from other_packages.torch_training import (
        start_server,
        within,
    )  # late: most tests do without torch

    start_server()
    crew = Crew("forkserver")
    yield functools.partial(crew.start, within, namespace)
    crew.end()
