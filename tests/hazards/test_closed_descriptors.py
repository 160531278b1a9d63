"""A process that closes all its descriptors, as daemons do, is told so by what it had open.

The number of a closed descriptor goes to the next file that is opened: another accumulator's, or
the same one's again. Nothing that was opened before may then lock, reserve, map or close it.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.segment_file import SegmentFile
from helpers.support import LONG, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, errors, inspection
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from helpers.apart import Pipe

pytestmark = pytest.mark.threads

MOST: Final = 256  # no test has a descriptor beyond


@pytest.fixture(autouse=True)
def both() -> Iterator[None]:
    """The two accumulators, which this process attaches to for no longer than it takes."""
    for name in ("a", "b"):
        ConditionalAccumulator("f8", (3,), name, reduction_type="SUM").close()
    yield
    for name in ("a", "b"):
        with shmacc.attach(name) as acc:
            acc.unlink()


def _add(acc: Any) -> None:
    assert acc.apply_grad(np.ones(3), local_step=NEVER_STALE)


def _descriptor(name: str) -> int:
    for fd in range(3, MOST):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(f":{name}"):  # noqa: PTH115
                return fd
        except OSError:
            continue
    raise AssertionError(f"no descriptor of {name}")


def _close_all_but(pipe: Pipe) -> None:
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, MOST)


def _refuses(acc: Any) -> None:
    with ConditionalAccumulator("f8", (3,), reduction_type="SUM") as private:
        private.apply_grad(np.ones(3))
        partial = private.take_partial(1)
    operations = [
        lambda: _add(acc),
        lambda: acc.apply_partial(partial, NEVER_STALE),
        lambda: acc.take(1, timeout=0),
        lambda: acc.take_partial(0, timeout=0),
        lambda: acc.set_global_step(7),
        lambda: acc.advance_step(7),
        lambda: acc.wait_step(-1, timeout=0),
        lambda: acc.global_step,
        acc.num_accumulated,
        acc.unseal,
        acc.stats,
        acc.cancel,
        acc.unlink,
    ]
    for operation in operations:
        with pytest.raises(errors.FailedPreconditionError, match="open the accumulator again"):
            operation()


def _becomes_another(*, pipe: Pipe) -> None:
    _close_all_but(pipe)  # what is opened after the next time gets the same numbers
    stale = shmacc.attach("a")
    _add(stale)
    number = _descriptor("a")
    _close_all_but(pipe)
    _refuses(stale)
    other = shmacc.attach("b")
    assert _descriptor("b") == number
    _add(other)
    pipe.say("before")
    pipe.hear()
    _refuses(stale)
    stale.close()
    del stale
    gc.collect()
    assert _descriptor("b") == number
    pipe.say("closed")
    pipe.hear()
    _add(other)
    other.close()


def test_the_number_is_another_accumulators() -> None:
    """The other one is not changed, not locked, and its process stays attached to it."""
    with Apart(_becomes_another) as process, shmacc.attach("b") as other:
        process.hear()
        before = inspection.describe("b")
        process.say()
        process.hear()
        now = inspection.describe("b")
        assert now.generation == before.generation
        assert now.summary.bytes_reserved == before.summary.bytes_reserved
        assert other.stats().attached == 2
        # The first one is as it was, and its lock is free.
        with shmacc.attach("a") as first:
            assert first.stats().attached == 1
            assert first.num_accumulated() == 1
        process.say()
        process.result()
        assert other.num_accumulated() == 2


def _becomes_itself(*, pipe: Pipe) -> None:
    pipe.hear()
    _close_all_but(pipe)  # what is opened after the next time gets the same numbers
    stale = shmacc.attach("a")
    _add(stale)
    number = _descriptor("a")
    pipe.say("attached")
    pipe.hear()
    _close_all_but(pipe)
    again = shmacc.attach("a")
    assert _descriptor("a") == number
    _add(again)
    _refuses(stale)
    stale.close()
    del stale
    gc.collect()
    pipe.say("closed")
    pipe.hear()
    assert again.take(4, timeout=LONG).count == 4
    again.close()


def test_the_number_is_the_same_accumulators_again() -> None:
    """What was opened again lives, and waits in the queue, though its first entry is dead."""
    with Apart(_becomes_itself) as process:
        with shmacc.attach("a") as first:
            _add(first)
            process.say()
            process.hear()
        # The entry that is free now is in front of the one that will be dead.
        process.say()
        process.hear()
        process.say()
        until(lambda: inspection.describe("a").summary.waiting_for == (4,))
        # Whoever attaches sweeps out the dead.
        assert run_apart(_attached) == 2
        assert inspection.describe("a").summary.waiting_for == (4,)
        with shmacc.attach("a") as acc:
            _add(acc)
        process.result()


def _attached() -> int:
    with shmacc.attach("a") as acc:
        return acc.stats().attached


def _leave_a_lost_place() -> None:
    """As after a closed descriptor, if nobody could free the place when it was opened anew."""
    with SegmentFile(names.segment_name("a").path) as file:
        file.put("participant", file.record("participant", 0), 1)
        file.put("participants_top", layout.ShortWord(2))


def _take() -> int:
    with shmacc.attach("a") as acc:
        return int(acc.take(1, timeout=LONG).count)


def test_a_lost_place_is_not_the_new_one() -> None:
    """Both bear the token of the same process; the take that waits belongs to one of them."""
    with Apart(_take) as taking:
        until(lambda: inspection.describe("a").summary.waiting_for == (1,))
        run_apart(_leave_a_lost_place)
        assert run_apart(_attached) == 2
        assert inspection.describe("a").summary.waiting_for == (1,)
        with shmacc.attach("a") as acc:
            _add(acc)
        assert taking.result() == 1


def _waits_without(*, pipe: Pipe) -> None:
    acc = shmacc.attach("a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acc.take, 1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        _close_all_but(pipe)
        other = shmacc.attach("b")
        with pytest.raises(errors.FailedPreconditionError):
            waiting.result()
    _add(other)
    acc.close()
    assert other.stats().attached == 1
    other.close()


def test_a_take_that_waits_is_told() -> None:
    """And what it leaves in the queue is a dead process's."""
    run_apart(_waits_without)
    with shmacc.attach("a") as acc:
        assert acc.stats().waiting == 0
        _add(acc)
        assert acc.take(1, timeout=0).count == 1


def _becomes_plain_files(path: Path, *, pipe: Pipe) -> None:
    stale, private = shmacc.attach("a"), ConditionalAccumulator("f4", ())
    private.apply_grad(1.0)
    numbers = {_descriptor("a"), _descriptor(private.shared_name)}
    _close_all_but(pipe)
    files = [os.open(path, os.O_RDWR) for _ in range(64)]
    assert numbers < set(files)
    _refuses(stale)
    stale.close()
    private.close()
    with pytest.raises(errors.NotFoundError):
        shmacc.attach(private.shared_name)
    del stale, private
    gc.collect()
    for file in files:
        assert os.pread(file, 6, 0) == b"intact"
    with open("/proc/locks", encoding="ascii") as locks:  # noqa: PTH123
        assert f":{path.stat().st_ino} " not in locks.read()


def test_the_numbers_are_plain_files(tmp_path: Path) -> None:
    """They are neither written to, nor locked, nor closed; and a private one's name still goes."""
    file = tmp_path / "plain"
    file.write_bytes(b"intact" * 1000)
    run_apart(_becomes_plain_files, file)
    assert file.read_bytes() == b"intact" * 1000
