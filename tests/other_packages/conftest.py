"""A fixture that starts child processes which have torch."""

import functools
from collections.abc import Callable, Iterator

import pytest
from helpers.apart import Apart, Crew


@pytest.fixture
def start(namespace: str) -> Iterator[Callable[..., Apart]]:
    """Return a function that starts a child, which has torch and calls another function."""
    from other_packages.torch_training import (
        start_server,
        within,
    )  # late: most tests do without torch

    start_server()
    crew = Crew("forkserver")
    yield functools.partial(crew.start, within, namespace)
    crew.end()
