"""Processes that end without a close, in every way that Python has, and with threads that wait."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers.interpreter import run
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, testing
from shmacc.inspection import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.threads


def left_behind() -> tuple[str, ...]:
    return testing.leaked_names(os.environ["SHMACC_NAMESPACE"])


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums."""
    with ConditionalAccumulator("f8", (), "exits", reduction_type="SUM") as made:
        yield made
        made.unlink()


ENDS: Final = {
    "falls off the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "raises": ("raise RuntimeError('on purpose')", 1),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": (f"os.kill(os.getpid(), {int(signal.SIGTERM)})", -signal.SIGTERM),
    "SIGKILL": (f"os.kill(os.getpid(), {int(signal.SIGKILL)})", -signal.SIGKILL),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_named_one_stays_whole(acc: ConditionalAccumulator, how: str) -> None:
    statement, expected = ENDS[how]
    status, _, complaints = run(
        f"""
        acc = shmacc.attach("exits")
        also = shmacc.attach("exits")
        acc.apply_grad(1.0)
        also.apply_grad(2.0)
        {statement}
        """
    )
    assert status == expected
    assert complaints == "" or "on purpose" in complaints
    until(lambda: acc.stats().attached == 1)
    assert acc.take(2, timeout=0).value == 3.0
    assert all(finding.severity is Severity.NOTE for finding in inspection.check("exits"))


@pytest.mark.parametrize("how", ENDS)
def test_a_private_one_goes_with_its_process(how: str) -> None:
    statement, expected = ENDS[how]
    status, _, complaints = run(
        f"""
        acc = shmacc.SparseConditionalAccumulator("f4")
        other = shmacc.ConditionalAccumulator("f4")
        acc.apply_grad([1], [1.0])
        {statement}
        """
    )
    assert status == expected
    assert complaints == "" or "on purpose" in complaints
    if how in {"falls off the end", "sys.exit", "raises"}:
        assert left_behind() == ()
        return
    # Nothing in such a process could still run; the cleaner finds what it left.
    assert len(left_behind()) == 4
    for leftover in inspection.leftovers(namespace=os.environ["SHMACC_NAMESPACE"]):
        assert leftover.removable
        inspection.clean(leftover)
    assert left_behind() == ()


WAITS: Final = {
    "take": "lambda: acc.take(5)",
    "take with a timeout": "lambda: acc.take(5, timeout=3600)",
    "take_partial": "lambda: acc.take_partial(5)",
    "wait_step": "lambda: acc.wait_step(5)",
}


@pytest.mark.parametrize("ending", ["", "sys.exit(7)", "raise RuntimeError('on purpose')"])
@pytest.mark.parametrize("wait", WAITS)
def test_daemon_threads_that_wait(acc: ConditionalAccumulator, wait: str, ending: str) -> None:
    """The interpreter shuts down with its own exit status, without a crash and without a hang."""
    status, _, complaints = run(
        f"""
        acc = shmacc.attach("exits")
        for _ in range(3):
            daemon({WAITS[wait]})
        activities = {{"waits in the queue", "waits for the step"}}
        until(lambda: acc.stats().waiting == 3 or {wait == "wait_step"})
        until(lambda: shmacc.inspection.describe("exits").processes[-1].activity in activities)
        {ending}
        """
    )
    assert status == {"": 0, "sys.exit(7)": 7}.get(ending, 1), complaints
    # The handle is closed at the end, as any open file: their takes may still hear of that.
    assert all(word not in complaints for word in ("Fatal", "terminate", "Segmentation"))
    # Those who wait are gone, and hold nobody up.
    until(lambda: acc.stats().waiting == 0 and acc.stats().attached == 1)
    assert acc.apply_grad(1.0)
    assert acc.take_grad(1, timeout=0) == 1.0


def test_daemon_threads_that_work() -> None:
    """They are cut off wherever they are, under the lock perhaps: what they did is whole."""
    with shmacc.SparseConditionalAccumulator("f8", None, "works", reduction_type="SUM") as sparse:
        for _ in range(5):
            status, _, complaints = run(
                """
                acc = shmacc.attach("works")
                def work():
                    while True:
                        acc.apply_grad(range(300), np.ones((300, 2)), local_step=2**62)
                def open_and_close():
                    while True:
                        shmacc.attach("works").close()
                for _ in range(3):
                    daemon(work)
                daemon(open_and_close)
                until(lambda: acc.num_accumulated() > 50)
                """
            )
            assert (status, complaints) == (0, "")
            taken = sparse.take(50, timeout=0)
            assert taken.row_counts.tolist() == [taken.count] * 300
            assert (taken.values == taken.count).all()
        sparse.unlink()


def test_a_thread_that_is_joined_at_the_end_must_be_let_go(acc: ConditionalAccumulator) -> None:
    """Python waits for threads that are no daemons; a close from the main thread ends theirs."""
    status, output, complaints = run(
        """
        acc = shmacc.attach("exits")
        def wait():
            try:
                acc.take(5)
            except shmacc.errors.CancelledError as error:
                print("cancelled")
        threading.Thread(target=wait).start()
        until(lambda: acc.stats().waiting == 1)
        acc.close()
        """
    )
    assert (status, output, complaints) == (0, "cancelled", "")
    assert acc.stats().attached == 1


def test_used_by_handlers_at_exit(acc: ConditionalAccumulator) -> None:
    status, output, complaints = run(
        """
        class Late:
            def __del__(self):
                # When modules are taken down, nothing more is promised than that it is no crash.
                try:
                    self.acc.apply_grad(1.0)
                except Exception:
                    pass
        late = Late()
        late.acc = shmacc.attach("exits")
        late.itself = late
        def apply():
            with shmacc.attach("exits") as acc:
                print(acc.apply_grad(2.0))
        atexit.register(apply)
        """
    )
    assert (status, output, complaints) == (0, "True", "")
    assert acc.num_accumulated() >= 1
    assert acc.stats().attached == 1


@pytest.mark.usefixtures("acc")
def test_dropped_without_a_close() -> None:
    """A handle that is garbage is as good as closed, also in a cycle; a private one is removed."""
    status, output, complaints = run(
        """
        import gc
        def drop():
            handles = [shmacc.attach("exits") for _ in range(10)]
            handles.append(shmacc.ConditionalAccumulator("f4"))
            handles.append(handles)
        first = shmacc.attach("exits")
        before = len(os.listdir("/proc/self/fd"))
        drop()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
        print(shmacc.attach("exits").stats().attached)
        """,
        warnings="ignore::ResourceWarning",
    )
    assert (status, output, complaints) == (0, "2", "")
    assert all("exits" in name for name in left_behind())


def test_nothing_that_was_handed_out_is_shared_memory() -> None:
    """Arrays outlive the accumulator, its segment and its mapping."""
    with shmacc.SparseConditionalAccumulator("f4", None, "arrays", reduction_type="SUM") as sparse:
        sparse.apply_grad(range(1000), np.ones((1000, 64)))
        taken = sparse.take(1, timeout=0)
        sparse.unlink()
    for array in (taken.indices, taken.values, taken.row_counts, taken.shape):
        assert array.flags.writeable
        np.add(array, 1, out=array)
    assert taken.values.sum() == 2 * 64_000
    with pytest.raises(errors.FailedPreconditionError):
        sparse.num_accumulated()
