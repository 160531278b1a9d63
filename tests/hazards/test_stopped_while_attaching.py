"""A process that is stopped in the middle of attaching holds up nobody who is attached.

Where it matters it holds the record lock on the name's byte, and so does what is stopped here. Who
else wants to attach, or to unlink, is told so after a while: the name is the stopped one's to
decide on, and nobody can know what it was about to do.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart
from helpers.killing_scenes import NAME
from helpers.lock_holder import held
from helpers.support import SOON, slept, until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._layout import names


def test_it_does_not_hold_up_those_inside() -> None:
    with ConditionalAccumulator("float32", (), NAME, reduction_type="SUM") as acc:
        with held(NAME, layout.NAME_BYTE) as stopped:
            for _ in range(100):
                start = slept()
                acc.apply_grad(1.0)
                assert slept() - start < SOON
            assert acc.take_grad(100, timeout=0) == 100.0
            with (
                Apart(_attach) as other,
                pytest.raises(errors.DeadlineExceededError, match="stopped"),
            ):
                other.result()
            stopped.signal(signal.SIGCONT)
            stopped.say("let go")
            stopped.wait()
        with Apart(_attach) as other:
            other.result()
        acc.unlink()


def test_its_death_lets_others_in() -> None:
    with ConditionalAccumulator("float32", (), NAME) as acc:
        with held(NAME, layout.NAME_BYTE) as stopped, Apart(_attach) as other:
            until(lambda: len(inspection.describe(NAME).processes) == 2)
            stopped.kill()
            other.result()
        acc.unlink()


def test_who_gives_up_leaves_no_semaphore() -> None:
    """It made one, for none was there, and meanwhile the segment's name was removed."""
    with ConditionalAccumulator("float32", (), NAME):
        (semaphore,) = segment().parent.glob(f"sem.{segment().name}.*")
        semaphore.unlink()
        with held(NAME, layout.NAME_BYTE), Apart(_attach) as other:
            until(semaphore.exists)
            segment().unlink()
            with pytest.raises(errors.DeadlineExceededError):
                other.result()
    assert not semaphore.exists()


def segment() -> Path:
    return Path(names.segment_name(NAME).path)


def _attach() -> None:
    shmacc.attach(NAME).close()
