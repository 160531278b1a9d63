"""Forked children take and free entries in the segment's list of processes.

Children are forked and die by the thousand, and new processes still find an entry. A child has its
parent's accumulator, but attaches at its first use. If the parent has ended before that, nobody is
attached, and a cleaner may remove the segment. The child must then stop: others will make a new
segment under the name, and would never meet the child.
"""

import itertools
import os
from collections.abc import Callable, Iterator
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
def acc() -> Iterator[ConditionalAccumulator]:
    """A named accumulator of sums, which has been used."""
    with ConditionalAccumulator("f8", (), "forked", reduction_type="SUM") as made:
        made.apply_grad(1.0)
        yield made
        made.unlink()


def path() -> str:
    return names.segment_name("forked").path


def _fill_with_the_dead() -> None:
    with SegmentFile(path()) as file:
        for place in range(1, PLACES):
            file.put("participant", layout.Participant(token=place << 8 | 1, pid=place), place)
        file.put("participants_top", layout.ShortWord(PLACES))


def _places_in_use() -> int:
    with SegmentFile(path()) as file:
        return int(file.record("participants_top").word)


def _attach_and_apply() -> list[bool]:
    with shmacc.attach("forked") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        assert acc.apply_grad(2.0)
        return [process.alive for process in inspection.describe("forked").processes]


def test_a_list_full_of_dead_processes_lets_others_in(acc: ConditionalAccumulator) -> None:
    run_apart(_fill_with_the_dead)
    assert len(inspection.describe("forked").processes) == PLACES
    assert run_apart(_attach_and_apply) == [True, True]
    assert acc.stats().attached == 1
    assert run_apart(_places_in_use) <= 2
    # And a child with its parent's handle, which attaches at its first use of it.
    run_apart(_fill_with_the_dead)
    assert run_apart(acc.apply_grad, 2.0)
    assert acc.take_grad(3, timeout=0) == 5.0


def _attach() -> None:
    shmacc.attach("forked").close()


@pytest.mark.usefixtures("acc")
def test_a_stopped_process_keeps_dead_entries_from_being_freed() -> None:
    """The error says so; afterwards they are freed."""
    run_apart(_fill_with_the_dead)
    with held("forked") as holder:
        with pytest.raises(
            errors.ResourceExhaustedError, match=f"{PLACES} entries.*keeps the lock"
        ):
            run_apart(_attach)
        holder.kill()
    run_apart(_attach)


def test_children_that_apply_and_end_leave_their_entries_to_the_next(
    acc: ConditionalAccumulator,
) -> None:
    for _ in range(FORKS):
        run_apart(acc.apply_grad, 1.0)
    # Some dead processes, whose entries nobody has freed yet.
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
def test_an_attached_process_has_one_entry_in_the_kernels_list_of_locks(
    acc: ConditionalAccumulator,
) -> None:
    """Each operation searches this list, so it must be short."""
    assert len(_record_locks(acc)) == 1
    with Apart(_stay, acc) as one, Apart(_stay, acc) as another:
        one.hear()
        another.hear()
        assert len(_record_locks(acc)) == 3


def _stay(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    acc.apply_grad(1.0)
    pipe.say()
    pipe.hear()


# --- cleaned before the first use -----------------------------------------------------------------


def _clean() -> list[str]:
    found = inspection.leftovers(namespace=names.current_namespace())
    return [name for leftover in found for name in inspection.clean(leftover)]


CALLS: Final[tuple[Callable[[Any], Any], ...]] = (
    lambda acc: acc.apply_grad(1.0),
    lambda acc: acc.take(1, timeout=0),
    lambda acc: acc.wait_step(-1, timeout=0),
    lambda acc: acc.global_step,
    lambda acc: acc.cancel(),
)


def _fork_and_end(use: bool, *, pipe: Pipe) -> None:
    """Open it here for a child alone, which may use it, then waits to be told what to call."""
    acc = ConditionalAccumulator("f8", (), "forked", reduction_type="SUM")
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
    with Apart(_fork_and_end, False) as parent:  # noqa: FBT003
        parent.hear()
        parent.wait()
        assert len(_clean()) == 2  # a segment and its semaphore
        with ConditionalAccumulator("f8", (), "forked", reduction_type="SUM") as anew:
            parent.say(call)
            error = parent.hear()
            assert isinstance(error, errors.NotFoundError)
            assert "clean" in str(error)
            assert anew.num_accumulated() == 0
            anew.unlink()


def test_a_segment_that_a_child_has_used_is_not_cleaned() -> None:
    with Apart(_fork_and_end, True) as parent:  # noqa: FBT003
        parent.hear()
        parent.wait()
        assert _clean() == []
        parent.say(0)
        assert parent.hear() is True
    with shmacc.attach("forked") as acc:
        assert acc.num_accumulated() == 2
        acc.unlink()


def _read_then_use(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    pipe.say([acc.global_step, acc.num_accumulated(), acc.stats().attached])
    pipe.hear()
    acc.apply_grad(1.0)
    pipe.say(acc.stats().attached)
    pipe.hear()


def test_reading_numbers_does_not_count_as_use() -> None:
    """`docs/concepts/processes.md` says so."""
    with ConditionalAccumulator("f8", (), "forked") as acc:
        acc.apply_grad(1.0)
        with Apart(_read_then_use, acc) as child:
            assert child.hear() == [0, 1, 1]
            assert acc.stats().attached == 1
            assert run_apart(_places_in_use) == 1
            child.say()
            assert child.hear() == 2
            assert acc.stats().attached == 2
            child.say()
            child.result()
        acc.unlink()


def test_a_child_keeps_a_segment_that_was_unlinked() -> None:
    """Processes that have it open keep it, and so do their children."""
    with ConditionalAccumulator("f8", (), "forked", reduction_type="SUM") as acc:
        acc.unlink()
        assert run_apart(acc.apply_grad, 1.0)
        assert acc.take_grad(1, timeout=0) == 1.0
    assert testing.leaked_names(names.current_namespace()) == ()


# --- during a sweep -------------------------------------------------------------------------------


FEWEST: Final = 3  # stops in a sweep: it asks the kernel about an entry, and gives the lock back


def _come_and_go(*, pipe: Pipe) -> None:
    while True:
        pipe.hear()
        acc = shmacc.attach("forked")
        pipe.say()
        pipe.hear()
        acc.close()
        pipe.say()


def _living() -> set[int]:
    return {process.pid for process in inspection.describe("forked").processes if process.alive}


def _sweep_meanwhile(system_calls: int, *, again: bool) -> bool:
    """Sweep during the action; return whether the sweep took that long."""
    with (
        Apart(_come_and_go) as leaving,
        Apart(_come_and_go) as coming,
        Traced(lambda _: shmacc.attach("forked").close()) as sweeping,
    ):
        _turn(leaving)
        sweeping.run_until(lambda: inspection.describe("forked").lock.held)
        _go_on(sweeping, system_calls)
        if not inspection.describe("forked").lock.held:
            return False
        _turn(leaving)
        _go_on(sweeping, 1)
        comes = leaving if again else coming
        _turn(comes)
        sweeping.finish()
        assert _living() == {comes.pid}
    return True


def _turn(process: Apart) -> None:
    process.say()
    process.hear()


def _go_on(traced: Traced, stops: int) -> None:
    done = itertools.count()
    traced.run_until(lambda: next(done) == stops)


@needs_ptrace
@pytest.mark.parametrize("again", [False, True], ids=["another", "the same again"])
def test_an_entry_may_get_a_new_process_during_a_sweep(*, again: bool) -> None:
    # Not attached here: a forked child would not leave before it has closed its parent's handle.
    ConditionalAccumulator("f8", (), "forked").close()
    try:
        for stops in itertools.count():
            if not _sweep_meanwhile(stops, again=again):
                break
        assert stops >= FEWEST
    finally:
        with shmacc.attach("forked") as acc:
            acc.unlink()
