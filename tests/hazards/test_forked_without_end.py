"""Children of fork come and die by the thousand, and others still find a place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, run_apart
from helpers.lock_holder import held
from helpers.segment_file import SegmentFile

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

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


def _fill_with_the_dead(living: int = 1) -> None:
    with SegmentFile(path()) as file:
        for place in range(living, PLACES):
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
            run_apart(_fill_with_the_dead, living)
            run_apart(_attach)
        acc.unlink()


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


def test_children_that_do_not_use_it_take_no_place(acc: ConditionalAccumulator) -> None:
    for _ in range(5):
        run_apart(tuple)
    assert run_apart(_places_in_use) == 1
    assert [process.pid for process in inspection.describe("forked").processes] == [os.getpid()]
    assert acc.stats().attached == 1


def test_children_that_apply_and_end_leave_their_places_to_the_next(
    acc: ConditionalAccumulator,
) -> None:
    for _ in range(FORKS):
        run_apart(acc.apply_grad, 1.0)
    # Some of the dead, whom nobody has met and swept yet.
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
