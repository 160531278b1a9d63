"""A segment's file that is truncated under processes that wait: an error, not SIGBUS.

The pages are gone then, and to touch one ends a process; what a wait puts in order on its way out
must not be touched any more either.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from helpers.apart import Apart
from helpers.lock_holder import held, sleeps_in
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


CALLS = {
    "apply": lambda acc: acc.apply_grad(1.0),
    "take": lambda acc: acc.take_grad(5),
    "set_global_step": lambda acc: acc.set_global_step(3),
}


@pytest.mark.parametrize(
    ("call", "doing"),
    [*((call, "waits for the lock") for call in CALLS), ("take", "waits in the queue")],
)
def test_the_wait_ends(call: str, doing: str) -> None:
    with ConditionalAccumulator("float32", (), NAME), ExitStack() as stack:
        if doing == "waits for the lock":
            stack.enter_context(held(NAME))
        with Apart(_wait, CALLS[call]) as waiter:
            waiter.hear()
            # Awake it is in the middle of an operation, and ends at the first page it touches.
            until(lambda: sleeps_in(NAME, waiter.pid, doing))
            os.truncate(names.segment_name(NAME).path, 0)
            assert "truncated" in waiter.result()
        inspection.remove(NAME, force=True)
