"""Children of fork come and die by the thousand, and others still find a place."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.lock_holder import held
from helpers.segment_file import SegmentFile
from helpers.support import soon

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.apart import Pipe

PLACES: Final = 4096
FORKS: Final = 40
MANY: Final = 50


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
            dead = layout.Participant(token=place << 8 | 1, pid=place)
            file.put("participant", dead, place)
        file.put("participants_top", layout.ShortWord(PLACES))


def _places_in_use() -> int:
    with SegmentFile(path()) as file:
        return int(file.record("participants_top").word)


def _attach_and_apply() -> list[bool]:
    with shmacc.attach("forked") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        assert acc.apply_grad(2.0)
        return [process.alive for process in inspection.describe("forked").processes]


def test_a_table_full_of_the_dead_lets_others_in(acc: ConditionalAccumulator) -> None:
    run_apart(_fill_with_the_dead)
    assert len(inspection.describe("forked").processes) == PLACES
    assert run_apart(_attach_and_apply) == [True, True]
    assert acc.stats().attached == 1
    assert run_apart(_places_in_use) <= 2


def test_a_table_full_of_the_dead_lets_children_in(acc: ConditionalAccumulator) -> None:
    """A child with its parent's handle, which attaches at its first use of it."""
    run_apart(_fill_with_the_dead)
    assert run_apart(acc.apply_grad, 2.0)
    assert acc.take_grad(2, timeout=0) == 3.0


def _apply_much(*, pipe: Pipe) -> None:
    rows, values = np.arange(20_000), np.ones((20_000, 16))
    acc = SparseConditionalAccumulator("f8", None, "forked")
    acc.apply_grad(rows, values)
    pipe.say()
    while True:
        acc.apply_grad(rows, values)


def _attach() -> None:
    shmacc.attach("forked").close()


def test_a_table_full_of_the_dead_under_a_lock_that_is_never_free_for_long() -> None:
    with SparseConditionalAccumulator("f8", None, "forked") as acc:
        with Apart(_apply_much) as one, Apart(_apply_much) as another:
            one.hear()
            another.hear()
            living = acc.stats().attached
            run_apart(_fill_behind, living)
            run_apart(_attach)
        acc.unlink()


def _fill_behind(living: int) -> None:
    with SegmentFile(path()) as file:
        for place in range(living, PLACES):
            file.put("participant", layout.Participant(token=place << 8 | 1, pid=place), place)
        file.put("participants_top", layout.ShortWord(PLACES))


@pytest.mark.usefixtures("acc")
def test_a_stopped_process_keeps_the_dead_in_their_places() -> None:
    """That is what the error says; and it is over with the process."""
    run_apart(_fill_with_the_dead)
    with held("forked") as holder:
        with pytest.raises(
            errors.ResourceExhaustedError, match=f"{PLACES} entries.*keeps the lock"
        ):
            run_apart(_attach)
        holder.kill()
    run_apart(_attach)


def fork_and_end(act: Callable[[], Any]) -> None:
    """A child does this, and ends without a farewell."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_children_that_do_not_use_it_take_no_place(acc: ConditionalAccumulator) -> None:
    for _ in range(FORKS):
        fork_and_end(lambda: None)
    assert run_apart(_places_in_use) == 1
    assert [process.pid for process in inspection.describe("forked").processes] == [os.getpid()]
    assert acc.stats().attached == 1


def test_a_child_is_attached_from_its_first_use_on(acc: ConditionalAccumulator) -> None:
    assert run_apart(_attached_before_and_after, acc) == (1, 2)


def _attached_before_and_after(acc: ConditionalAccumulator) -> tuple[int, int]:
    before = acc.stats().attached
    acc.apply_grad(1.0)
    return before, acc.stats().attached


def test_children_that_apply_and_end_leave_their_places_to_the_next(
    acc: ConditionalAccumulator,
) -> None:
    for _ in range(3 * FORKS):
        fork_and_end(lambda: acc.apply_grad(1.0))
    # Some of the dead, whom nobody has met and swept yet.
    assert run_apart(_places_in_use) <= 8
    assert acc.take_grad(1, timeout=0) == 3 * FORKS + 1


def _fork_costs() -> tuple[float, float]:
    """Seconds until the child is out of the fork, with one accumulator and with many."""
    reading, writing = os.pipe()

    def fork() -> float:
        start = time.monotonic()
        fork_and_end(lambda: os.write(writing, struct.pack("d", time.monotonic())))
        return float(struct.unpack("d", os.read(reading, 8))[0]) - start

    def cost() -> float:
        return min(fork() for _ in range(FORKS))

    def make(i: int) -> ConditionalAccumulator:
        acc = ConditionalAccumulator("f4", (), f"forked-{i}")
        acc.apply_grad(1.0)
        acc.unlink()
        return acc

    accs = [make(0)]
    few = cost()
    accs += [make(i) for i in range(1, MANY)]
    cost()  # nor must the children count that there have been
    cost()
    many = cost()
    for acc in accs:
        acc.close()
    return few, many


def test_a_fork_costs_the_same_with_many_accumulators(
    record_property: Callable[[str, object], None],
) -> None:
    """Nothing is done in a fork, for none of them."""

    def ratio() -> float:
        few, many = run_apart(_fork_costs)
        record_property("one accumulator", few)
        record_property("fifty", many)
        return float(many / few)

    soon(ratio, 3.0)


def _record_locks(acc: ConditionalAccumulator) -> list[str]:
    acc.apply_grad(1.0)
    inode = Path(path()).stat().st_ino
    return [
        line
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()
        if line.split()[1] == "POSIX" and line.split()[5].endswith(f":{inode}")
    ]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs /proc/locks")
def test_an_attached_process_is_one_entry_of_the_kernels_list(acc: ConditionalAccumulator) -> None:
    """Each operation's lock is looked up in this list; so it must not be longer than need be."""
    assert len(_record_locks(acc)) == 1
    with Apart(_stay, acc) as one, Apart(_stay, acc) as another:
        one.hear()
        another.hear()
        assert len(_record_locks(acc)) == 3


def _stay(acc: ConditionalAccumulator, *, pipe: Pipe) -> None:
    acc.apply_grad(1.0)
    pipe.say()
    pipe.hear()
