"""A process forks while its threads are in the middle of calls; parent and child both go on.

While another thread grows the segment, addresses in the mapping change. The tests stop that thread
when the system call that moves a region returns, and at instructions after it. At each of these
instants the main thread forks.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pytest
from helpers import stepping_tracer
from helpers.apart import Apart, Pipe, run_apart
from helpers.busy import busy
from helpers.interpreter import run
from helpers.support import EVERY_INSTANT, LONG, until

import shmacc
from shmacc import NEVER_STALE, SparseConditionalAccumulator, errors, testing

pytestmark = pytest.mark.threads

FORKS: Final = 6
ROWS: Final = 400

# Numbers of ptrace's requests.
_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_WALL: Final = 0x40000000  # also wait for threads other than a process's first


@pytest.fixture
def acc() -> Iterator[SparseConditionalAccumulator]:
    """A named accumulator of sums."""
    with SparseConditionalAccumulator("f8", None, "forked", reduction_type="SUM") as made:
        yield made
        made.unlink()


def _apply(acc: SparseConditionalAccumulator, count: int) -> int:
    for _ in range(count):
        assert acc.apply_grad(range(ROWS), np.ones((ROWS, 4)), local_step=shmacc.NEVER_STALE)
    return count


def _child(acc: SparseConditionalAccumulator) -> int:
    # The parent's threads do not exist here, so their locks must be free.
    applied = _apply(acc, 5)
    stats = acc.stats()
    assert stats.attached >= 2
    assert stats.applied >= applied
    with shmacc.attach("forked") as again:
        assert isinstance(again, SparseConditionalAccumulator)
        applied += _apply(again, 2)
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(10**9, timeout=0.001)
    return applied


def _parent(acc: SparseConditionalAccumulator) -> tuple[int, int]:
    in_children = 0
    with busy(*[lambda: _apply(acc, 1)] * 3) as by_threads:
        for _ in range(FORKS):
            in_children += run_apart(_child, acc)
    return in_children, sum(by_threads)


def test_forked_children_and_their_parents_threads_apply(acc: SparseConditionalAccumulator) -> None:
    """Each apply of each side counts once."""
    in_children, by_threads = run_apart(_parent, acc)
    assert in_children == FORKS * 7
    assert by_threads > 3
    taken = acc.take(1, timeout=0)
    assert taken.count == in_children + by_threads
    assert taken.row_counts.tolist() == [taken.count] * ROWS
    assert (taken.values == taken.count).all()


def _apply_for_ever(acc: SparseConditionalAccumulator, *, pipe: Pipe) -> None:
    _apply(acc, 1)
    pipe.say("going")
    while True:
        _apply(acc, 1)


def test_children_killed_in_an_apply_harm_nobody(acc: SparseConditionalAccumulator) -> None:
    """The children use their parent's handle; the parent and its threads go on."""
    _apply(acc, 1)
    with busy(lambda: _apply(acc, 1)) as done:
        for _ in range(FORKS):
            with Apart(_apply_for_ever, acc).ready() as child:
                child.kill()
    assert sum(done) > 0
    until(lambda: acc.stats().attached == 1)
    taken = acc.take(1, timeout=0)
    # Gradients are whole, at whatever instant the children died.
    assert taken.row_counts.tolist() == [taken.count] * ROWS
    assert (taken.values == taken.count).all()


def _fork_and_die(acc: SparseConditionalAccumulator, *, pipe: Pipe) -> None:
    _apply(acc, 1)
    ready, say_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(say_ready, b"!")
            _apply(acc, 1)
            # The take waits in the queue; the parent is dead when it succeeds.
            acc.take(3, timeout=LONG)
        finally:
            os._exit(0)
    os.read(ready, 1)
    pipe.say(pid)
    signal.pause()


def test_a_child_goes_on_when_its_parent_is_killed(acc: SparseConditionalAccumulator) -> None:
    """The child uses its parent's handle."""
    with Apart(_fork_and_die, acc) as parent:
        child = parent.hear()
        until(lambda: acc.stats().waiting == 1)
        parent.kill()
        until(lambda: acc.stats().attached == 2)  # this process and the grandchild
        _apply(acc, 1)
        until(lambda: acc.global_step == 1)
    until(lambda: acc.stats().attached == 1)
    until(lambda: not _lives(child))
    assert acc.stats().taken == 3


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_private_segment_stays_when_a_child_ends() -> None:
    """The child ends like a program, with finalizers."""
    script = """
        acc = shmacc.ConditionalAccumulator('f4')
        pid = os.fork()
        acc.apply_grad(1.0)
        if pid == 0: sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert acc.take(2, timeout=0).count == 2
        shmacc.attach(acc.shared_name).close()
    """
    assert run(script, warnings="ignore") == (0, "", "")
    # The segment's creator has ended, in order.
    assert testing.leaked_names(os.environ["SHMACC_NAMESPACE"]) == ()


# --- while a thread grows the segment -------------------------------------------------------------


WIDTH: Final = 64
NEW_ROWS: Final = 2000  # about 1 MiB: each gradient of new rows makes the table grow
INSTRUCTIONS: Final = 40  # more instructions than change the mapping
MOVES: Final = 2


def _add(wide: Any, first: int) -> None:
    values = np.ones((NEW_ROWS, WIDTH))
    assert wide.apply_grad(range(first, first + NEW_ROWS), values, local_step=NEVER_STALE)


def _grow(wide: Any, stop: threading.Event, *, pipe: Pipe) -> None:
    pipe.say(threading.get_native_id())
    first = NEW_ROWS
    while not stop.is_set():
        _add(wide, first)
        first += NEW_ROWS


def _grow_and_fork(wide: SparseConditionalAccumulator, *, pipe: Pipe) -> int:
    _add(wide, 0)
    _add(wide, 0)  # known rows: from now on every region is mapped
    stop = threading.Event()
    growing = threading.Thread(target=_grow, args=(wide, stop), kwargs={"pipe": pipe})
    growing.start()
    with ExitStack() as stack:
        children: list[Apart] = []
        while pipe.hear() == "fork":
            children.append(stack.enter_context(Apart(_add, wide, 0)))
            pipe.say()
        stop.set()
        for child in children:
            child.result()
    growing.join()
    return len(children)


class Regions:
    """The addresses at which a process has a segment's file mapped."""

    def __init__(self, pid: int, name: str) -> None:
        """Remember where the regions begin."""
        self._maps = Path(f"/proc/{pid}/maps")
        self._name = name
        self._starts = self._look()

    def moved(self) -> bool:
        """Return whether a region has moved since the last look."""
        before, self._starts = self._starts, self._look()
        return any(self._starts[at] != start for at, start in before.items())

    def _look(self) -> dict[str, str]:
        lines = [line.split() for line in self._maps.read_text("ascii").splitlines()]
        return {fields[2]: fields[0].split("-")[0] for fields in lines if self._name in fields[-1]}


@pytest.fixture
def wide() -> Iterator[SparseConditionalAccumulator]:
    """A named accumulator of sums."""
    with SparseConditionalAccumulator("f8", (None, WIDTH), "forked", reduction_type="SUM") as made:
        yield made
        made.unlink()


class TracedThread:
    """A thread of a descendant process, stopped except when told to run."""

    def __init__(self, thread: int) -> None:
        """Stop the thread, wherever it is; a system call in which it waits is interrupted."""
        self.thread = thread
        self.held = False
        stepping_tracer.ptrace(_SEIZE, thread)
        stepping_tracer.ptrace(_INTERRUPT, thread)
        self._wait()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run until the condition holds; check it whenever a system call begins or ends."""
        while not condition():
            self._go(stepping_tracer.SYSCALL)

    def step(self) -> None:
        self._go(stepping_tracer.SINGLESTEP)

    def let_go(self) -> None:
        if self.held:
            self.held = False
            stepping_tracer.ptrace(stepping_tracer.DETACH, self.thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def _go(self, request: int) -> None:
        stepping_tracer.ptrace(request, self.thread)
        self.held = False
        self._wait()

    def _wait(self) -> None:
        while True:
            _, status = os.waitpid(self.thread, _WALL)
            assert os.WIFSTOPPED(status), f"the traced thread has ended with status {status}"
            number = os.WSTOPSIG(status)
            if number == signal.SIGTRAP:
                self.held = True
                return
            stepping_tracer.ptrace(
                stepping_tracer.CONT, self.thread, number
            )  # passes on a signal sent to the thread


@stepping_tracer.needs_ptrace
def test_a_fork_at_any_instant_of_a_growth_harms_neither_process(
    wide: SparseConditionalAccumulator, namespace: str
) -> None:
    """Each child adds correctly to rows in the region that was being moved."""
    with stepping_tracer.on_one_core(), Apart(_grow_and_fork, wide) as process:
        thread = process.hear()
        with TracedThread(thread) as growing:
            regions = Regions(process.pid, namespace)
            for move in range(MOVES):
                growing.run_until(regions.moved)
                for number in range(INSTRUCTIONS):
                    if EVERY_INSTANT or number % MOVES == move:
                        process.turn("fork")
                    growing.step()
        children = process.finish("enough")
    assert children == INSTRUCTIONS * (MOVES if EVERY_INSTANT else 1)
    taken = wide.take(1, timeout=0)
    assert (taken.values[:NEW_ROWS] == 2 + children).all()
    assert (taken.values[NEW_ROWS:] == 1).all()
    assert taken.indices.size == (taken.count - 1 - children) * NEW_ROWS
