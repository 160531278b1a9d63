"""``attach`` with a timeout waits for the name to appear, but at most that long."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from helpers.apart import Apart, Pipe
from helpers.support import LONG, refused

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, _core, errors

NAME: Final = "awaited"
every_attach = pytest.mark.parametrize(
    "attach", [shmacc.attach, ConditionalAccumulator.attach], ids=["attach", "class"]
)


def make() -> ConditionalAccumulator:
    return ConditionalAccumulator("f4", (), NAME)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore that each attempt to open a missing name releases."""
    looks = threading.Semaphore(0)
    look = _core.open

    def told(*args: Any) -> Any:
        found = look(*args)
        if found[0] == "nothing":
            looks.release()
        return found

    monkeypatch.setattr(_core, "open", told)
    return looks


@every_attach
def test_attach_waits_for_its_timeout(attach: Callable[..., Any], namespace: str) -> None:
    for how in ({}, {"timeout": None}):
        with pytest.raises(errors.NotFoundError):
            attach(NAME, **how)
    for seconds in (0, 0.02):
        before = time.monotonic()
        with pytest.raises(TimeoutError, match=f"after {seconds} seconds") as caught:
            attach(NAME, timeout=seconds)
        assert time.monotonic() - before >= seconds
        error = pickle.loads(pickle.dumps(caught.value))
        assert type(error) is errors.DeadlineExceededError
        assert f"nothing named {NAME!r} in the namespace {namespace!r}" in str(error)
        assert (error.shared_name, error.namespace) == (NAME, namespace)
    with make() as acc:
        acc.apply_grad(1.0)
        for enough in (0, 0.5, float("inf"), 10**400):
            with attach(NAME, timeout=enough) as other:
                assert other.num_accumulated() == 1
        with refused():  # a segment of another kind ends the wait
            SparseConditionalAccumulator.attach(NAME, timeout=LONG)
        pickled = pickle.dumps(acc)
        acc.unlink()
    with pytest.raises(errors.NotFoundError):  # pickled handles do not wait
        pickle.loads(pickled)


def test_attach_waits_for_another_process_to_make_the_segment() -> None:
    def count_attached(*, pipe: Pipe) -> int:
        pipe.say()
        with ConditionalAccumulator.attach(NAME, timeout=LONG) as acc:
            return acc.num_accumulated()

    with Apart(count_attached).ready() as waiter, make() as acc:
        assert waiter.result() == 0
        acc.unlink()


def test_attach_waits_on_if_the_name_is_removed_while_it_attaches(
    monkeypatch: pytest.MonkeyPatch, looked: threading.Semaphore
) -> None:
    """`attach` opens the file; the name is removed before `attach` looks at it again."""
    with make() as old:
        assert looked.acquire(timeout=0)  # released when `make` found no segment yet
        look = _core.open

        def then_unlinked(*args: Any) -> Any:
            monkeypatch.setattr(_core, "open", look)
            found = look(*args)
            old.unlink()
            return found

        monkeypatch.setattr(_core, "open", then_unlinked)
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(ConditionalAccumulator.attach, NAME, timeout=LONG)
            assert looked.acquire(timeout=LONG)
            with make() as new, waiter.result(LONG) as got:
                new.apply_grad(1.0)
                assert (got.num_accumulated(), old.num_accumulated()) == (1, 0)
                new.unlink()


def test_a_signal_handler_that_raises_ends_attachs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*, pipe: Pipe) -> None:
        def handler(*_: object) -> None:
            raise KeyboardInterrupt

        def say_first(*args: Any) -> Any:
            monkeypatch.undo()
            pipe.say()
            return _core.open(*args)

        monkeypatch.setattr(_core, "open", say_first)
        signal.signal(signal.SIGUSR1, handler)
        with pytest.raises(KeyboardInterrupt):
            shmacc.attach(NAME, timeout=LONG)

    with Apart(interrupted).ready() as waiter:
        os.kill(waiter.pid, signal.SIGUSR1)
        waiter.result()
