"""A fork during other threads' calls, other libraries' fork hooks and signal handlers is safe."""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, run_apart
from helpers.busy import busy
from helpers.lock_holder import held, sleeps
from helpers.support import LONG, until

import shmacc
from shmacc import (
    NEVER_STALE,
    ConditionalAccumulator,
    SparseConditionalAccumulator,
    errors,
    inspection,
    testing,
)

pytestmark = pytest.mark.threads


def _fork_often(
    hook: Callable[[], object], *beside: Callable[[], object], before: Callable[[], object] = tuple
) -> None:
    """Fork while threads are busy. `hook` is like another library's hook, which each fork runs."""
    kept = ConditionalAccumulator("f8", (), reduction_type="SUM")

    def use() -> None:
        assert kept.apply_grad(1.0, local_step=NEVER_STALE)
        with ConditionalAccumulator.attach("acc") as other:
            assert other.apply_grad(1.0)
        with ConditionalAccumulator("f8", ()) as private:
            assert private.apply_grad(1.0)
        assert inspection.describe("acc").stats.applied > 0

    # Import everything first: a fork during an import is a problem of Python itself.
    for work in (use, *beside):
        work()
    os.register_at_fork(before=hook)
    sys.setswitchinterval(1e-4)
    with busy(*beside):
        for number in range(20):
            before()
            run_apart(use if number % 10 == 0 else tuple)
    use()
    assert kept.take(4, timeout=0).count == 4


def _lets_go() -> None:
    """Close the last handle in an apply, so that the apply closes the segment, maybe in a fork."""
    gradient = np.arange(5_000), np.ones((5_000, 16))

    def attach() -> SparseConditionalAccumulator:
        return SparseConditionalAccumulator("f8", None, "rows")

    current = attach()

    def apply() -> None:
        with suppress(errors.ShmaccError):
            current.apply_grad(*gradient)

    def close_under_it() -> None:
        nonlocal current
        current = attach()
        applied = current.stats().applied
        until(lambda: current.stats().applied > applied)
        current.close()

    _fork_often(lambda: time.sleep(0.001), apply, before=close_under_it)
    attach().unlink()


def _opens_and_closes() -> None:
    def open_and_close() -> None:
        with ConditionalAccumulator("f8", ()) as private:
            private.apply_grad(1.0)
        shmacc.attach("acc").close()

    def inspect() -> None:
        inspection.describe("acc")
        inspection.leftovers("acc")

    _fork_often(lambda: time.sleep(0.0005), open_and_close, open_and_close, inspect)


class _Cycle:
    def __init__(self) -> None:
        self.acc = shmacc.attach("acc")
        self.itself = self
        # Sleep: cycles must not be made faster than they are collected.
        time.sleep(0.0005)


def _collects() -> None:
    gc.disable()
    _fork_often(gc.collect, _Cycle)


@pytest.mark.usefixtures("acc")
@pytest.mark.parametrize("work", [_lets_go, _opens_and_closes, _collects])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_fork_while_a_thread_is_busy_harms_neither_process(work: Callable[[], None]) -> None:
    """The library takes no lock around a fork, so a child inherits no held lock."""
    run_apart(work)


CHILDS_WAYS: Final[dict[str, Callable[[Any], object]]] = {
    "returns": lambda _: None,
    "exits": lambda _: sys.exit(),
    "uses it": lambda acc: acc.apply_grad(1.0, local_step=NEVER_STALE),
    "closes it": lambda acc: acc.close(),
}


def _fork_in_the_handler(
    acc: ConditionalAccumulator,
    wait: Callable[[], Any],
    way: str,
    afterwards: Callable[[], object] = tuple,
    *,
    pipe: Pipe,
) -> Any:
    parent, children = os.getpid(), []

    def fork(*_: object) -> None:
        pid = os.fork()
        CHILDS_WAYS[way](acc) if pid == 0 else children.append(pid)

    signal.signal(signal.SIGALRM, fork)
    pipe.say("about to wait")
    try:
        result = wait()
    except (errors.CancelledError, SystemExit) as error:
        if os.getpid() != parent:
            # The wait was the parent's. The child, too, can go on with the accumulator.
            with suppress(errors.FailedPreconditionError):
                acc.num_accumulated()
            afterwards()
            os._exit(0)
        raise AssertionError("the parent's wait was cancelled") from error
    finally:
        if os.getpid() != parent:
            os._exit(1)
    (child,) = children
    assert os.waitpid(child, 0)[1] == 0
    return result


def _let_it_fork(waiting: Apart) -> None:
    """Make the process fork in the middle of its wait."""
    waiting.hear()
    until(lambda: sleeps(waiting.pid))
    waiting.signal(signal.SIGALRM)


def _attach_and_apply() -> None:
    with shmacc.attach("acc") as again:
        assert isinstance(again, ConditionalAccumulator)
        assert again.apply_grad(1.0, local_step=NEVER_STALE)


@pytest.mark.parametrize("way", ["returns", "uses it", "closes it"])
def test_a_handler_may_fork_in_a_waiting_take(acc: ConditionalAccumulator, way: str) -> None:
    """The entry in the queue stays the parent's; the child's call is cancelled."""
    call = lambda: acc.take(50).count  # noqa: E731
    with Apart(_fork_in_the_handler, acc, call, way, _attach_and_apply) as waiting:
        _let_it_fork(waiting)
        until(lambda: acc.num_accumulated() == 1 + (way == "uses it"))  # the child is done
        assert acc.stats().waiting == 1
        for _ in range(50 - acc.num_accumulated()):
            assert acc.apply_grad(1.0)
        assert waiting.result() == 50


def test_a_handler_may_fork_in_a_wait_for_the_step(acc: ConditionalAccumulator) -> None:
    call = lambda: acc.wait_step(0)  # noqa: E731
    with Apart(_fork_in_the_handler, acc, call, "uses it", _attach_and_apply) as waiting:
        _let_it_fork(waiting)
        until(lambda: acc.num_accumulated() == 2)
        acc.advance_step(3)
        assert waiting.result() == 3


@pytest.mark.beyond_tsan  # ThreadSanitizer delays signals
@pytest.mark.parametrize(
    ("way", "byte"), [("exits", layout.lane_byte()), ("closes it", layout.NAME_BYTE)]
)
def test_a_handler_may_fork_in_lock_waits(acc: ConditionalAccumulator, way: str, byte: int) -> None:
    """An apply waits for a lane's lock; an opener and a remover wait for the name's."""
    waits: dict[int, tuple[Callable[[], Any], ...]] = {
        layout.lane_byte(): (lambda: acc.apply_grad(1.0),),
        layout.NAME_BYTE: (lambda: shmacc.attach("acc").close(), acc.unlink),
    }
    for wait in waits[byte]:
        with held("acc", byte) as holder, Apart(_fork_in_the_handler, acc, wait, way) as waiting:
            _let_it_fork(waiting)
            until(lambda: _has_a_child(waiting.pid))
            holder.kill()
            waiting.result()
    assert testing.leaked_names(os.environ["SHMACC_NAMESPACE"]) == () or byte == layout.lane_byte()


def _has_a_child(pid: int) -> bool:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:  # noqa: PTH123
        return bool(children.read())


def _apply_and_close(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    acc.apply_grad(1.0)
    pipe.turn("applied")
    acc.close()
    with pytest.raises(errors.FailedPreconditionError):
        acc.apply_grad(1.0)
    pipe.turn("closed")


def test_a_child_may_close_the_handle_of_a_parents_thread(acc: ConditionalAccumulator) -> None:
    """The parent's take does not keep the child attached: the child's close detaches the child."""
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(acc.take, 2, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        with Apart(_apply_and_close, acc) as child:
            assert child.hear() == "applied"
            assert acc.stats().attached == 2
            assert child.turn() == "closed"
            assert acc.stats().attached == 1  # although the child still runs
            child.finish()
        acc.apply_grad(1.0)
        assert taking.result().count == 2


def test_a_child_that_only_looks_sees_that_its_parent_is_dead(acc: ConditionalAccumulator) -> None:
    """A child has its parent's memory, but not its parent's record locks."""
    assert acc.stats().attached == 1
    with Apart(_attach_fork_and_die) as parent:
        parent.wait()
        assert parent.turn() == [True, False]


def _attach_fork_and_die(*, pipe: Pipe) -> None:
    acc = shmacc.attach("acc")
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.hear()
    pipe.say([process.alive for process in inspection.describe("acc").processes])
    del acc
    os._exit(0)
