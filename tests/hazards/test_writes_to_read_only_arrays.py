"""A write to a read-only array is undone and raises; without the library it would be a SIGSEGV.

NumPy's flag stops most writes, but not those by ctypes (tested here) and by torch (tested in
tests/other_packages/test_torch_read_only.py).
"""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers import own_shm
from helpers.apart import Apart, Pipe, needs_own_shm, run_apart
from helpers.support import same_bits

import shmacc
from shmacc import errors
from shmacc.optim import Adam

NAME: Final = "read-only"
TABLE: Final = np.arange(60_000, dtype="f4").reshape(-1, 100)  # some pages


def scribble(array: Any) -> None:
    """Write to the whole array, in spite of NumPy's flag."""
    ctypes.memset(array.ctypes.data, 255, array.nbytes)
    len(())  # Python raises at the end of a call


def make_parameters() -> Any:
    return shmacc.Parameters({"emb": TABLE}, NAME, optimizer=Adam(0.1), unlink_on_close=True)


def make_arrays() -> Any:
    return shmacc.SharedArrays({"emb": TABLE}, NAME, unlink_on_close=True)


# How to make the object, how to attach another one, and how to get its array.
SOURCES: Final[dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]]] = {
    "parameters": (make_parameters, lambda: shmacc.Parameters.attach(NAME), lambda it: it["emb"]),
    "a slot": (make_parameters, lambda: shmacc.Parameters.attach(NAME),
        lambda it: it.slots["emb"]["m"]),
    "parameters as arrays": (make_parameters, lambda: shmacc.SharedArrays.attach(NAME),
        lambda it: it["emb"]),
    "arrays": (make_arrays, lambda: shmacc.SharedArrays.attach(NAME), lambda it: it["emb"]),
}  # fmt: skip


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


def test_a_write_in_a_thread_raises_in_the_main_thread(source: tuple[Any, str]) -> None:
    array, name = source
    before = array.copy()
    gate = threading.Lock()
    gate.acquire()

    def write() -> None:
        gate.acquire()
        # The thread keeps the GIL: the main thread gets one report, after all writes.
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


def test_a_write_in_a_forked_child_raises(source: tuple[Any, str]) -> None:
    array, _ = source
    before = array.copy()

    def write_and_look() -> bytes:
        with pytest.raises(errors.FailedPreconditionError, match="read-only"):
            scribble(array)
        return bytes(array.tobytes())

    with Apart(write_and_look) as child:
        assert child.result() == before.tobytes()
    same_bits(array, before)


def test_a_write_during_a_call_raises_the_writes_error(source: tuple[Any, str]) -> None:
    array, name = source

    class Writes:
        shape = (3,)

        def __array__(self, *_: Any, **__: Any) -> Any:
            scribble(array)

    with shmacc.ConditionalAccumulator("f4", (3,)) as acc:
        with pytest.raises(errors.FailedPreconditionError, match=name):
            acc.apply_grad(Writes())
        assert acc.num_accumulated() == 0


def test_a_write_raises_after_everything_is_closed_and_removed() -> None:
    with make_parameters() as params:
        array = params["emb"]
    with pytest.raises(errors.FailedPreconditionError):
        scribble(array)
    same_bits(array, TABLE)


def work(*, pipe: Pipe) -> None:
    """Read an array that another process changes; write to the array in between."""
    with shmacc.SharedArrays.attach(NAME) as shared:
        array = shared["emb"]
        while (value := pipe.hear()) is not None:
            same_bits(array, np.full_like(TABLE, value))
            if value % 2:
                with pytest.raises(errors.FailedPreconditionError):
                    scribble(array)
            pipe.say()


def test_readers_see_each_change_whether_they_have_written_or_not() -> None:
    """Read-only arrays are private mappings, which still show the shared memory."""
    with make_arrays() as made:
        with Apart(work) as reader:
            for value in (2, 4, 7, 8, 9, 10):
                made["emb"][...] = value
                reader.turn(value)
            reader.finish(None)
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


def run(
    write: str, before: str = "", after: str = "", environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run PROGRAM with these statements; return its status and what it wrote to stderr."""
    text = textwrap.dedent(PROGRAM).format(before=before, name=NAME, after=after, write=write)
    program = subprocess.run(
        [sys.executable, "-P", "-c", text],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    return program.returncode, program.stderr


def test_a_program_that_writes_ends_by_an_exception() -> None:
    status, complaint = run(WRITE)
    assert status == 1
    assert "FailedPreconditionError: Array 'emb' of parameters" in complaint


def test_a_write_that_cannot_be_undone_prints_a_sentence() -> None:
    """Without memory for its own pages, the process dies as it would without the library."""
    status, complaint = run(WRITE, after=NO_MEMORY)
    assert status == -signal.SIGSEGV
    assert complaint.startswith(f"shmacc: Array 'emb' of parameters '{NAME}' is read-only")
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(("fault", "other", "when"), [
    ("ctypes.string_at(8)", "", "before"),
    ("ctypes.string_at(8)", "faulthandler.enable()", "before"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "faulthandler.enable()", "after"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "", "before"),
])  # fmt: skip
def test_other_faults_go_to_the_previous_handler(fault: str, other: str, when: str) -> None:
    status, complaint = run(fault, *((other, "") if when == "before" else ("", other)))
    assert status == -signal.SIGSEGV
    assert "shmacc" not in complaint.partition("\n")[0]
    assert ("Fatal Python error: Segmentation fault" in complaint) == bool(other)


def test_a_python_handler_of_the_signal_is_called() -> None:
    status, complaint = run(
        "os.kill(os.getpid(), signal.SIGSEGV); len(())",
        "signal.signal(signal.SIGSEGV, lambda *_: os._exit(3))",
    )
    assert (status, complaint) == (3, "")


# --- when the error comes -------------------------------------------------------------------------

# An operator is no call: Python raises the pending error at the next call.
FORKING: Final = """
ran = []
def hook():
    for _ in range(3):
        ran.append(len(ran))
os.register_at_fork(before=hook, after_in_parent=hook, after_in_child=hook)
"""
WRITE_AND_FORK: Final = """
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    view = np.frombuffer(memory, array.dtype)
    try:
        view += 1
        pid = os.fork()
        os._exit(10 * (pid != 0) + 20 * (len(ran) != 6) + 40 * (array.sum() != 0))
    except shmacc.errors.FailedPreconditionError:
        assert (len(ran), array.sum()) == (6, 0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        view += 1
        len(())
"""


def test_a_write_before_a_fork_breaks_no_hook_and_raises_in_the_parent() -> None:
    """Python drops exceptions in fork hooks, and other libraries rely on their hooks."""
    status, complaint = run(WRITE_AND_FORK.strip(), before=FORKING.strip())
    assert status == 1, complaint
    assert "Exception ignored" not in complaint
    assert complaint.rstrip().endswith("The write was undone")


SURVIVES: Final[dict[str, tuple[str, str]]] = {  # before and after the program gets the array
    "an ignored signal": (
        "signal.signal(signal.SIGSEGV, signal.SIG_IGN)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
    ),
    "faulthandler.disable()": ("faulthandler.enable()", "faulthandler.disable(); params['emb']"),
    "the default": ("", "signal.signal(signal.SIGSEGV, signal.SIG_DFL); params['emb']"),
}


@pytest.mark.parametrize("what", SURVIVES)
def test_the_guard_still_works_after_changes_of_the_signals_handler(what: str) -> None:
    before, after = SURVIVES[what]
    status, complaint = run(WRITE, before, after)
    assert (status, "The write was undone" in complaint) == (1, True), complaint


def _write_as_the_first_process() -> None:
    own_shm.call("unshare", own_shm.CLONE_NEWPID)
    assert run_apart(_send_and_write) == (1, 1)


def _send_and_write() -> tuple[int, int]:
    faulthandler.disable()  # pytest had enabled it
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with shmacc.Parameters({"emb": TABLE}) as params:
        array = params["emb"]
        os.kill(os.getpid(), signal.SIGSEGV)  # the kernel lets no such signal end this process
        with pytest.raises(errors.FailedPreconditionError, match="undone"):
            scribble(array)
        return os.getpid(), int(array[0, 1])


@needs_own_shm
def test_the_guard_survives_a_signal_to_process_1_of_a_container() -> None:
    def apart() -> None:
        own_shm.enter_own_namespace()
        _write_as_the_first_process()

    run_apart(apart)


# --- without the guard ----------------------------------------------------------------------------

CAUGHT: Final = (
    "assert int(open('/proc/self/status').read().partition('SigCgt:')[2].split()[0], 16)"
    " >> (signal.SIGSEGV - 1) & 1 == {}"
)


@pytest.mark.parametrize("asked", ["", "1", "0"])
def test_shmacc_guard_0_leaves_signals_alone(asked: str) -> None:
    caught = CAUGHT.format(int(asked != "0"))
    status, complaint = run(WRITE, after=caught, environment={"SHMACC_GUARD": asked})
    if asked == "0":
        assert (status, complaint) == (-signal.SIGSEGV, "")
    else:
        assert (status, "The write was undone" in complaint) == (1, True), complaint


def test_shmacc_guard_in_the_environment_must_be_0_or_1() -> None:
    status, complaint = run(WRITE, environment={"SHMACC_GUARD": "no"})
    assert status == 1
    assert "InvalidArgumentError: The environment variable SHMACC_GUARD must be 0" in complaint
    assert "but is 'no'" in complaint


def test_a_program_without_read_only_arrays_has_no_handler() -> None:
    before = f"shmacc.SharedArrays({{'a': np.zeros(3)}})['a'][0] = 1; {CAUGHT.format(0)}"
    assert run("raise SystemExit(7)", before)[0] == 7
