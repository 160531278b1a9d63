"""Names that disappear from /dev/shm under running processes, and names given up on purpose.

systemd's RemoveIPC removes a user's names at the last logout, jobs or no jobs: who goes on as if
nothing had happened would add to an accumulator that nobody else can reach any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

pytestmark = pytest.mark.threads

# Far less than the waits would last, far more than the slice in which they look around.


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator with one gradient in it."""
    with ConditionalAccumulator("f8", (), "removed", reduction_type="SUM") as made:
        made.apply_grad(1.0)
        yield made


def segment(name: str = "removed") -> Path:
    return Path(names.segment_name(name).path)


def semaphores(name: str = "removed") -> list[Path]:
    return list(Path(names.SHM_DIRECTORY).glob(f"sem.{segment(name).name}.*"))


def remove_ipc() -> None:
    """What systemd does."""
    segment().unlink()
    for semaphore in semaphores():
        semaphore.unlink()


def test_every_operation_says_so(acc: ConditionalAccumulator) -> None:
    partial = acc.take_partial(1)
    remove_ipc()
    operations = {
        "apply": lambda: acc.apply_grad(1.0, shmacc.NEVER_STALE),
        "apply_partial": lambda: acc.apply_partial(partial),
        "take": lambda: acc.take(1, timeout=0),
        "take waiting": lambda: acc.take(5),
        "take_partial": lambda: acc.take_partial(0),
        "num_accumulated": acc.num_accumulated,
        "global_step": lambda: acc.global_step,
        "set_global_step": lambda: acc.set_global_step(3),
        "advance_step": lambda: acc.advance_step(3),
        "wait_step": lambda: acc.wait_step(5),
        "unseal": acc.unseal,
    }
    for operation in operations.values():
        with pytest.raises(errors.NotFoundError, match=r"removed under its users.*RemoveIPC"):
            operation()
    assert isinstance(errors.NotFoundError(""), FileNotFoundError)
    acc.unlink()
    acc.close()
    assert testing.leaked_names(os.environ["SHMACC_NAMESPACE"]) == ()


def _wait(operation: str, *, pipe: Pipe) -> None:
    acc = shmacc.attach("removed")
    assert isinstance(acc, ConditionalAccumulator)
    pipe.say("about to wait")
    with pytest.raises(errors.NotFoundError, match="RemoveIPC"):
        acc.take(5) if operation == "take" else acc.wait_step(7)


@pytest.mark.parametrize("operation", ["take", "wait_step"])
def test_who_waits_learns_within_a_moment(acc: ConditionalAccumulator, operation: str) -> None:
    with Apart(_wait, operation) as waiting:
        waiting.hear()
        if operation == "take":
            until(lambda: acc.stats().waiting == 1)
        remove_ipc()
        waiting.result()


def _hold_the_lock(*, pipe: Pipe) -> None:
    fd = os.open(segment(), os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, layout.lane_byte())
    pipe.say("held")
    pipe.hear()


def test_who_waits_for_the_lock_learns_when_it_gets_it(acc: ConditionalAccumulator) -> None:
    with Apart(_hold_the_lock) as holder:
        holder.hear()
        remove_ipc()
        holder.say("let go")
        with pytest.raises(errors.NotFoundError):
            acc.apply_grad(1.0)


def test_the_next_one_under_the_name_is_another(acc: ConditionalAccumulator) -> None:
    remove_ipc()
    with ConditionalAccumulator("f8", (), "removed", reduction_type="SUM") as fresh:
        assert fresh.num_accumulated() == 0
        assert fresh.apply_grad(10.0)
        with pytest.raises(errors.NotFoundError):
            acc.apply_grad(1.0)
        # Whoever had the old one can neither remove nor disturb the new one.
        acc.unlink()
        acc.close()
        assert fresh.take_grad(1, timeout=0) == 10.0
        with shmacc.attach("removed") as again:
            assert again.global_step == 1
        fresh.unlink()


def _apply_many(first: int, count: int) -> int:
    sparse = shmacc.attach("removed")
    assert isinstance(sparse, SparseConditionalAccumulator)
    for _ in range(count):
        assert sparse.apply_grad(range(first, first + 50), np.ones((50, 2)))
    return count


def test_the_semaphore_alone_is_made_again() -> None:
    """It is only a queue: without it, or with two of them, exclusion holds all the same."""
    with SparseConditionalAccumulator("f8", None, "removed", reduction_type="SUM") as acc:
        (semaphore,) = semaphores()
        old = semaphore.stat().st_ino
        semaphore.unlink()
        assert acc.apply_grad(range(50), np.ones((50, 2)))
        findings = inspection.check("removed")
        assert any("semaphore is missing" in finding.problem for finding in findings)
        # These make another semaphore, and this process keeps the one that has lost its name.
        with Apart(_apply_many, 0, 300) as one, Apart(_apply_many, 25, 300) as other:
            for _ in range(300):
                assert acc.apply_grad(range(50), np.ones((50, 2)))
            assert one.result() + other.result() == 600
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


def test_given_up_on_purpose_is_something_else(acc: ConditionalAccumulator) -> None:
    """As with an unlinked file: who has it goes on, a new opener makes a new one."""
    taken: list[Any] = []
    with shmacc.attach("removed") as other:
        assert isinstance(other, ConditionalAccumulator)
        waiting = threading.Thread(target=lambda: taken.append(other.take(3, timeout=LONG)))
        waiting.start()
        until(lambda: acc.stats().waiting == 1)
        acc.unlink()
        acc.unlink()
        with pytest.raises(errors.NotFoundError):
            shmacc.attach("removed")
        with ConditionalAccumulator("f8", (), "removed", reduction_type="SUM") as fresh:
            assert fresh.num_accumulated() == 0
            assert acc.apply_grad(2.0)
            assert other.apply_grad(4.0)
            waiting.join(LONG)
            assert (taken[0].value, taken[0].count) == (7.0, 3)
            assert (acc.global_step, fresh.global_step) == (1, 0)
            # Neither does the old one's handle touch the new one's name.
            acc.unlink()
            with shmacc.attach("removed") as again:
                assert again.global_step == 0
            fresh.unlink()


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


def test_a_semaphore_that_goes_under_an_openers_hands() -> None:
    """Somebody unlinks while another cleans: what was just made is gone before it is opened."""
    with Apart(_remove_semaphores) as remover:
        remover.hear()
        opened = 0
        while opened < 200 or not remover.pipe.poll():
            opened += 1
            with ConditionalAccumulator("f8", (), "unlucky") as acc:
                acc.apply_grad(3.0)
                with shmacc.attach("unlucky") as again:
                    assert isinstance(again, ConditionalAccumulator)
                    assert again.take_grad(1) == 3.0
                acc.unlink()
        assert remover.hear() == "removed one"
        remover.say("stop")
        remover.result()
