"""The creator of shared arrays is killed, interrupted or overtaken: they exist whole or not at all.

They are made in a file without a name, so that an interrupted creation leaves no name and no
memory.
"""

import os
import signal
import threading
from typing import Any, Final

import numpy as np
import pytest
from helpers.killing_calls import deaths
from helpers.killing_deeds import Deed, nothing
from helpers.killing_scenes import NAME, Record
from helpers.stepping_calls import needs_calls
from helpers.support import AlarmError, alarm, until

from shmacc import SharedArrays, TensorSpec, errors, inspection, testing
from shmacc._base import names

pytestmark = pytest.mark.threads

GIVEN: Final = np.arange(3000, dtype=np.float64)  # a few pages
LARGE: Final = 512 << 20


def create(name: str | None = NAME, **keywords: Any) -> SharedArrays:
    return SharedArrays({"given": GIVEN, "zeros": TensorSpec((5000,))}, name, **keywords)


def whole(params: SharedArrays) -> bool:
    return np.array_equal(params["given"], GIVEN) and not params["zeros"].any()


def judge() -> bool:
    """Check that arrays, if they exist, are whole and usable, and that all is removable."""
    try:
        with SharedArrays.attach(NAME) as params:
            assert whole(params)
        made = True
    except errors.NotFoundError:
        made = False
    with create() as params:
        assert whole(params)
        assert inspection.describe(NAME).stats.attached == 1
        params.unlink()
    for leftover in inspection.leftovers(namespace=names.current_namespace()):
        assert inspection.clean(leftover)
    assert testing.leaked_names(names.current_namespace()) == ()
    return made


@needs_calls
def test_a_creator_killed_at_any_system_call_made_all_or_nothing(record_property: Record) -> None:
    made, stop = False, 0
    for stop in deaths(Deed("creating", nothing, nothing, lambda _: create())):
        there = judge()
        assert there >= made, f"gone again at stop {stop}"
        made = there
    assert made
    record_property("stops", stop)


def nameless_bytes() -> int:
    """Return the bytes of this process's new file, which has no name yet."""
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  descriptors
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/#"):  # noqa: PTH115, S108
                return os.fstat(int(fd)).st_blocks * 512
        except OSError:  # closed by now, as the listing's own is
            continue
    return 0


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "contents"])
def test_a_handler_that_raises_while_arrays_are_made_leaves_nothing(given: bool) -> None:
    """Other threads must run meanwhile, since one of them sends the signal."""
    half = LARGE // 2 if given else 1
    contents: Any = np.zeros(LARGE, np.uint8) if given else TensorSpec((LARGE // 4,))

    def interrupt() -> None:
        until(lambda: nameless_bytes() > half)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, alarm)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(AlarmError):
            SharedArrays({"large": contents}, NAME)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert nameless_bytes() == 0
    assert testing.leaked_names(names.current_namespace()) == ()
    judge()
