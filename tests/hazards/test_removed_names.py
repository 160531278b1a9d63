"""Names disappear from /dev/shm under running processes, or a process unlinks them.

systemd's RemoveIPC removes a user's names at the last logout, even under a running job. A process
that just went on would apply to an accumulator that nobody else can reach any more.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe
from helpers.lock_holder import activity, held, sleeps_in
from helpers.opening import USES
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection, testing
from shmacc._base import names

pytestmark = pytest.mark.threads


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    with ConditionalAccumulator("f8", (), "removed", reduction_type="SUM") as made:
        made.apply_grad(1.0)
        yield made


def segment(name: str = "removed") -> Path:
    return Path(names.segment_name(name).path)


def semaphores(name: str = "removed") -> list[Path]:
    return list(Path(names.SHM_DIRECTORY).glob(f"sem.{segment(name).name}.*"))


def remove_ipc() -> None:
    segment().unlink()
    for semaphore in semaphores():
        semaphore.unlink()


def test_every_operation_raises_when_the_name_is_gone(acc: ConditionalAccumulator) -> None:
    partial = acc.take_partial(1)
    remove_ipc()
    more: tuple[Callable[[Any], object], ...] = (
        lambda acc: acc.apply_grad(1.0, shmacc.NEVER_STALE),
        lambda acc: acc.apply_partial(partial),
        lambda acc: acc.take(5),
        lambda acc: acc.wait_step(5),
    )
    for use in USES + more:
        with pytest.raises(errors.NotFoundError, match=r"removed under its users.*RemoveIPC"):
            use(acc)
    assert isinstance(errors.NotFoundError(""), FileNotFoundError)
    acc.unlink()
    acc.close()
    assert testing.leaked_names(os.environ["SHMACC_NAMESPACE"]) == ()


def _wait(operation: str, *, pipe: Pipe) -> None:
    acc = shmacc.attach("removed")
    assert isinstance(acc, ConditionalAccumulator)
    pipe.say("about to wait")
    with pytest.raises(errors.NotFoundError, match="RemoveIPC"):
        getattr(acc, operation)(7)


@pytest.mark.parametrize("operation", ["take", "wait_step"])
def test_a_wait_ends_soon_after_the_removal(acc: ConditionalAccumulator, operation: str) -> None:
    with Apart(_wait, operation).ready() as waiting:
        if operation == "take":
            until(lambda: acc.stats().waiting == 1)
        remove_ipc()
        waiting.result()


@pytest.mark.usefixtures("acc")
def test_a_wait_for_the_lock_ends_if_the_name_is_gone() -> None:
    with held("removed") as holder, Apart(_wait, "apply_grad").ready() as waiting:
        until(lambda: activity("removed", waiting.pid) == "waits for the lock")
        remove_ipc()
        holder.kill()
        waiting.result()


def test_an_old_handle_does_not_touch_a_new_segment(acc: ConditionalAccumulator) -> None:
    remove_ipc()
    with ConditionalAccumulator("f8", (), "removed", reduction_type="SUM") as fresh:
        assert fresh.num_accumulated() == 0
        assert fresh.apply_grad(10.0)
        with pytest.raises(errors.NotFoundError):
            acc.apply_grad(1.0)
        # The old segment's handle can neither remove nor disturb the new segment.
        acc.unlink()
        acc.close()
        assert fresh.take_grad(1, timeout=0) == 10.0
        with shmacc.attach("removed") as again:
            assert again.global_step == 1
        fresh.unlink()


def _apply_many(first: int) -> None:
    with SparseConditionalAccumulator.attach("removed") as acc:
        for _ in range(300):
            assert acc.apply_grad(range(first, first + 50), np.ones((50, 2)))


def test_a_removed_semaphore_is_made_again() -> None:
    """A semaphore is only a queue: with none or two of them, the lock still excludes."""
    with SparseConditionalAccumulator("f8", None, "removed", reduction_type="SUM") as acc:
        (semaphore,) = semaphores()
        old = semaphore.stat().st_ino
        semaphore.unlink()
        assert acc.apply_grad(range(50), np.ones((50, 2)))
        findings = inspection.check("removed")
        assert any("semaphore is missing" in finding.problem for finding in findings)
        # These processes make another semaphore; the test keeps the semaphore without a name.
        with Apart(_apply_many, 0) as one, Apart(_apply_many, 25) as other:
            for _ in range(300):
                assert acc.apply_grad(range(50), np.ones((50, 2)))
            one.result()
            other.result()
        (semaphore,) = semaphores()
        assert semaphore.stat().st_ino != old
        taken = acc.take(901, timeout=0)
        expected = np.zeros(75)
        expected[:50] += 601
        expected[25:] += 300
        assert (taken.values == expected[:, None]).all()
        assert taken.row_counts.tolist() == expected.tolist()
        acc.unlink()
        assert semaphores() == []


def _remove_semaphores(*, pipe: Pipe) -> None:
    removed = False
    pipe.say("removing")
    while not pipe.poll():
        for semaphore in semaphores("unlucky"):
            with contextlib.suppress(FileNotFoundError):
                semaphore.unlink()
                if not removed:
                    pipe.say("removed one")
                removed = True


def test_a_semaphore_may_disappear_while_it_is_opened() -> None:
    """Another process removes each semaphore as soon as it appears."""
    with Apart(_remove_semaphores).ready() as remover:
        opened = 0
        while opened < 200 or not remover.pipe.poll():
            opened += 1
            with ConditionalAccumulator("f8", (), "unlucky", unlink_on_close=True) as acc:
                acc.apply_grad(3.0)
                with shmacc.attach("unlucky") as again:
                    assert isinstance(again, ConditionalAccumulator)
                    assert again.take_grad(1) == 3.0
        assert remover.hear() == "removed one"
        remover.finish("stop")


def _wait_until_truncated(call: Callable[[Any], Any], *, pipe: Pipe) -> str:
    """Wait until the file is truncated. Touching a lost page would raise SIGBUS."""
    acc = shmacc.attach("removed")
    pipe.say("waits")
    with pytest.raises(errors.DataLossError) as raised:
        call(acc)
    return str(raised.value)


CALLS = {
    "apply": lambda acc: acc.apply_grad(1.0),
    "take": lambda acc: acc.take_grad(5),
    "set_global_step": lambda acc: acc.set_global_step(3),
}


@pytest.mark.parametrize(
    ("call", "doing", "lanes"),
    [
        *((call, "waits for the lock", 1) for call in CALLS),
        ("take", "waits for the lock", 2),  # has the first lane's lock, waits for the second's
        ("take", "waits in the queue", 1),
    ],
)
def test_a_wait_ends_when_the_segments_file_is_truncated(call: str, doing: str, lanes: int) -> None:
    with ConditionalAccumulator("float32", (), "removed", lanes=lanes), ExitStack() as stack:
        if doing == "waits for the lock":
            stack.enter_context(held("removed", layout.lane_byte(lanes - 1)))
        with Apart(_wait_until_truncated, CALLS[call]).ready() as waiter:
            # An awake waiter would go on, and die at the first page that it touches.
            until(lambda: sleeps_in("removed", waiter.pid, doing))
            os.truncate(segment(), 0)
            assert "truncated" in waiter.result()
        inspection.remove("removed", force=True)


def _apply_by_a_contributor(*, pipe: Pipe) -> None:
    acc: Any = shmacc.attach("removed")
    acc.apply_grad(1.0, contributor=1)
    pipe.say("applied")
    assert pipe.hear() == "truncated"
    with pytest.raises(errors.DataLossError, match="truncated"):
        acc.apply_grad(1.0, contributor=1)


def test_an_apply_by_a_contributor_to_a_truncated_file_is_refused() -> None:
    with ConditionalAccumulator("float32", (), "removed"):
        with Apart(_apply_by_a_contributor).ready() as worker:
            os.truncate(segment(), 0)
            worker.finish("truncated")
        inspection.remove("removed", force=True)


def _begin_until_truncated(*, pipe: Pipe) -> set[str]:
    """Start threads that apply, until one ends. Only one at a time waits for the other process."""
    acc: Any = shmacc.attach("removed")
    ends: list[str] = []
    threads: list[threading.Thread] = []

    def apply() -> None:
        try:
            acc.apply_grad(1.0)
        except errors.ShmaccError as error:
            ends.append(str(error))

    while not ends:
        threads.append(threading.Thread(target=apply))
        threads[-1].start()
        time.sleep(0.002)
        if len(threads) == 20:
            pipe.say("waits")
    for thread in threads:
        thread.join()
    return set(ends)


def test_waits_of_many_threads_end_when_the_file_is_truncated() -> None:
    with ConditionalAccumulator("float32", (), "removed"), held("removed"):
        with Apart(_begin_until_truncated).ready() as waiter:
            os.truncate(segment(), 0)
            (message,) = waiter.result()
            assert "truncated" in message
        inspection.remove("removed", force=True)
