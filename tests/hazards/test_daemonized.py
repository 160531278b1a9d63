"""A process closes all its descriptors, as daemons do, and their numbers get to lead elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.interpreter import run
from helpers.segment_file import SegmentFile
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What the scripts have in common: each has `first` open, and loses its descriptor.
BEGIN: Final = """
    import gc, warnings
    first = shmacc.attach("first")
    first.apply_grad(1.0)
    def descriptors():
        found = set()
        for number in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{number}").startswith("/dev/shm/"):
                    found.add(int(number))
            except FileNotFoundError:
                pass
        return found
    def refused(call):
        try:
            result = call()
        except shmacc.errors.FailedPreconditionError:
            return
        raise AssertionError(f"a call returned {result!r}")
    def try_everything(acc):
        for call in (
            lambda: acc.apply_grad(100.0, local_step=shmacc.NEVER_STALE),
            lambda: acc.take(1, timeout=0),
            lambda: acc.take_partial(0, timeout=0, seal=True),
            lambda: acc.apply_partial(partial, local_step=shmacc.NEVER_STALE),
            lambda: acc.set_global_step(100),
            lambda: acc.advance_step(100),
            lambda: acc.wait_step(-1, timeout=0),
            acc.unseal,
            acc.cancel,
            acc.num_accumulated,
            acc.stats,
            acc.unlink,
            lambda: acc.global_step,
        ):
            refused(call)
    with shmacc.ConditionalAccumulator("f8", (), reduction_type="SUM") as other:
        other.apply_grad(5.0)
        partial = other.take_partial(1)
    (number,) = descriptors()
    # Others, as libffi's, had their numbers before `first` got its own.
    lower = [other for other in range(3, number) if os.path.exists(f"/proc/self/fd/{other}")]
    def close_all():
        os.closerange(3, 65536)
        for other in lower:
            os.dup2(0, other)
    def in_a_child(call):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if call() else 1)
        return os.waitpid(pid, 0)[1] == 0
    def lives_in(name):
        # Another process is asked.
        def sees():
            return [process.alive for process in shmacc.inspection.describe(name).processes
                    if process.pid == os.getppid()][-1:] == [True]
        return in_a_child(sees)
"""


@pytest.fixture
def first() -> Iterator[ConditionalAccumulator]:
    """As the test has it."""
    with ConditionalAccumulator("f8", (), "first", reduction_type="SUM") as made:
        yield made
        made.unlink()


@pytest.fixture
def second() -> Iterator[ConditionalAccumulator]:
    """Another one, with something in it."""
    with ConditionalAccumulator("f8", (), "second", reduction_type="SUM") as made:
        made.apply_grad(2.0)
        yield made
        made.unlink()


def untouched(acc: ConditionalAccumulator, value: float) -> bool:
    """Whether it has these gradients and nothing else."""
    stats = acc.stats()
    assert (stats.global_step, stats.sealed, stats.takes, stats.recoveries) == (0, False, 0, 0)
    assert not acc._handle.unlinked
    assert all(finding.severity == "note" for finding in inspection.check(acc.shared_name))
    return bool(acc.take_grad(1, timeout=0) == value)


ANOTHER_ACCUMULATOR: Final = """
    close_all()
    second = shmacc.attach("second")
    assert descriptors() == {number}
    assert second.apply_grad(3.0)
    try_everything(first)
    first.close()
    del first
    gc.collect()
    assert lives_in("second")
    assert second.apply_grad(4.0)
"""


def test_another_accumulator_under_its_number(
    first: ConditionalAccumulator, second: ConditionalAccumulator
) -> None:
    assert run(BEGIN + ANOTHER_ACCUMULATOR) == (0, "", "")
    assert untouched(first, 1.0)
    assert untouched(second, 9.0)


OPENED_ANEW: Final = """
    close_all()
    again = shmacc.attach("first")
    assert again.apply_grad(3.0)
    assert descriptors() == {number}
    try_everything(first)
    with warnings.catch_warnings(action="ignore"):
        del first
        gc.collect()
    assert lives_in("first")
    assert again.apply_grad(4.0)
    taken = []
    taking = threading.Thread(target=lambda: taken.append(again.take_grad(4)))
    taking.start()
    until(lambda: again.stats().waiting == 1)
    # Whoever attaches frees the place that this process has lost, and not its take.
    def apply():
        with shmacc.attach("first") as child:
            return child.apply_grad(5.0)
    assert in_a_child(apply)
    taking.join()
    assert taken == [13.0]
"""


def test_the_same_opened_anew(first: ConditionalAccumulator) -> None:
    """Under the very number that the closed descriptor had."""
    assert run(BEGIN + OPENED_ANEW) == (0, "", "")
    assert first.global_step == 1
    assert first.stats().attached == 1


def _take() -> float:
    with shmacc.attach("first") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        return float(acc.take_grad(1))


def _leave_a_lost_place() -> None:
    """As after a closed descriptor, if nobody could free the place when it was opened anew."""
    with SegmentFile(names.segment_name("first").path) as file:
        file.put("participant", file.record("participant", 1), 2)
        file.put("participants_top", layout.ShortWord(3))


def test_a_lost_place_is_not_the_new_one(first: ConditionalAccumulator) -> None:
    """Both bear the token of the same process; the take that waits belongs to one of them."""
    with Apart(_take) as taking:
        until(lambda: first.stats().waiting == 1)
        run_apart(_leave_a_lost_place)
        run_apart(lambda: shmacc.attach("first").close())
        assert first.stats().waiting == 1
        assert first.apply_grad(7.0)
        assert taking.result() == 7.0


PLAIN_FILE: Final = """
    private = shmacc.ConditionalAccumulator("f8", ())
    private.apply_grad(1.0)
    numbers = descriptors()
    os.closerange(3, 65536)
    files = [os.open(sys.argv[1], os.O_RDWR) for _ in range(64)]
    assert numbers < set(files)
    assert len(numbers) == 2
    try_everything(first)
    first.close()
    private.close()
    del first, private
    gc.collect()
    for file in files:
        assert os.pread(file, 6, 0) == b"intact"
    with open("/proc/locks") as locks:
        assert f":{os.stat(sys.argv[1]).st_ino} " not in locks.read()
"""


@pytest.mark.usefixtures("first")
def test_a_plain_file_under_its_number(tmp_path: Path) -> None:
    """It is neither written to, nor locked, nor closed; and a private one's name still goes."""
    file = tmp_path / "plain"
    file.write_bytes(b"intact" * 1000)
    assert run(BEGIN + PLAIN_FILE, str(file)) == (0, "", "")
    assert file.read_bytes() == b"intact" * 1000
    assert all(":first" in name for name in testing.leaked_names(os.environ["SHMACC_NAMESPACE"]))


WAITING: Final = """
    ends = []
    def wait():
        try:
            first.take(5)
        except shmacc.errors.FailedPreconditionError:
            ends.append("refused")
    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: first.stats().waiting == 1)
    os.closerange(3, 65536)
    second = shmacc.attach("second")
    thread.join()
    assert ends == ["refused"]
    assert lives_in("second")
"""


def test_a_thread_waits_in_line_meanwhile(
    first: ConditionalAccumulator, second: ConditionalAccumulator
) -> None:
    assert run(BEGIN + WAITING) == (0, "", "")
    assert untouched(second, 2.0)
    assert first.take_grad(1, timeout=0) == 1.0
