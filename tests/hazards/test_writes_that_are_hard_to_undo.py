"""A write to a read-only array is undone even in locked memory, or when system calls fail.

If nothing can undo it, the exception says so, and each later use of the arrays raises it again.
"""

import ctypes
import errno
import itertools
import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import apart, run_apart
from helpers.denied_calls import MAP_ANEW, deny, needs_denials
from helpers.support import SANITIZED
from helpers.training import training

import shmacc
from shmacc import errors
from shmacc.optim import Adam

NAME: Final = "read-only"
TABLE: Final = np.arange(60_000, dtype="f4").reshape(-1, 100)  # some pages

_libc = ctypes.CDLL(None, use_errno=True)
_ON_FAULT, _CURRENT, _FUTURE = 1, 1, 2
_DONTNEED, _DONTNEED_LOCKED, _READ = 4, 24, 1

pytestmark = pytest.mark.skipif(SANITIZED, reason="a sanitizer's shadow cannot be locked")


def lock(call: str, array: Any, *options: int, bytes_: int | None = None) -> None:
    place, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(bytes_ or array.nbytes)
    if getattr(_libc, call)(place, size, *options) != 0:
        raise OSError(ctypes.get_errno(), call)


def lock_all(_: Any, what: int = _CURRENT | _FUTURE) -> None:
    if _libc.mlockall(what) != 0:
        raise OSError(ctypes.get_errno(), "mlockall")


def flags_of(array: Any) -> list[str]:
    """Return the kernel's flags of the array's mappings: "lo" if they are locked."""
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if last:
            begin, end = int(first, 16), int(last, 16)
            inside = begin < array.ctypes.data + array.nbytes and array.ctypes.data < end
        elif inside and line.startswith("VmFlags:"):
            flags.append(" ".join(flag for flag in line.split() if flag in {"lo", "lf"}))
    return flags


def told(array: Any) -> str:
    """Write to the whole array; return the error's message."""
    with pytest.raises(errors.FailedPreconditionError, match="is read-only") as caught:  # noqa: PT012
        ctypes.memset(array.ctypes.data, 255, array.nbytes)
        len(())
    return str(caught.value)


MEMORY: Final[dict[str, Callable[[Any], None]]] = {
    "all": lock_all,
    "all that is there": partial(lock_all, what=_CURRENT),
    "the array": partial(lock, "mlock"),
    "a part": partial(lock, "mlock", bytes_=5000),
    "by and by": lambda array: lock("mlock2", array, _ON_FAULT),
}


def _write_and_follow(lock_it: Callable[[Any], None], made: Any) -> bool:
    with shmacc.SharedArrays.attach(NAME) as shared:
        array = shared["emb"]
        try:
            lock_it(array)
        except OSError:
            return False
        before = flags_of(array)
        assert any("lo" in each for each in before)
        for value in (1, 2):
            assert told(array).endswith("The write was undone")
            made[...] = value
            assert np.array_equal(array, made)
            assert flags_of(array) == before
        assert shared["emb"][0, 0] == 2
        return True


@pytest.mark.parametrize("locked", MEMORY)
def test_a_write_is_undone_in_locked_memory_which_stays_locked(namespace: str, locked: str) -> None:  # noqa: ARG001
    with shmacc.SharedArrays({"emb": TABLE}, NAME, unlink_on_close=True) as made:
        if not run_apart(_write_and_follow, MEMORY[locked], made["emb"]):
            pytest.skip("this user may not lock so much memory")


def _write_and_pin(made: Any) -> None:
    with shmacc.SharedArrays.attach(NAME) as shared:
        array = shared["emb"]
        with_gil = ctypes.PyDLL(None)
        gate = threading.Lock()
        gate.acquire()
        reader, writer = os.pipe()
        place = (ctypes.c_size_t * 2)(array.ctypes.data, 4096)

        def write() -> None:
            # Both calls keep the GIL: the page is in the pipe before the main thread checks.
            with_gil.memset(ctypes.c_void_p(array.ctypes.data), 255, ctypes.c_size_t(array.nbytes))
            assert with_gil.vmsplice(writer, place, 1, 0) == 4096
            gate.release()

        thread = threading.Thread(target=write)
        with pytest.raises(errors.FailedPreconditionError, match="undone"):  # noqa: PT012
            thread.start()
            gate.acquire()
            len(())
        thread.join()
        made[...] = 7
        assert np.array_equal(array, made)
        assert os.read(reader, 4096) == b"\xff" * 4096


def test_a_write_is_undone_in_pages_that_the_kernel_still_needs(namespace: str) -> None:  # noqa: ARG001
    with shmacc.SharedArrays({"emb": TABLE}, NAME, unlink_on_close=True) as made:
        run_apart(_write_and_pin, made["emb"])


def _write_at_the_limit() -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if resource.RLIM_INFINITY not in {soft, hard} and min(soft, hard) < 8 << 20:
        return False
    with (
        shmacc.SharedArrays({"emb": np.zeros(1 << 20, "f4")}, NAME, unlink_on_close=True) as made,
        shmacc.SharedArrays.attach(NAME) as shared,
    ):
        array = made["emb"]
        lock_all(None, _FUTURE)  # locks every later mapping
        read = shared["emb"]
        status = Path("/proc/self/status").read_text()
        limit = (int(status.partition("VmLck:")[2].split()[0]) << 10) + (2 << 20)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        deny("madvise")
        assert told(read).endswith("The write was undone")
        array[...] = 7
        assert np.array_equal(read, array)
        assert flags_of(read) == ["lo"]
    return True


@needs_denials
def test_a_write_is_undone_though_locked_memory_is_at_its_limit(namespace: str) -> None:  # noqa: ARG001
    """Old and new pages together would exceed the limit, so the old ones are unlocked first."""
    if not run_apart(_write_at_the_limit, uid=4711 if os.geteuid() == 0 else None):
        pytest.skip("the limit of locked memory is too low")


# --- calls that fail -----------------------------------------------------------------------------

DENIALS: Final[dict[str, Callable[[], None]]] = {
    "mprotect": partial(deny, "mprotect", a2=_READ),
    "MADV_DONTNEED": partial(deny, "madvise", errno.EINVAL, a2=_DONTNEED),
    "MADV_DONTNEED_LOCKED": partial(deny, "madvise", errno.EINVAL, a2=_DONTNEED_LOCKED),
    "munlock": partial(deny, "munlock"),
    "mlock": partial(deny, "mlock"),
    "mmap": partial(deny, "mmap", errno.ENOMEM, a3=MAP_ANEW),
}
SETS: Final = [
    names for count in (1, 2, len(DENIALS)) for names in itertools.combinations(DENIALS, count)
]


def _is_undone(denied: tuple[str, ...], *, locked: bool, is_open: bool) -> bool:
    """Return whether a way to undo the write is left."""
    unlocked_alike = "MADV_DONTNEED" not in denied and not (locked and "munlock" in denied)
    dropped = "MADV_DONTNEED_LOCKED" not in denied or unlocked_alike
    return ("mprotect" not in denied and dropped) or (is_open and "mmap" not in denied)


def _write_without(denied: tuple[str, ...], *, locked: bool, is_open: bool, maker: Any) -> None:
    made = maker["emb"]
    shared = shmacc.SharedArrays.attach(NAME)
    array = shared["emb"]
    if locked:
        lock("mlock", array)
    if not is_open:
        shared.close()
        maker.close()
    for name in denied:
        DENIALS[name]()
    said = told(array)
    made[...] = 7
    if _is_undone(denied, locked=locked, is_open=is_open):
        assert "The write was undone" in said
        assert np.array_equal(array, made)
        assert "not locked any more" in said or flags_of(array) == ["lo" if locked else ""]
    else:
        assert "could not be undone" in said
        for _ in range(2 * is_open):
            with pytest.raises(errors.FailedPreconditionError) as again:
                shared["emb"]
            assert str(again.value) == said
    shared.close()
    with shmacc.SharedArrays.attach(NAME) as anew:
        assert np.array_equal(anew["emb"], made)


@needs_denials
@pytest.mark.parametrize("denied", SETS, ids="+".join)
def test_a_write_is_undone_or_reported_whichever_call_fails(
    namespace: str,  # noqa: ARG001
    denied: tuple[str, ...],
) -> None:
    with shmacc.SharedArrays({"emb": TABLE}, NAME, unlink_on_close=True) as made:
        for locked, is_open in itertools.product((False, True), repeat=2):
            run_apart(partial(_write_without, denied, locked=locked, is_open=is_open, maker=made))


USES: Final[dict[str, Callable[[Any], Any]]] = {
    "an array": lambda params: params["emb"], "another array": lambda params: params["bias"],
    "a slot": lambda params: params.slots["bias"]["m"],
    "a table's rows": lambda params: params["rows"][[1]],
    "a table's ids": lambda params: params["rows"].ids(), "step": lambda params: params.step,
    "snapshot": lambda params: params.snapshot(), "state": lambda params: params.state(),
    "save": lambda params: shmacc.save("/dev/null/nowhere", params),
    "items": lambda params: list(params.items()),
}  # fmt: skip


@needs_denials
@apart()
def test_every_use_of_parameters_reports_a_write_that_stayed(namespace: str) -> None:  # noqa: ARG001
    arrays = {"emb": TABLE, "bias": np.zeros(4), "rows": shmacc.TableSpec((2,))}
    with training(arrays, Adam(0.1), (NAME, f"{NAME}.group")) as (params, group):
        array, state = params["emb"], params.state()
        group.apply({"emb": np.ones_like(TABLE)}, 0)
        deny("madvise")
        deny("mmap", a3=MAP_ANEW)
        said = told(array)
        assert "could not be undone (mmap: Operation not permitted)" in said
        for name, use in USES.items():
            with pytest.raises(errors.FailedPreconditionError) as caught:
                use(params)
            assert str(caught.value).endswith(said), name
        with pytest.raises(errors.FailedPreconditionError, match="could not be undone"):
            params.restore(state)
        with (
            pytest.raises(errors.FailedPreconditionError, match="could not be undone"),
            group.round(1, timeout=0) as taken,
        ):
            params.update(taken)
        assert group.global_step == 0
        group.unlink()
        params.unlink()
