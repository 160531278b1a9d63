"""A segment that leaves memory to others grows no further: an apply waits for a take, or fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe
from helpers.lock_holder import activity
from helpers.support import LONG, until

import shmacc
from shmacc import IndexedSlicesSpec, TensorSpec, errors
from shmacc._multihost.host_group import HostGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.threads

NAME: Final = "beside-others"
ROWS: Final = 20_000
EVERYTHING: Final = 1 << 62  # bytes: no segment may grow


def gradient(first: int, rows: int = ROWS) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows from `first` on, with ones."""
    return {"m": (np.arange(first, first + rows), np.ones((rows, 8), np.float32))}


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def group(request: pytest.FixtureRequest) -> Iterator[HostGroup]:
    """One that has memory for `ROWS` rows in each lane, none of them pending; it must not grow."""
    specs: dict[str, TensorSpec] = {"m": IndexedSlicesSpec((None, 8), "float32")}
    specs["dense"] = TensorSpec((300_000,), "float64")
    with HostGroup(specs, NAME, lanes=request.param) as made:
        for contributor in range(3 * request.param):  # each lane has its contributors
            assert made.apply(gradient(contributor), 0, contributor=contributor)
        made.take(1, timeout=0)
        made.handle.keep_free(EVERYTHING)
        yield made
        made.unlink()


def apply(first: int, step: int, *, pipe: Pipe) -> bool:
    """Say that it begins, then apply, as contributor 0."""
    with shmacc.AccumulatorGroup.attach(NAME) as own:
        pipe.say()
        return own.apply(gradient(first), step, contributor=0)


def wait_for_room(process: Apart) -> None:
    """Return when a process that applies has found that there is no room."""
    process.hear()
    until(lambda: activity(NAME, process.pid) == "waits for room")


def test_what_fits_into_the_memory_that_it_has_is_accepted(group: HostGroup) -> None:
    for step in range(1, 4):
        assert group.apply(gradient(50_000 * step), step, contributor=0)
        assert group.take(1, timeout=0)["m"].indices[0] == 50_000 * step


def test_a_gradient_that_alone_is_too_large_is_an_error_and_changes_nothing(
    group: HostGroup,
) -> None:
    with pytest.raises(errors.ResourceExhaustedError, match="kept for Ray's object store") as found:
        group.apply(gradient(0, 20 * ROWS), 1, contributor=0)
    assert found.value.kept == EVERYTHING
    assert None not in (found.value.needed, found.value.free, found.value.total)
    with pytest.raises(errors.ResourceExhaustedError, match="'dense'"):
        group.apply({"dense": np.ones(300_000)}, 1)
    assert group.num_accumulated() == 0
    group.handle.keep_free(0)
    assert group.apply(gradient(0, 20 * ROWS), 1, contributor=0)
    assert group.apply({"dense": np.ones(300_000)}, 1)
    taken = group.take(2, timeout=0)
    assert (taken["m"].indices.tolist(), taken["m"].values.sum()) == (
        list(range(20 * ROWS)),
        20 * ROWS * 8,
    )


def test_an_apply_for_which_there_is_no_room_waits_for_a_take(group: HostGroup) -> None:
    assert group.apply(gradient(0), 1, contributor=group.lanes * 3)  # of lane 0, as contributor 0
    for contributor in range(3 * group.lanes):
        group.apply(gradient(0), 1, contributor=contributor + 100)
    pending = group.num_accumulated()
    with Apart(apply, 1_000_000, shmacc.NEVER_STALE) as process:
        wait_for_room(process)
        assert group.num_accumulated() == pending
        taken = group.take(1, timeout=0)
        assert (taken.count, taken["m"].indices.tolist()) == (pending, list(range(ROWS)))
        assert process.result(LONG)
    taken = group.take(1, timeout=0)
    assert (taken.count, taken["m"].indices[0], len(taken["m"].indices)) == (1, 1_000_000, ROWS)


def test_whether_it_is_stale_is_judged_when_it_looks_again(group: HostGroup) -> None:
    for contributor in range(3 * group.lanes):
        group.apply(gradient(0), 1, contributor=contributor + 100)
    with Apart(apply, 1_000_000, 1) as process:
        wait_for_room(process)
        group.take(1, timeout=0)
        assert process.result(LONG) is False
    assert group.num_accumulated() == 0


def test_it_waits_no_longer_than_its_timeout(group: HostGroup) -> None:
    for contributor in range(3 * group.lanes):
        group.apply(gradient(0), 1, contributor=contributor + 100)
    pending = group.num_accumulated()
    with pytest.raises(errors.DeadlineExceededError, match="for room"):
        group.apply(gradient(1_000_000), 1, contributor=0, timeout=0.05)
    assert group.num_accumulated() == pending
    assert group.take(1, timeout=0)["m"].indices.tolist() == list(range(ROWS))
