"""If any one system call fails, the operation raises a clear error or succeeds, and leaks nothing.

The kernel may lack memory, descriptors, space or locks, or a signal may interrupt the call. The
next operation must work.
"""

import errno
import os
from contextlib import suppress
from typing import Any, Final

import pytest
from helpers.killing_deeds import DEEDS, SCENE, Deed, clean_up, left
from helpers.killing_scenes import NAME
from helpers.stepping_calls import NAMES, Calling, needs_failures, plausible
from helpers.stepping_tracer import Mark, on_one_core
from helpers.support import EVERY_INSTANT, SANITIZED

import shmacc
from shmacc import errors, inspection
from shmacc._base import names

pytestmark = [
    needs_failures,
    pytest.mark.skipif(SANITIZED, reason="a sanitizer ends the process if its own calls fail"),
]

_LACKS: Final = {errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.EFBIG}


def is_right(said: str, code: int, deed: Deed) -> bool:
    """Return whether the operation may raise this error if a system call fails with `code`."""
    if said == "":
        return True
    if code not in _LACKS:
        return False  # an interruption must not reach the caller
    if deed.name == "cleaning" and said == f"OSError {code}":
        return True  # Python itself reports a failed listing of the directory
    return said in {"ResourceExhaustedError", "MemoryError"}


def descriptors() -> set[str]:
    """Return the open descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


def mapped() -> int:
    """Return how many mappings of segments and semaphores the process has."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        return sum(names.SHM_DIRECTORY in line for line in maps)


def is_anothers(name: str, there_before: tuple[str, ...]) -> bool:
    """Return whether `name` is an older segment's semaphore: it was missing and made again."""
    semaphore = names.parse_semaphore_file(name)
    return semaphore is not None and semaphore[0].system_name in there_before


def attempt(deed: Deed, begun: Any) -> str:
    """Do the operation; return the name of its error."""
    try:
        made = deed.act(begun)
        if hasattr(made, "close"):
            made.close()
    except BaseException as error:  # noqa: BLE001  which one it is, is the question
        name = type(error).__name__
        return f"{name} {error.errno}" if type(error) is OSError else name
    return ""


def do_it_twice(deed: Deed, kept: Any, others: int, said: int, mark: Mark) -> None:
    """Do the operation while a system call fails, then again; write the first error to `said`."""
    before, there_before = descriptors(), left()
    begun = deed.begin(kept)
    there = left()
    mark()
    error = attempt(deed, begun)
    mark()
    os.write(said, error.encode() or b"none")
    new = {name for name in left() if name not in there and error}
    assert all(is_anothers(name, there_before) for name in new), f"{error}, and left {new}"
    again = attempt(deed, begun)
    # If the first attempt took the only round, the second one times out.
    assert again == "" or (again == "DeadlineExceededError" and not error), f"{error}, then {again}"
    for one in (begun, kept):
        if one is not None:
            one.close()
    assert descriptors() <= before, f"{error}: {descriptors() - before} are open"
    assert mapped() <= others, f"{error}: something is mapped"


def finish(kept: Any) -> Any:
    """Check what the next process finds, and clean up; return what it found."""
    if kept is not None:
        kept.close()
    found = None
    with suppress(errors.NotFoundError):
        found = SCENE.testify()
    clean_up()
    return found


def fail(deed: Deed, place: int, turn: int) -> tuple[int, int]:
    """Let one call fail; return its number, and how many errors it may fail with.

    Args:
        deed: The operation.
        place: The number of the system call; if this call cannot fail, the next one that can.
        turn: Chooses among the errors that the call may fail with.

    Returns:
        The call's number, and the number of errors that it may fail with (0: no call was left).
    """
    others = mapped()  # the forked child begins with this process's mappings
    kept = deed.before()
    reader, writer = os.pipe()
    name, code, number = "", 0, 0
    errors_of_it: tuple[int, ...] = ()
    with Calling(lambda mark: do_it_twice(deed, kept, others, writer, mark)) as child:
        child.run_to_mark()
        calls = (call for call in child.calls_to_mark() if call.before)
        for number, call in enumerate(calls):
            errors_of_it = plausible(call) if number >= place else ()
            if errors_of_it:
                name, code = NAMES[call.number], errors_of_it[turn % len(errors_of_it)]
                child.fail(code)
                break
        child.finish()
    os.close(writer)
    said = os.read(reader, 100).decode().replace("none", "")
    os.close(reader)
    if code:
        assert is_right(said, code, deed), f"{name}: {errno.errorcode[code]} became {said}"
    found = finish(kept)
    if found and deed.act is SCENE.operation:  # the first gradient, and one or two from attempts
        assert found.counters[0] == (2 if said else 3)
    return number, len(errors_of_it) if code else 0


# Left out: other operations make every system call that these operations make.
CONTAINED: Final = {"creating a private one", "finding what the dead left", "closing"}


@pytest.mark.parametrize("deed", [deed for deed in DEEDS if deed.name not in CONTAINED], ids=str)
def test_an_operation_with_one_failing_system_call_can_be_repeated(deed: Deed) -> None:
    """Each call fails with one of its possible errors; with SHMACC_EVERY_INSTANT=1, with each."""
    place = failures = 0
    with on_one_core():
        while True:
            number, kinds = fail(deed, place, failures)
            if not kinds:
                break
            for more in range(1, kinds) if EVERY_INSTANT else ():
                fail(deed, number, failures + more)
            failures += 1
            place = number + 1
    assert failures


# --- locks ---------------------------------------------------------------------------------------


def without_locks(deed: Deed, kept: Any, said: int, mark: Mark) -> None:
    """Do the operation while the kernel lacks memory for locks; write the error; do it again."""
    begun = deed.begin(kept)
    mark()
    try:
        deed.act(begun)
        message = "no error"
    except errors.ResourceExhaustedError as error:
        message = str(error)
    mark()
    os.write(said, message.encode())
    deed.act(begun)


ASKING: Final = [
    deed
    for deed in DEEDS
    if deed.name in {"attaching", "a child's first operation", "cleaning"}
    or deed.name.endswith("behind the dead")
]


@pytest.mark.parametrize("deed", ASKING, ids=str)
def test_a_lock_query_that_the_kernel_refuses_proves_no_process_alive(deed: Deed) -> None:
    """The kernel has no memory for locks. Its refusal means neither "held" nor "alive"."""
    kept = deed.before()
    reader, writer = os.pipe()
    refused = 0
    with Calling(lambda mark: without_locks(deed, kept, writer, mark)) as child:
        child.run_to_mark()
        for call in child.calls_to_mark():
            if call.before and (code := child.no_lock(call)):
                child.fail(code)
                refused += 1
                assert refused < 10, "it asks again and again"
        child.finish()
    os.close(writer)
    message = os.read(reader, 500).decode()
    os.close(reader)
    assert refused
    assert "no memory for a lock" in message
    finish(kept)


@pytest.mark.parametrize("name", ["a child's first operation", "unlinking"])
def test_a_lock_release_that_fails_is_repeated_until_it_succeeds(name: str) -> None:
    """A lock that is not released would keep others out for as long as the process lives."""
    (deed,) = (deed for deed in DEEDS if deed.name == name)
    kept = deed.before()
    begun: list[Any] = []

    def act(mark: Mark) -> None:
        begun.append(deed.begin(kept))
        mark()
        deed.act(begun[0])
        mark()
        mark()

    refused = in_a_row = 0
    with Calling(act) as child:
        child.run_to_mark()
        for call in child.calls_to_mark():
            if not call.before or NAMES.get(call.number) != "fcntl":
                continue
            # Each call that releases a lock is refused three times.
            in_a_row = in_a_row + 1 if child.lets_go(call) and in_a_row < 3 else 0
            if in_a_row:
                refused += 1
                child.fail(errno.ENOLCK)
        assert refused >= 3
        assert refused % 3 == 0, "it gave up"
        # The process still runs, and holds only the lock of its entry.
        with suppress(errors.NotFoundError):
            assert not inspection.describe(NAME).lock.held
            assert inspection.describe(NAME).lock.name_pid is None
            acc: Any = shmacc.attach(NAME)
            with acc:
                assert acc.apply_grad([1], [[1, 2, 3]])
        child.finish()
    finish(kept)
