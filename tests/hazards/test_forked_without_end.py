"""Forked children take and free entries in the segment's list of processes.

Children are forked and die by the thousand, and new processes still find an entry. A child has its
parent's accumulator, but attaches at its first use. If the parent has ended before that, nobody is
attached, and a cleaner may remove the segment. The child's first use must then fail: others will
make a new segment under the name, and would never meet the child.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, run_apart
from helpers.lock_holder import held
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import Traced, needs_ptrace

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, testing
from shmacc._base import names

PLACES: Final = 4096
FORKS: Final = 30


@pytest.fixture
def acc(acc: ConditionalAccumulator) -> ConditionalAccumulator:
    """A named accumulator of sums, which has been used."""
    acc.apply_grad(1.0)
    return acc


def path() -> str:
    return names.segment_name("acc").path


def _fill_with_the_dead() -> None:
    with SegmentFile(path()) as file:
        for place in range(1, PLACES):
            file.put("participant", layout.Participant(token=place << 8 | 1, pid=place), place)
        file.put("participants_top", layout.ShortWord(PLACES))


def _places_in_use() -> int:
    with SegmentFile(path()) as file:
        return int(file.record("participants_top").word)


def _attach_and_apply() -> list[bool]:
    with shmacc.attach("acc") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        assert acc.apply_grad(2.0)
        return [process.alive for process in inspection.describe("acc").processes]


def test_a_process_can_attach_if_dead_processes_fill_the_list(acc: ConditionalAccumulator) -> None:
    run_apart(_fill_with_the_dead)
    assert len(inspection.describe("acc").processes) == PLACES
    assert run_apart(_attach_and_apply) == [True, True]
    assert acc.stats().attached == 1
    assert run_apart(_places_in_use) <= 2
    # The same holds for a child, which attaches at its first use of its parent's handle.
    run_apart(_fill_with_the_dead)
    assert run_apart(acc.apply_grad, 2.0)
    assert acc.take_grad(3, timeout=0) == 5.0


def _attach() -> None:
    shmacc.attach("acc").close()


@pytest.mark.usefixtures("acc")
def test_a_stopped_process_keeps_dead_entries_from_being_freed() -> None:
    """Attaching raises an error that says so; once the stopped process is dead, it succeeds."""
    run_apart(_fill_with_the_dead)
    with held("acc") as holder:
        with pytest.raises(
            errors.ResourceExhaustedError, match=f"{PLACES} entries.*keeps the lock"
        ):
            run_apart(_attach)
        holder.kill()
    run_apart(_attach)


def test_children_that_end_leave_their_entries_to_the_next(acc: ConditionalAccumulator) -> None:
    for _ in range(FORKS):
        run_apart(acc.apply_grad, 1.0)
    # The entries of some dead processes may not be freed yet.
    assert run_apart(_places_in_use) <= 8
    assert acc.take_grad(1, timeout=0) == FORKS + 1


def _record_locks(acc: ConditionalAccumulator) -> list[str]:
    acc.apply_grad(1.0)
    inode = Path(path()).stat().st_ino
    return [
        line
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()
        if line.split()[1] == "POSIX" and line.split()[5].endswith(f":{inode}")
    ]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs /proc/locks")
def test_an_attached_process_has_one_lock_in_the_kernels_list(acc: ConditionalAccumulator) -> None:
    """Each operation searches this list, so the list must be short."""
    assert len(_record_locks(acc)) == 1
    with Apart(_stay, acc).ready(), Apart(_stay, acc).ready():
        assert len(_record_locks(acc)) == 3


def _stay(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    acc.apply_grad(1.0)
    pipe.turn()


# --- cleaned before the first use -----------------------------------------------------------------


def _clean() -> list[str]:
    found = inspection.leftovers(namespace=names.current_namespace())
    return [name for leftover in found for name in inspection.clean(leftover)]


CALLS: Final[tuple[Callable[[Any], Any], ...]] = (
    lambda acc: acc.apply_grad(1.0), lambda acc: acc.take(1, timeout=0),
    lambda acc: acc.wait_step(-1, timeout=0), lambda acc: acc.global_step, lambda acc: acc.cancel(),
)  # fmt: skip


def _fork_and_end(use: bool, *, pipe: Pipe) -> None:
    """Make the accumulator, fork and end; the child waits for the number of a call to make."""
    acc = ConditionalAccumulator("f8", (), "acc", reduction_type="SUM")
    if os.fork():
        os._exit(0)
    if use:
        acc.apply_grad(1.0)
    pipe.say()
    which = pipe.hear()
    try:
        pipe.say(CALLS[which](acc))
    except errors.ShmaccError as error:
        pipe.say(error)
    os._exit(0)


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_a_child_does_not_use_a_segment_that_was_cleaned(call: int) -> None:
    with Apart(_fork_and_end, False).ready() as parent:  # noqa: FBT003
        parent.wait()
        assert len(_clean()) == 2  # a segment and its semaphore
        with ConditionalAccumulator("f8", (), "acc", reduction_type="SUM") as anew:
            error = parent.turn(call)
            assert isinstance(error, errors.NotFoundError)
            assert "clean" in str(error)
            assert anew.num_accumulated() == 0
            anew.unlink()


def test_a_segment_that_a_child_has_used_is_not_cleaned() -> None:
    with Apart(_fork_and_end, True).ready() as parent:  # noqa: FBT003
        parent.wait()
        assert _clean() == []
        assert parent.turn(0) is True
    with shmacc.attach("acc") as acc:
        assert acc.num_accumulated() == 2
        acc.unlink()


def _read_then_use(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    pipe.turn([acc.global_step, acc.num_accumulated(), acc.stats().attached])
    acc.apply_grad(1.0)
    pipe.turn(acc.stats().attached)


def test_a_child_that_only_reads_numbers_is_not_attached() -> None:
    """`docs/concepts/deaths.md` promises this."""
    with ConditionalAccumulator("f8", (), "acc", unlink_on_close=True) as acc:
        acc.apply_grad(1.0)
        with Apart(_read_then_use, acc) as child:
            assert child.hear() == [0, 1, 1]
            assert acc.stats().attached == 1
            assert run_apart(_places_in_use) == 1
            assert child.turn() == 2
            assert acc.stats().attached == 2
            child.finish()


def test_a_child_keeps_a_segment_that_was_unlinked() -> None:
    """A segment lives as long as a process, or a child of it, has it open."""
    with ConditionalAccumulator("f8", (), "acc", reduction_type="SUM") as acc:
        acc.unlink()
        assert run_apart(acc.apply_grad, 1.0)
        assert acc.take_grad(1, timeout=0) == 1.0
    assert testing.leaked_names(names.current_namespace()) == ()


# --- during a sweep -------------------------------------------------------------------------------


FEWEST: Final = 3  # stops in a sweep: it asks about an entry, and releases the lock


def _come_and_go(*, pipe: Pipe) -> None:
    while True:
        pipe.hear()
        acc = shmacc.attach("acc")
        pipe.turn()
        acc.close()
        pipe.say()


def _sweep_meanwhile(system_calls: int, *, again: bool) -> bool:
    """Let processes leave and come during a sweep; return False if the sweep ended first."""
    with (
        Apart(_come_and_go) as leaving,
        Apart(_come_and_go) as coming,
        Traced(lambda _: shmacc.attach("acc").close()) as sweeping,
    ):
        _turn(leaving)
        sweeping.run_until(lambda: inspection.describe("acc").lock.held)
        _go_on(sweeping, system_calls)
        if not inspection.describe("acc").lock.held:
            return False
        _turn(leaving)
        _go_on(sweeping, 1)
        comes = leaving if again else coming
        _turn(comes)
        sweeping.finish()
        assert [p.pid for p in inspection.describe("acc").processes if p.alive] == [comes.pid]
    return True


def _turn(process: Apart) -> None:
    process.turn()


def _go_on(traced: Traced, stops: int) -> None:
    done = itertools.count()
    traced.run_until(lambda: next(done) == stops)


@needs_ptrace
@pytest.mark.parametrize("again", [False, True], ids=["another", "the same again"])
def test_a_process_that_attaches_during_a_sweep_keeps_its_entry(*, again: bool) -> None:
    # This process does not attach: a forked child that inherits a handle would not leave at once.
    ConditionalAccumulator("f8", (), "acc").close()
    try:
        for stops in itertools.count():
            if not _sweep_meanwhile(stops, again=again):
                break
        assert stops >= FEWEST
    finally:
        with shmacc.attach("acc") as acc:
            acc.unlink()
