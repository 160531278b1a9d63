"""A KeyboardInterrupt at any instant of opening, closing or removing leaves nothing half done.

If the caller got no handle, no name in /dev/shm, no descriptor and no entry in the list of
processes is left. An interrupted close or removal can be repeated.
"""

import gc
import itertools
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, run_apart
from helpers.at_every_point import Points, coming_between
from helpers.lock_holder import held
from helpers.support import EVERY_INSTANT, left_behind, until

import shmacc
from shmacc import SharedArrays, SparseConditionalAccumulator, inspection

NAME: Final = "interrupted"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  descriptors


def nothing() -> None:
    """Prepare nothing."""


def named() -> Any:
    return SparseConditionalAccumulator("f8", None, NAME)


def private() -> Any:
    return SparseConditionalAccumulator("f8")


def opened() -> Any:
    acc = named()
    acc.apply_grad([1], [1.0])
    return acc


def there() -> bytes:
    with opened() as acc:
        return pickle.dumps(acc)


def attach(_: object) -> Any:
    return shmacc.attach(NAME)


def get_from_attached_arrays(_: object) -> Any:
    params = SharedArrays.attach(NAME)
    assert params["a"] == [1.0]
    return params


def use_in_a_block(_: object) -> None:
    with private():
        pass


def close(had: list[Any]) -> None:
    had[0].close()


# Checks after an attempt: they get what existed before, and the attempt's result, if any.


def _private(_: list[Any], got: Any) -> None:
    """Check that nothing is left after a close of the result, if there is one."""
    if got is not None:
        got.close()
    assert left_behind() == ()


def _closed(had: list[Any], _: Any) -> None:
    had[0].close()
    assert left_behind() == ()


def _dropped(had: list[Any], _: Any) -> None:
    had.clear()
    assert left_behind() == ()


def _goes_at_the_end(*_: Any) -> None:
    """Run the interpreter's end, which closes an object whose finalizer was interrupted."""
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    weakref.finalize._shutdown = False  # type: ignore[attr-defined]
    assert left_behind() == ()


def _named(_: list[Any], got: Any) -> None:
    """Check that the segment is missing or whole, and open by the call's handles only."""
    if got is not None:
        got.close()
    assert len(left_behind()) in ({0, 2} if got is None else {2})
    if left_behind():
        assert not any(process.alive for process in inspection.describe(NAME).processes)
        inspection.remove(NAME)


def _unlinked(had: list[Any], _: Any = None) -> None:
    """Check that the accumulator is open as before, and that its name is removed or removable."""
    (acc,) = had
    assert acc.num_accumulated() == 1
    acc.unlink()
    assert left_behind() == ()
    assert acc.take(1, timeout=0).count == 1
    acc.close()


# For each: how to prepare, the interrupted call, and the check after it.
CALLS: Final[dict[str, tuple[Callable[[], Any], Callable[[list[Any]], Any], Any]]] = {
    "using a private one in a block": (nothing, use_in_a_block, _private),
    "making a named one": (nothing, lambda _: named(), _named),
    "making what is there": (there, lambda _: named(), _named),
    "attaching": (there, attach, _named),
    "unpickling": (there, lambda had: pickle.loads(had[0]), _named),
    "making private arrays": (nothing, lambda _: SharedArrays({"a": [1.0]}), _private),
    "making named arrays": (nothing, lambda _: SharedArrays({"a": [1.0]}, NAME), _named),
    "attaching to arrays": (lambda: SharedArrays({"a": [1.0]}, NAME).close(),
        get_from_attached_arrays, _named),
    "closing private arrays": (lambda: SharedArrays({"a": [1.0]}), close, _closed),
    "closing a private one": (private, close, _closed),
    "closing a private one that is dropped then": (private, close, _dropped),
    "dropping a private one": (private, list.clear, _goes_at_the_end),
    "removing": (opened, lambda had: had[0].unlink(), _unlinked),
}  # fmt: skip


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def _at_every_instruction(call: str) -> int:
    """Interrupt the call at each instruction (or each second one); return how many there are."""
    before, called, verify = CALLS[call]
    # An interrupt in a finalizer is only reported; it does not end the call.
    sys.unraisablehook = lambda _: None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # collections need not look at pytest's objects each time
    # Number 0 is a call without an interrupt.
    for number in itertools.chain((0,), itertools.count(1, 1 if EVERY_INSTANT else 2)):
        before_it = descriptors()
        had, got, interrupted = [before()], None, False
        with coming_between(
            lambda: signal.raise_signal(signal.SIGINT), Points.INSTRUCTIONS, number
        ) as it:
            try:
                got = called(had)
            except KeyboardInterrupt:
                interrupted = True
        try:
            assert got is None or not interrupted
            verify(had, got)
            del had, got
            gc.collect()
            if number:
                assert descriptors() == before_it
        except BaseException as error:
            error.add_note(f"instruction, number {number}")
            raise
        if number and not it.came:
            return number
    raise AssertionError


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_instruction_leaves_nothing_half_done(call: str) -> None:
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
        CALLS[call][1](had)

    signal.signal(signal.SIGINT, raise_once)
    had = [attach(None)] if call == "removing" else []
    before_it = descriptors()
    pipe.turn("ready")
    with pytest.raises(KeyboardInterrupt):
        call_it()
    gc.collect()
    assert descriptors() == before_it
    pipe.turn("interrupted")
    if had:
        _unlinked(had)


@pytest.mark.parametrize("call", ["making what is there", "attaching", "removing"])
def test_an_interrupt_in_the_wait_for_the_name_leaves_nothing(call: str) -> None:
    """Another process is stopped while it opens or removes the segment."""
    there()
    with Apart(_wait, call) as process:
        assert process.hear() == "ready"
        with held(NAME, layout.NAME_BYTE):
            process.say()
            # Openers attach before they wait for the name; the remover is attached already.
            until(lambda: any(each.alive for each in inspection.describe(NAME).processes))
            while not process.pipe.poll(0.01):
                process.signal(signal.SIGINT)
            assert process.hear() == "interrupted"
            attached = [each.alive for each in inspection.describe(NAME).processes]
            assert attached.count(True) == (call == "removing")
        process.finish()
    if call != "removing":
        inspection.remove(NAME)
