"""A process closes all its descriptors, as daemons do: later calls raise an error that says so.

The next file that is opened gets the number of a closed descriptor: another accumulator's file, or
the same one again. Old handles must not lock, grow, map or close that file.

A process whose standard streams are closed must not open a segment as descriptor 1 or 2. Whatever
a C library prints goes there, and would overwrite the segment's first bytes.
"""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, run_apart
from helpers.opening import USES
from helpers.segment_file import SegmentFile
from helpers.support import LONG, until

import shmacc
from shmacc import errors, inspection, optim
from shmacc._base import names

pytestmark = pytest.mark.threads

MOST: Final = 256  # above all descriptors of these tests


@pytest.fixture(autouse=True)
def both() -> Iterator[None]:
    """Make two accumulators, to which this process does not stay attached."""
    for name in ("a", "b"):
        shmacc.ConditionalAccumulator("f8", (3,), name, reduction_type="SUM").close()
    yield
    for name in ("a", "b"):
        with shmacc.attach(name) as acc:
            acc.unlink()


def _add(acc: Any) -> None:
    assert acc.apply_grad(np.ones(3), local_step=shmacc.NEVER_STALE)


def _descriptor(name: str) -> int:
    for fd in range(3, MOST):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(f":{name}"):  # noqa: PTH115
                return fd
        except OSError:
            continue
    raise AssertionError(f"no descriptor of {name}")


def _close_all_but(pipe: Pipe) -> None:
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, MOST)


def _refuses(acc: Any) -> None:
    with shmacc.ConditionalAccumulator("f8", (3,), reduction_type="SUM") as private:
        private.apply_grad(np.ones(3))
        partial = private.take_partial(1)
    applies = _add, lambda acc: acc.apply_partial(partial, shmacc.NEVER_STALE)
    for use in (*USES, *applies, type(acc).stats, type(acc).unlink):
        with pytest.raises(errors.FailedPreconditionError, match="open the accumulator again"):
            use(acc)


def _becomes_another(*, pipe: Pipe) -> None:
    _close_all_but(pipe)  # so that files opened after the next close get the same numbers
    stale = shmacc.attach("a")
    _add(stale)
    number = _descriptor("a")
    _close_all_but(pipe)
    _refuses(stale)
    other = shmacc.attach("b")
    assert _descriptor("b") == number
    _add(other)
    pipe.turn("before")
    _refuses(stale)
    stale.close()
    del stale
    gc.collect()
    assert _descriptor("b") == number
    pipe.turn("closed")
    _add(other)
    other.close()


def test_a_closed_number_reused_by_another_accumulator_is_left_alone() -> None:
    """The other accumulator is neither changed nor locked; the process stays attached to it."""
    with Apart(_becomes_another) as process, shmacc.attach("b") as other:
        process.hear()
        before = inspection.describe("b")
        process.turn()
        now = inspection.describe("b")
        assert now.generation == before.generation
        assert now.summary.bytes_reserved == before.summary.bytes_reserved
        assert other.stats().attached == 2
        # The first accumulator is unchanged, and its lock is free.
        with shmacc.attach("a") as first:
            assert first.stats().attached == 1
            assert first.num_accumulated() == 1
        process.finish()
        assert other.num_accumulated() == 2


def _becomes_itself(*, pipe: Pipe) -> None:
    pipe.hear()
    _close_all_but(pipe)  # so that files opened after the next close get the same numbers
    stale = shmacc.attach("a")
    _add(stale)
    number = _descriptor("a")
    pipe.turn("attached")
    _close_all_but(pipe)
    again = shmacc.attach("a")
    assert _descriptor("a") == number
    _add(again)
    _refuses(stale)
    stale.close()
    del stale
    gc.collect()
    pipe.turn("closed")
    assert again.take(4, timeout=LONG).count == 4
    again.close()


def test_an_old_handle_does_not_disturb_a_new_one_with_the_same_number() -> None:
    """The new handle stays attached and waits in the queue; the old handle's entry is dead."""
    with Apart(_becomes_itself) as process:
        with shmacc.attach("a") as first:
            _add(first)
            process.turn()
        # This process's entry is free now, and comes before the entry that will be dead.
        process.turn()
        process.say()
        until(lambda: inspection.describe("a").summary.waiting_for == (4,))
        # A process that attaches frees the entries of the dead.
        assert run_apart(_attached) == 2
        assert inspection.describe("a").summary.waiting_for == (4,)
        with shmacc.attach("a") as acc:
            _add(acc)
        process.result()


def _attached() -> int:
    with shmacc.attach("a") as acc:
        return acc.stats().attached


def _leave_a_lost_place() -> None:
    """Give the process a second entry, as closed descriptors may leave: nobody frees it."""
    with SegmentFile(names.segment_name("a").path) as file:
        file.put("participant", file.record("participant", 0), 1)
        file.put("participants_top", layout.ShortWord(2))


def _take() -> int:
    with shmacc.attach("a") as acc:
        return int(acc.take(1, timeout=LONG).count)


def test_a_waiting_take_stays_although_its_process_has_a_lost_entry() -> None:
    """Two entries have the token of one process; the waiting take belongs to one of them."""
    with Apart(_take) as taking:
        until(lambda: inspection.describe("a").summary.waiting_for == (1,))
        run_apart(_leave_a_lost_place)
        assert run_apart(_attached) == 2
        assert inspection.describe("a").summary.waiting_for == (1,)
        with shmacc.attach("a") as acc:
            _add(acc)
        assert taking.result() == 1


def _waits_without(*, pipe: Pipe) -> None:
    acc = shmacc.attach("a")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acc.take, 1, timeout=LONG)
        until(lambda: acc.stats().waiting == 1)
        _close_all_but(pipe)
        other = shmacc.attach("b")
        with pytest.raises(errors.FailedPreconditionError):
            waiting.result()
    _add(other)
    acc.close()
    assert other.stats().attached == 1
    other.close()


def test_a_waiting_take_raises_if_its_descriptor_is_closed() -> None:
    """The take's entry in the queue then looks like a dead process's."""
    run_apart(_waits_without)
    with shmacc.attach("a") as acc:
        assert acc.stats().waiting == 0
        _add(acc)
        assert acc.take(1, timeout=0).count == 1


def _becomes_plain_files(path: Path, *, pipe: Pipe) -> None:
    stale, private = shmacc.attach("a"), shmacc.ConditionalAccumulator("f4", ())
    private.apply_grad(1.0)
    numbers = {_descriptor("a"), _descriptor(private.shared_name)}
    _close_all_but(pipe)
    files = [os.open(path, os.O_RDWR) for _ in range(64)]
    assert numbers < set(files)
    _refuses(stale)
    stale.close()
    private.close()
    with pytest.raises(errors.NotFoundError):
        shmacc.attach(private.shared_name)
    del stale, private
    gc.collect()
    for file in files:
        assert os.pread(file, 6, 0) == b"intact"
    with open("/proc/locks", encoding="ascii") as locks:  # noqa: PTH123
        assert f":{path.stat().st_ino} " not in locks.read()


def test_closed_numbers_reused_by_plain_files_are_left_alone(tmp_path: Path) -> None:
    """The files are neither written, locked nor closed; the private segment's name is removed."""
    file = tmp_path / "plain"
    file.write_bytes(b"intact" * 1000)
    run_apart(_becomes_plain_files, file)
    assert file.read_bytes() == b"intact" * 1000


# --- closed standard streams ----------------------------------------------------------------------


SPECS = {"a": shmacc.TensorSpec((3,), "f8")}


def _check() -> None:
    for number in range(3):
        with suppress(FileNotFoundError):
            leads_to = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
            assert not leads_to.startswith("/dev/shm"), f"{number} leads to {leads_to}"  # noqa: S108


def _attach_and_use(_: Path) -> None:
    with shmacc.AccumulatorGroup.attach("g") as group, shmacc.Parameters.attach("p") as params:
        _check()
        group.apply({"a": np.ones(3)}, 0)
        with group.round(1) as taken:
            _check()
            params.update(taken)
    with shmacc.SharedArrays.attach("s", writable=True) as arrays:
        arrays["a"] += 1
        _check()


def _made(_: Path) -> None:
    with shmacc.AccumulatorGroup(SPECS) as group:
        _check()
        group.apply({"a": np.ones(3)}, 0)
        _check()
        taken: Any = group.take(1)["a"]
        assert taken.value.tolist() == [1] * 3
    for make in (shmacc.Parameters, shmacc.SharedArrays):
        with make({"a": np.ones(3)}) as made:
            _check()
            assert made["a"].tolist() == [1] * 3
    shmacc.raw_ops.ConditionalAccumulator("f4", (), shared_name="raw")
    _check()
    with shmacc.attach("raw") as raw:
        raw.unlink()


def _inspected(_: Path) -> None:
    for name in ("g", "p", "s"):
        inspection.describe(name)
        _check()
        inspection.check(name)
        _check()


def _inherited(_: Path) -> None:
    group = shmacc.AccumulatorGroup.attach("g")

    def use() -> None:
        group.apply({"a": np.ones(3)}, 0)
        _check()
        with shmacc.Parameters.attach("p"):
            _check()

    run_apart(use)
    group.close()


def _opened_again(_: Path, *, pipe: Pipe) -> None:
    group = shmacc.AccumulatorGroup.attach("g")
    os.closerange(0, pipe.fileno())
    os.closerange(pipe.fileno() + 1, 65536)
    with shmacc.AccumulatorGroup.attach("g") as again, shmacc.Parameters.attach("p"):
        _check()
        again.apply({"a": np.ones(3)}, 0)
    _check()
    del group


def _saved(path: Path) -> None:
    write = np.savez

    def write_and_check(file: Any, **arrays: Any) -> None:
        assert file.fileno() > 2
        write(file, **arrays)
        _check()

    np.savez = write_and_check  # type: ignore[assignment]
    with shmacc.AccumulatorGroup.attach("g") as group, shmacc.Parameters.attach("p") as params:
        shmacc.save(path, {"g": group, "p": params})
        _check()
        shmacc.load(path, {"g": group, "p": params})
        _check()


@pytest.fixture
def segments() -> Iterator[None]:
    """Make a segment of each kind; none is open in this process."""
    shmacc.AccumulatorGroup(SPECS, "g").close()
    shmacc.Parameters({"a": np.zeros(3)}, "p", optimizer=optim.SGD(1.0)).close()
    shmacc.SharedArrays({"a": np.zeros(3)}, "s").close()
    yield
    for name in ("g", "p", "s"):
        inspection.remove(name)


def _without(closed: tuple[int, ...], way: Callable[..., None], path: Path, *, pipe: Pipe) -> None:
    for number in closed:
        os.close(number)
    way(path, pipe=pipe) if way is _opened_again else way(path)


@pytest.mark.beyond_tsan
@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize(("way", "closed"), [
    *((way, (0, 1, 2)) for way in (_made, _inspected, _inherited, _opened_again, _saved)),
    *((_attach_and_use, closed) for closed in ((0,), (1,), (2,), (0, 1, 2))),
])  # fmt: skip
def test_a_segment_never_gets_the_number_of_a_closed_standard_stream(
    way: Callable[..., None], closed: tuple[int, ...], tmp_path: Path
) -> None:
    run_apart(_without, closed, way, tmp_path / "saved.npz")
    for name in ("g", "p", "s"):
        inspection.describe(name)  # raises if the segment is damaged
