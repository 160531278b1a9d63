"""A signal handler opens, closes or removes an accumulator while its thread does the same.

So does a garbage collection. At whatever instant they come, one segment has the name, everybody
attaches to this segment, and the process counts as attached as long as it has the segment open.
"""

import contextlib
import itertools
import os
import signal
from collections import Counter
from typing import Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, run_apart
from helpers.at_every_point import Points, coming_between
from helpers.lock_holder import held
from helpers.support import EVERY_INSTANT, until

import shmacc
from shmacc import NEVER_STALE, ConditionalAccumulator, errors, inspection, testing
from shmacc._base import names

NAME: Final = "opened"


def make() -> Any:
    return ConditionalAccumulator("f8", (), NAME)


def attach() -> Any:
    return shmacc.attach(NAME)


class Process:
    """What a process has opened: `acc` by the interrupted call, the rest beside it."""

    def __init__(self) -> None:
        """Begin with nothing open."""
        self.acc: Any = None
        self.beside: list[Any] = []

    def make(self) -> None:
        self.acc = make()

    def attach(self) -> None:
        self.acc = attach()

    def close(self) -> None:
        self.acc.close()

    def unlink(self) -> None:
        self.acc.unlink()

    def look_and_clean(self) -> None:
        inspection.describe(NAME)
        for leftover in inspection.leftovers(namespace=names.current_namespace()):
            inspection.clean(leftover)

    def finish(self) -> None:
        """Close all handles; remove the segment if its name exists."""
        for acc in (self.acc, *self.beside):
            if acc is not None:
                acc.close()
        if testing.leaked_names(names.current_namespace()):
            with attach() as acc:
                acc.unlink()


def _there(_: Process) -> None:
    make().close()


def _open_twice(process: Process) -> None:
    process.make()
    process.beside.append(attach())


def _make_and_unlink(_: Process) -> None:
    with make() as acc:
        acc.unlink()


# For each: what happens before, the interrupted call, and the error that a removal may cause.
CALLS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "making": (lambda _: None, Process.make, ()),
    "making what is there": (_there, Process.make, ()),
    "attaching": (_there, Process.attach, errors.NotFoundError),
    "closing": (Process.make, Process.close, ()),
    "closing one of two": (_open_twice, Process.close, ()),
    "removing": (Process.make, Process.unlink, errors.FailedPreconditionError),
}
HANDLERS: Final[dict[str, Any]] = {
    "makes": lambda process: process.beside.append(make()),
    "attaches": lambda process: process.beside.append(attach()),
    "makes and closes": lambda _: make().close(),
    "makes and removes": _make_and_unlink,
    "looks and cleans": Process.look_and_clean,
    "closes the same": Process.close,
    "removes the same": Process.unlink,
}
# Each call and each handler occurs in the most dangerous pairs.
PAIRS: Final = [
    ("making", "makes"), ("making", "looks and cleans"),
    ("making what is there", "makes and removes"), ("attaching", "attaches"),
    ("attaching", "makes and removes"), ("closing", "attaches"), ("closing", "closes the same"),
    ("closing", "removes the same"), ("closing one of two", "closes the same"),
    ("removing", "makes and closes"), ("removing", "removes the same"),
]  # fmt: skip
# Only these pairs are tried at each instruction, since a call has hundreds of instructions.
CLOSELY: Final = [
    ("making", "makes and closes"),
    ("closing", "looks and cleans"),
    ("removing", "makes"),
]


def _witness(*, pipe: Pipe) -> None:
    """Report at each message the segment's token, its living processes and applies, or None."""
    while pipe.hear():
        seen: Any = None
        if testing.leaked_names(names.current_namespace()):
            found = inspection.describe(NAME)
            living = [process.pid for process in found.processes if process.alive]
            seen = found.token, living, found.stats.applied
        pipe.say(seen)


def _verify(process: Process, witness: Apart) -> None:
    """Check that handles with the name share one segment, and that others see this process."""
    handles = [
        acc for acc in (process.acc, *process.beside) if acc is not None and not acc._handle.closed
    ]
    tokens = Counter(acc._handle.config()["token"] for acc in handles)
    for acc in handles:
        assert acc.apply_grad(1.0, local_step=NEVER_STALE)
    for acc in handles:
        assert acc.num_accumulated() == tokens[acc._handle.config()["token"]]
        assert acc.stats().attached == 1
    of_the_name = {acc._handle.config()["token"] for acc in handles if not acc._handle.unlinked}
    assert len(of_the_name) <= 1
    seen = witness.turn("look")
    if seen is None:
        assert not of_the_name
        return
    assert len(testing.leaked_names(names.current_namespace())) == 2
    token, living, applied = seen
    assert living == ([os.getpid()] if of_the_name else [])
    assert of_the_name <= {token}
    assert applied == tokens[token]


def _at_every_point(call: str, handler: str, points: Points) -> int:
    """Run the handler at every point of the call; return how many points there were."""
    before, interrupted, fair = CALLS[call]
    # Import everything first.
    warm = Process()
    warm.make()
    warm.look_and_clean()
    warm.finish()

    def handle(*_: object) -> None:
        # The segment may not exist yet, or may be gone.
        with contextlib.suppress(errors.NotFoundError, errors.FailedPreconditionError):
            HANDLERS[handler](process)

    signal.signal(signal.SIGUSR1, handle)
    descriptors: set[int] = set()
    apart = 1 if EVERY_INSTANT else {Points.LINES: 2, Points.INSTRUCTIONS: 4}.get(points, 1)
    with Apart(_witness) as witness:
        for number in itertools.count(1, apart):
            process = Process()
            before(process)
            with (
                coming_between(lambda: signal.raise_signal(signal.SIGUSR1), points, number) as it,
                contextlib.suppress(fair),
            ):
                interrupted(process)
            try:
                _verify(process, witness)
                process.finish()
                assert witness.turn("look") is None
                descriptors.add(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
                assert len(descriptors) == 1
            except BaseException as error:
                error.add_note(f"{points.name.lower()}, number {number}")
                raise
            if not it.came:
                return number
    raise AssertionError


@pytest.mark.parametrize(("call", "handler", "points"), [
    *((*pair, Points.LINES) for pair in PAIRS),
    *((*pair, Points.INSTRUCTIONS) for pair in CLOSELY),
    *((*pair, Points.COLLECTIONS) for pair in PAIRS if pair[0] in {"making", "attaching"}),
])  # fmt: skip
def test_a_handler_may_open_or_close_at_any_point(call: str, handler: str, points: Points) -> None:
    assert run_apart(_at_every_point, call, handler, points) > 1


def _open_with_a_handler(function: Any, *, pipe: Pipe) -> None:
    def handle(*_: object) -> None:
        pipe.say("handles")
        process.beside.append(attach())

    process = Process()
    signal.signal(signal.SIGUSR1, handle)
    pipe.say("opens")
    function(process)
    pipe.say("open")
    with Apart(_witness) as witness:
        _verify(process, witness)
    for acc in (process.acc, *process.beside):
        acc.close()


@pytest.mark.parametrize("function", [Process.make, Process.attach])
def test_a_handler_may_attach_while_its_thread_waits_for_the_name(function: Any) -> None:
    """Another process is opening or removing the segment."""
    make().close()
    try:
        with (
            held(NAME, layout.NAME_BYTE) as holder,
            Apart(_open_with_a_handler, function) as opener,
        ):
            assert opener.hear() == "opens"
            until(lambda: any(p.alive for p in inspection.describe(NAME).processes))
            opener.signal(signal.SIGUSR1)
            assert opener.hear() == "handles"
            holder.kill()
            assert opener.hear() == "open"
            opener.result()
        assert [p.alive for p in inspection.describe(NAME).processes] in ([], [False])
    finally:
        inspection.remove(NAME, force=True)
