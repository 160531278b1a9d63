"""Fixtures for tests of accumulators, and a hook that runs tests that are coroutines."""

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from shmacc import ConditionalAccumulator


@pytest.fixture
def lanes() -> int:
    """Return the number of ``acc``'s lanes; test files may override it."""
    return 1


@pytest.fixture
def acc(lanes: int) -> Iterator[ConditionalAccumulator]:
    """A dense accumulator of sums, named "acc", unlinked at the end."""
    with ConditionalAccumulator("f8", (), "acc", reduction_type="SUM", lanes=lanes) as made:
        yield made
        made.unlink()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
