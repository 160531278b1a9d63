"""A KeyboardInterrupt at any instant of opening, closing and removing leaves nothing half done.

What nobody got is nobody's: no name in /dev/shm, no descriptor and no place in the table of
processes stays behind with it. A close or a removal that was cut short can be asked for again.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.at_every_point import Points, coming_between
from helpers.lock_holder import held
from helpers.support import EVERY_INSTANT, until

import shmacc
from shmacc import (
    SharedArrays,
    SparseConditionalAccumulator,
    inspection,
    testing,
)
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.apart import Pipe

NAME: Final = "interrupted"


def left_behind() -> tuple[str, ...]:
    return testing.leaked_names(names.current_namespace())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  descriptors


class Holder:
    """What the interrupted call returned, if it got that far; and what there was before it."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.acc: Any = None
        self.pickled = b""

    def there(self) -> None:
        with named() as acc:
            acc.apply_grad([1], [1.0])
            self.pickled = pickle.dumps(acc)

    def open(self) -> None:
        self.acc = named()
        self.acc.apply_grad([1], [1.0])

    def make(self) -> None:
        self.acc = SparseConditionalAccumulator("f8")

    def use_in_a_block(self) -> None:
        with SparseConditionalAccumulator("f8"):
            pass

    def make_named(self) -> None:
        self.acc = named()

    def make_arrays(self) -> None:
        self.acc = SharedArrays({"a": [1.0]})

    def make_named_arrays(self) -> None:
        self.acc = SharedArrays({"a": [1.0]}, NAME)

    def arrays_there(self) -> None:
        SharedArrays({"a": [1.0]}, NAME).close()

    def get_from_attached_arrays(self) -> None:
        params = SharedArrays.attach(NAME)
        assert params["a"] == [1.0]
        self.acc = params

    def attach(self) -> None:
        self.acc = shmacc.attach(NAME)

    def unpickle(self) -> None:
        self.acc = pickle.loads(self.pickled)

    def close(self) -> None:
        self.acc.close()

    def drop(self) -> None:
        self.acc = None

    def unlink(self) -> None:
        self.acc.unlink()


def named() -> Any:
    return SparseConditionalAccumulator("f8", None, NAME)


def _nothing(_: Holder) -> None:
    pass


def _private(holder: Holder, *, interrupted: bool) -> None:
    """Nobody else has the name: it goes with the object, or there never was one."""
    if holder.acc is not None:
        assert not interrupted
        holder.acc.close()
    assert left_behind() == ()


def _closed(holder: Holder, **_: bool) -> None:
    holder.acc.close()
    assert left_behind() == ()


def _dropped(holder: Holder, **_: bool) -> None:
    holder.acc = None
    assert left_behind() == ()


def _goes_at_the_end(_: Holder, **__: bool) -> None:
    """An interrupt before a finalizer of Python's has begun leaves it to the interpreter's end."""
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    weakref.finalize._shutdown = False  # type: ignore[attr-defined]
    assert left_behind() == ()


def _named(holder: Holder, *, interrupted: bool) -> None:
    """There is none, or it is whole, and nobody has it open whom the call did not give it."""
    if holder.acc is not None:
        assert not interrupted
        holder.acc.close()
    assert len(left_behind()) in ({0, 2} if interrupted else {2})
    if left_behind():
        assert not any(process.alive for process in inspection.describe(NAME).processes)
        inspection.remove(NAME)


def _unlinked(holder: Holder, **_: bool) -> None:
    """It is open as before, and can be removed, or was."""
    assert holder.acc.num_accumulated() == 1
    holder.acc.unlink()
    assert left_behind() == ()
    assert holder.acc.take(1, timeout=0).count == 1
    holder.acc.close()


# What there is before; what is interrupted; and what holds after it.
CALLS: Final[dict[str, tuple[Any, Any, Callable[..., None]]]] = {
    "using a private one in a block": (_nothing, Holder.use_in_a_block, _private),
    "making a named one": (_nothing, Holder.make_named, _named),
    "making what is there": (Holder.there, Holder.make_named, _named),
    "attaching": (Holder.there, Holder.attach, _named),
    "unpickling": (Holder.there, Holder.unpickle, _named),
    "making private arrays": (_nothing, Holder.make_arrays, _private),
    "making named arrays": (_nothing, Holder.make_named_arrays, _named),
    "attaching to arrays": (Holder.arrays_there, Holder.get_from_attached_arrays, _named),
    "closing private arrays": (Holder.make_arrays, Holder.close, _closed),
    "closing a private one": (Holder.make, Holder.close, _closed),
    "closing a private one that is dropped then": (Holder.make, Holder.close, _dropped),
    "dropping a private one": (Holder.make, Holder.drop, _goes_at_the_end),
    "removing": (Holder.open, Holder.unlink, _unlinked),
}


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _at_every_instruction(call: str) -> int:
    """How many points there were."""
    before, called, verify = CALLS[call]
    # An interrupt in a finalizer is reported, and ends nothing.
    sys.unraisablehook = lambda _: None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what pytest has made need not be looked at each time
    # Number 0: nothing comes in between.
    for number in itertools.chain((0,), itertools.count(1, 1 if EVERY_INSTANT else 2)):
        holder = Holder()
        if number:
            had = descriptors()
        before(holder)
        interrupted = False
        with coming_between(interrupt, Points.INSTRUCTIONS, number) as it:
            try:
                called(holder)
            except KeyboardInterrupt:
                interrupted = True
        try:
            verify(holder, interrupted=interrupted)
            del holder
            gc.collect()
            if number:
                assert descriptors() == had
        except BaseException as error:
            error.add_note(f"instruction, number {number}")
            raise
        if number and not it.came:
            return number
    raise AssertionError


@pytest.mark.parametrize("call", CALLS)
def test_at_every_instruction(call: str) -> None:
    """So also at every line."""
    assert run_apart(_at_every_instruction, call) > 20


def _wait(call: str, *, pipe: Pipe) -> None:
    armed = False

    def raise_once(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def call_it() -> None:
        nonlocal armed
        armed = True
        called(holder)

    signal.signal(signal.SIGINT, raise_once)
    holder, (_, called, _) = Holder(), CALLS[call]
    if call == "removing":
        holder.attach()
    had = descriptors()
    pipe.say("ready")
    pipe.hear()
    with pytest.raises(KeyboardInterrupt):
        call_it()
    gc.collect()
    assert descriptors() == had
    pipe.say("interrupted")
    pipe.hear()
    if call == "removing":
        _unlinked(holder)


@pytest.mark.parametrize("call", ["making what is there", "attaching", "removing"])
def test_while_it_waits_for_the_right_to_the_name(call: str) -> None:
    """Somebody else is stopped in the middle of opening the segment, or of removing it."""
    Holder().there()
    with Apart(_wait, call) as process:
        assert process.hear() == "ready"
        with held(NAME, layout.NAME_BYTE):
            process.say()
            # It has its place when it asks for the right, and removing asks for nothing else.
            until(lambda: any(each.alive for each in inspection.describe(NAME).processes))
            while not process.pipe.poll(0.01):
                process.signal(signal.SIGINT)
            assert process.hear() == "interrupted"
            attached = [each.alive for each in inspection.describe(NAME).processes]
            assert attached.count(True) == (call == "removing")
        process.say()
        process.result()
    if call != "removing":
        inspection.remove(NAME)
