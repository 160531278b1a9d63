"""Each test has its own namespace in shared memory, and must leave no names in it."""

import gc
import importlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

# Must come before these modules are imported: then their failed assertions show values.
pytest.register_assert_rewrite(
    "helpers.support", "helpers.pages", "helpers.thrice", "other_packages.torch_training"
)

from helpers.apart import Crew  # noqa: E402 - see above
from helpers.support import LONG  # noqa: E402 - see above

from shmacc import ConditionalAccumulator, testing  # noqa: E402 - see above


def pytest_configure() -> None:
    """Undo a launcher's ignored signals: tests need Ctrl-C and the exit status of children."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Make garbage collections ten times faster: they skip all objects that exist now."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> None:
    """Give each traceback entry a line number: without one, pytest fails, and its worker ends.

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


@pytest.fixture(scope="session")
def watch() -> Iterator[Callable[[str, float], None]]:
    """End a test in which a wait of the library lasts too long."""
    if importlib.util.find_spec("helpers.patience") is None:  # without inspection (`make floors`)
        yield lambda _namespace, _seconds: None
        return
    with importlib.import_module("helpers.patience").Watchdog() as watchdog:
        yield watchdog.watch


@pytest.fixture(autouse=True)
def namespace(request: pytest.FixtureRequest, watch: Callable[[str, float], None]) -> Iterator[str]:
    """Run the test in a namespace of its own, which it must leave empty."""
    # In these folders, waits last longer: other processes import torch, JAX or Ray first.
    usual = LONG if request.path.parent.name in {"other_packages", "on_ray"} else LONG / 3
    patience = request.node.get_closest_marker("patience")
    with testing.isolated_namespace() as own:
        watch(own, patience.args[0] if patience else usual)
        yield own
        watch("", 0)
        # Finalizers must run in the test that made the objects, not in a later one.
        gc.collect()
        left = testing.leaked_names(own)
    assert left == (), f"left in /dev/shm: {left}"


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


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Child processes, by fork unless the test is parametrised with another start method."""
    made = Crew(getattr(request, "param", "fork"))
    yield made
    made.end()
