"""A segment's file that is truncated under processes that wait: an error, not SIGBUS.

The pages are gone then, and to touch one ends a process; what a wait puts in order on its way out
must not be touched any more either.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from helpers.apart import Apart
from helpers.lock_holder import activity, held, sleeps
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.apart import Pipe

NAME = "truncated"


def _wait(call: Callable[[Any], Any], *, pipe: Pipe) -> str:
    acc = shmacc.attach(NAME)
    pipe.say("waits")
    with pytest.raises(errors.DataLossError) as raised:
        call(acc)
    return str(raised.value)


def _until_it_sleeps(waiter: Apart, doing: str) -> None:
    # Awake it is in the middle of an operation, and ends at the first page that it touches.
    until(lambda: activity(NAME, waiter.pid) == doing and sleeps(waiter.pid))


CALLS = {
    "apply": lambda acc: acc.apply_grad(1.0),
    "take": lambda acc: acc.take_grad(5),
    "set_global_step": lambda acc: acc.set_global_step(3),
}


@pytest.mark.parametrize("call", CALLS)
def test_for_the_lock(call: str) -> None:
    with (
        ConditionalAccumulator("float32", (), NAME),
        held(NAME),
        Apart(_wait, CALLS[call]) as waiter,
    ):
        waiter.hear()
        _until_it_sleeps(waiter, "waits for the lock")
        os.truncate(names.segment_name(NAME).path, 0)
        assert "truncated" in waiter.result()
        inspection.remove(NAME, force=True)


def test_in_line() -> None:
    with ConditionalAccumulator("float32", (), NAME), Apart(_wait, CALLS["take"]) as waiter:
        waiter.hear()
        _until_it_sleeps(waiter, "waits in the queue")
        os.truncate(names.segment_name(NAME).path, 0)
        assert "truncated" in waiter.result()
        inspection.remove(NAME, force=True)
