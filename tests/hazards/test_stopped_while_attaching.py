"""A process that is stopped in the middle of attaching holds up nobody who is attached.

Who else wants to attach, or to unlink, is told so after a while: the name is the stopped one's to
decide on, and nobody can know what it was about to do.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from hazards.apart import Apart, forks
from hazards.killing_scenes import NAME, SOON
from support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, segment

if TYPE_CHECKING:
    from hazards.apart import Pipe

pytestmark = forks


def attach_and_stop(pipe: Pipe) -> None:
    """Attach, but stop where the name is looked at for the second time, with the name lock held."""
    look = segment._inode

    def stop_and_look(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return look(*args)

    pytest.MonkeyPatch().setattr(segment, "_inode", stop_and_look)
    pipe.say()
    shmacc.attach(NAME).close()


def test_it_does_not_hold_up_those_inside() -> None:
    with ConditionalAccumulator("float32", (), NAME, reduction_type="SUM") as acc:
        with Apart(attach_and_stop) as process:
            process.hear()
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            for _ in range(100):
                start = time.monotonic()
                acc.apply_grad(1.0)
                assert time.monotonic() - start < SOON
            assert acc.take_grad(100, timeout=0) == 100.0
            with Apart(_attach) as other:
                start = time.monotonic()
                with pytest.raises(errors.DeadlineExceededError, match="stopped"):
                    other.result()
                assert time.monotonic() - start < LONG / 4
            process.signal(signal.SIGCONT)
            process.result()
        with Apart(_attach) as other:
            other.result()
        acc.unlink()


def test_its_death_lets_others_in() -> None:
    with ConditionalAccumulator("float32", (), NAME) as acc:
        with Apart(attach_and_stop) as process:
            process.hear()
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            with Apart(_attach) as other:
                until(lambda: len(inspection.describe(NAME).processes) == 3)
                process.kill()
                start = time.monotonic()
                other.result()
                assert time.monotonic() - start < SOON
        acc.unlink()


def _attach() -> None:
    shmacc.attach(NAME).close()
