"""A write to a read-only array is undone and raises, where it used to end the process.

By whatever NumPy's flag does not stop: torch does so (tests/home/test_torch_read_only.py), and here
ctypes.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.support import same_bits

import shmacc
from shmacc import errors
from shmacc.optim import Adam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME: Final = "read-only"
TABLE: Final = np.arange(60_000, dtype="f4").reshape(-1, 100)  # some pages


def scribble(array: Any) -> None:
    """Write to all of it, whatever NumPy says."""
    ctypes.memset(array.ctypes.data, 255, array.nbytes)
    len(())  # Python raises at the end of a call


def make_parameters() -> Any:
    return shmacc.Parameters({"emb": TABLE}, NAME, optimizer=Adam(0.1), unlink_on_close=True)


def make_arrays() -> Any:
    return shmacc.SharedArrays({"emb": TABLE}, NAME, unlink_on_close=True)


# Who makes it, and who else has it, and the array of that.
SOURCES: Final[dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]]] = {
    "parameters": (make_parameters, lambda: shmacc.Parameters.attach(NAME), lambda it: it["emb"]),
    "a slot": (
        make_parameters,
        lambda: shmacc.Parameters.attach(NAME),
        lambda it: it.slots["emb"]["m"],
    ),
    "parameters as arrays": (
        make_parameters,
        lambda: shmacc.SharedArrays.attach(NAME),
        lambda it: it["emb"],
    ),
    "arrays": (make_arrays, lambda: shmacc.SharedArrays.attach(NAME), lambda it: it["emb"]),
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, namespace: str) -> Iterator[tuple[Any, str]]:  # noqa: ARG001
    make, attach, array_of = SOURCES[request.param]
    kind = "shared arrays" if make is make_arrays else "parameters"
    with make() as made, attach() as other:
        array = array_of(made) if request.param == "a slot" else array_of(other)
        yield array, f"Array 'emb' of {kind} '{NAME}'"


def test_a_write_raises_and_is_undone(source: tuple[Any, str]) -> None:
    array, name = source
    before = array.copy()
    for _ in range(3):
        with pytest.raises(errors.FailedPreconditionError, match="read-only") as caught:
            scribble(array)
        assert str(caught.value).startswith(name)
        assert str(caught.value).endswith("The write was undone")
        same_bits(array, before)


def test_a_thread_that_writes_is_told_of_in_the_main_one(source: tuple[Any, str]) -> None:
    array, name = source
    before = array.copy()
    gate = threading.Lock()
    gate.acquire()

    def write() -> None:
        gate.acquire()
        # With the GIL: the main thread is told when all has been written, and so once.
        memory, length = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        ctypes.pythonapi.memset(memory, 255, length)

    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(errors.FailedPreconditionError, match=name):  # noqa: PT012
        gate.release()
        thread.join()
        len(())
    thread.join()
    same_bits(array, before)


def test_a_forked_child_is_told_as_well(source: tuple[Any, str]) -> None:
    array, _ = source
    before = array.copy()

    def write_and_look() -> bytes:
        with pytest.raises(errors.FailedPreconditionError, match="read-only"):
            scribble(array)
        return bytes(array.tobytes())

    with Apart(write_and_look) as child:
        assert child.result() == before.tobytes()
    same_bits(array, before)


def test_it_also_holds_when_everything_is_closed_and_removed() -> None:
    with make_parameters() as params:
        array = params["emb"]
    with pytest.raises(errors.FailedPreconditionError):
        scribble(array)
    same_bits(array, TABLE)


def work(*, pipe: Pipe) -> None:
    """Read an array that another process changes; write to it in between."""
    with shmacc.SharedArrays.attach(NAME) as shared:
        array = shared["emb"]
        while (value := pipe.hear()) is not None:
            same_bits(array, np.full_like(TABLE, value))
            if value % 2:
                with pytest.raises(errors.FailedPreconditionError):
                    scribble(array)
            pipe.say()


def test_a_reader_that_never_wrote_or_did_sees_each_change() -> None:
    """Read-only arrays are mapped privately, and are the shared memory all the same."""
    with make_arrays() as made:
        with Apart(work) as reader:
            for value in (2, 4, 7, 8, 9, 10):
                made["emb"][...] = value
                reader.say(value)
                reader.hear()
            reader.say(None)
            reader.result()
        same_bits(made["emb"], np.full_like(TABLE, 10))


PROGRAM: Final = """
    import ctypes, faulthandler, os, resource, signal
    import numpy as np
    import shmacc

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    {before}
    with shmacc.Parameters({{"emb": np.zeros(10_000)}}, {name!r}) as params:
        params.unlink()
        array = params["emb"]
        {after}
        {write}
"""
WRITE: Final = "ctypes.memset(array.ctypes.data, 1, 9)"
NO_MEMORY: Final = "resource.setrlimit(resource.RLIMIT_DATA, (0, 0))"


def run(write: str, before: str = "", after: str = "") -> tuple[int, str]:
    """Run a program that does this before and after it gets a read-only array; how it ends."""
    text = textwrap.dedent(PROGRAM).format(before=before, name=NAME, after=after, write=write)
    program = subprocess.run(
        [sys.executable, "-P", "-c", text], stderr=subprocess.PIPE, text=True, check=False
    )
    return program.returncode, program.stderr


def test_a_program_that_writes_ends_by_an_exception() -> None:
    status, complaint = run(WRITE)
    assert status == 1
    assert "FailedPreconditionError: Array 'emb' of parameters" in complaint


def test_a_write_that_cannot_be_undone_says_one_sentence() -> None:
    """Without memory for the pages the process dies as it would, but not without a word."""
    status, complaint = run(WRITE, after=NO_MEMORY)
    assert status == -signal.SIGSEGV
    assert complaint.startswith(f"shmacc: Array 'emb' of parameters '{NAME}' is read-only")
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "other", "when"),
    [
        ("ctypes.string_at(8)", "", "before"),
        ("ctypes.string_at(8)", "faulthandler.enable()", "before"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "faulthandler.enable()", "after"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "", "before"),
    ],
)
def test_other_faults_are_for_who_had_the_signal(fault: str, other: str, when: str) -> None:
    status, complaint = run(fault, **{when: other})
    assert status == -signal.SIGSEGV
    assert "shmacc" not in complaint.partition("\n")[0]
    assert ("Fatal Python error: Segmentation fault" in complaint) == bool(other)


def test_a_handler_of_python_is_called() -> None:
    status, complaint = run(
        "os.kill(os.getpid(), signal.SIGSEGV); len(())",
        "signal.signal(signal.SIGSEGV, lambda *_: os._exit(3))",
    )
    assert (status, complaint) == (3, "")
