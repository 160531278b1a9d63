"""A forked child has its parent's accumulator, and is attached from its first use of it on.

Until then nobody is to be seen, if the parent has ended: a cleaner removes the segment, and rightly
so. The child must not go on with it then, as if its name had been given up on purpose: others make
a new one, and would never meet it.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.killing_scenes import NAME
from helpers.lock_holder import held

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.apart import Pipe


def _clean() -> list[str]:
    found = inspection.leftovers(namespace=names.current_namespace())
    return [name for leftover in found for name in inspection.clean(leftover)]


CALLS: Final[tuple[Callable[[Any], Any], ...]] = (
    lambda acc: acc.apply_grad(1.0),
    lambda acc: acc.take(1, timeout=0),
    lambda acc: acc.wait_step(-1, timeout=0),
    lambda acc: acc.global_step,
    lambda acc: acc.cancel(),
)


def _fork_and_end(use: bool, *, pipe: Pipe) -> None:
    """What this process opens is its child's alone, who uses it, perhaps, and waits to be told."""
    acc = ConditionalAccumulator("f8", (), NAME, reduction_type="SUM")
    if os.fork():
        os._exit(0)
    if use:
        acc.apply_grad(1.0)
    pipe.say()
    which = pipe.hear()
    try:
        pipe.say(CALLS[which](acc))
    except errors.ShmaccError as error:
        pipe.say(error)
    os._exit(0)


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_what_was_cleaned_is_gone_for_the_child(call: int) -> None:
    with Apart(_fork_and_end, False) as parent:  # noqa: FBT003
        parent.hear()
        parent.wait()
        assert len(_clean()) == 2  # a segment and its semaphore
        with ConditionalAccumulator("f8", (), NAME, reduction_type="SUM") as anew:
            parent.say(call)
            error = parent.hear()
            assert isinstance(error, errors.NotFoundError)
            assert "clean" in str(error)
            assert anew.num_accumulated() == 0
            anew.unlink()


def test_what_the_child_has_used_is_not_cleaned() -> None:
    with Apart(_fork_and_end, True) as parent:  # noqa: FBT003
        parent.hear()
        parent.wait()
        assert _clean() == []
        parent.say(0)
        assert parent.hear() is True
    with shmacc.attach(NAME) as acc:
        assert acc.num_accumulated() == 2
        acc.unlink()


def _read_then_use(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    pipe.say([acc.global_step, acc.num_accumulated(), acc.stats().attached])
    pipe.hear()
    acc.apply_grad(1.0)
    pipe.say(acc.stats().attached)
    pipe.hear()


def test_to_read_numbers_is_no_use() -> None:
    """`docs/concepts/processes.md` says so."""
    with ConditionalAccumulator("f8", (), NAME) as acc:
        acc.apply_grad(1.0)
        with Apart(_read_then_use, acc) as child:
            assert child.hear() == [0, 1, 1]
            assert acc.stats().attached == 1
            child.say()
            assert child.hear() == 2
            assert acc.stats().attached == 2
            child.say()
            child.result()
        acc.unlink()


def test_what_was_given_up_is_still_the_childs() -> None:
    """Who unlinks it leaves it to those who have it open, and their children."""
    with ConditionalAccumulator("f8", (), NAME, reduction_type="SUM") as acc:
        acc.unlink()
        assert run_apart(acc.apply_grad, 1.0)
        assert acc.take_grad(1, timeout=0) == 1.0
    assert testing.leaked_names(names.current_namespace()) == ()


def test_somebody_stopped_while_opening_the_name_holds_up_the_first_use() -> None:
    """As it does all who attach; it is an error after a while, and over with the stopped one."""
    with ConditionalAccumulator("f8", (), NAME, reduction_type="SUM") as acc:
        with held(NAME, layout.NAME_BYTE) as stopped, Apart(_apply_twice, acc) as child:
            error = child.hear()
            assert isinstance(error, errors.DeadlineExceededError)
            assert "stopped" in str(error)
            stopped.signal(signal.SIGCONT)
            stopped.say("let go")
            stopped.wait()
            child.say()
            assert child.result() is True
        assert acc.take_grad(1, timeout=0) == 1.0
        acc.unlink()


def _apply_twice(acc: ConditionalAccumulator, *, pipe: Pipe) -> bool:
    try:
        acc.apply_grad(1.0)
    except errors.DeadlineExceededError as error:
        pipe.say(error)
    pipe.hear()
    return acc.apply_grad(1.0)
