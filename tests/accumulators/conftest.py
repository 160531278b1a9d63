"""What tests of several processes share; and tests that are coroutines run."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest

from shmacc import ConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lanes() -> int:
    """How many lanes ``acc`` has; files may say otherwise."""
    return 1


@pytest.fixture
def acc(lanes: int) -> Iterator[ConditionalAccumulator]:
    """A dense accumulator of sums, named so, removed at the end."""
    with ConditionalAccumulator("f8", (), "acc", reduction_type="SUM", lanes=lanes) as made:
        yield made
        made.unlink()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
