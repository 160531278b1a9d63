"""Each test has its own namespace in shared memory, and must leave no names in it."""

import gc
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

# Before these modules are imported, so that their failed assertions show values, too.
pytest.register_assert_rewrite(
    "helpers.support", "helpers.pages", "helpers.thrice", "other_packages.torch_training"
)

from helpers.apart import Crew  # noqa: E402 - see above

from shmacc import testing  # noqa: E402 - see above


def pytest_configure() -> None:
    """Let Ctrl-C end children, though a pytest in a shell's background ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exclude all present objects from garbage collection, which is then ten times faster."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> None:
    """Give each traceback entry a line: without one, pytest fails, and its worker ends.

    A test's timeout is raised at any instruction, and some instructions belong to no line.
    """
    if call.excinfo is None:
        return
    error: BaseException | None = call.excinfo.value
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _with_lines(error.__traceback__)
        error = error.__cause__ or error.__context__
    call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)


def _with_lines(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(entries):
        line = entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, line)
    return traceback


@pytest.fixture(autouse=True)
def namespace() -> Iterator[str]:
    """Run the test in a namespace of its own, which it must leave empty."""
    with testing.isolated_namespace() as own:
        yield own
        # Finalizers must run in the test that made the objects, not in a later one.
        gc.collect()
        left = testing.leaked_names(own)
    assert left == (), f"left in /dev/shm: {left}"


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Child processes, by fork unless the test is parametrised with another start method."""
    made = Crew(getattr(request, "param", "fork"))
    yield made
    made.end()
