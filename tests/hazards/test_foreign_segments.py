"""Segments of other users: refused with a reason, or shared where the mode says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart, needs_root, run_apart
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._layout import names
from shmacc.inspection import SegmentState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.apart import Pipe

pytestmark = needs_root

OWNER: Final = 61001
STRANGER: Final = 61002


def _segment() -> Path:
    return Path(names.segment_name("theirs").path)


def _semaphores() -> list[Path]:
    return list(Path(names.SHM_DIRECTORY).glob(f"sem.{_segment().name}.*"))


def _make(mode: int, *, pipe: Pipe) -> None:
    acc = ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM", mode=mode)
    acc.apply_grad(1.0)
    pipe.say("made")
    while (request := pipe.hear()) is not None:
        pipe.say(getattr(acc, request[0])(*request[1:]))


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[Apart]:
    """Another user's process, with the segment, in the mode that the test asks for."""
    with Apart(_make, request.param, uid=OWNER) as process:
        process.hear()
        yield process
    inspection.remove("theirs", force=True)


closed_to_others = pytest.mark.parametrize("owner", [0o600], indirect=True)
open_to_all = pytest.mark.parametrize("owner", [0o666], indirect=True)


def _refused() -> None:
    openers: tuple[Callable[[], Any], ...] = (
        lambda: shmacc.attach("theirs"),
        lambda: shmacc.attach("theirs", owners="any"),
        lambda: ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM"),
        lambda: inspection.describe("theirs"),
        lambda: inspection.cancel("theirs"),
        lambda: inspection.remove("theirs"),
        lambda: inspection.remove("theirs", force=True),
    )
    for opener in openers:
        with pytest.raises(errors.PermissionDeniedError, match=f"uid {OWNER}, mode 0600") as caught:
            opener()
        assert isinstance(caught.value, PermissionError)
    (summary,) = inspection.list_segments(namespace=names.current_namespace())
    assert (summary.owner_uid, summary.state) == (OWNER, SegmentState.UNREADABLE)
    assert inspection.check("theirs")
    for leftover in inspection.leftovers(namespace=names.current_namespace()):
        assert not leftover.removable
        with pytest.raises(errors.PermissionDeniedError):
            inspection.clean(leftover)
    # Without a namespace two users' names are the same names.
    os.environ[names.NAMESPACE_VARIABLE] = f"{os.environ[names.NAMESPACE_VARIABLE]}-mine"
    with ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM") as mine:
        assert mine.num_accumulated() == 0
        mine.unlink()


@closed_to_others
def test_a_strangers_is_refused(owner: Apart) -> None:
    before = _segment().stat()
    run_apart(_refused, uid=STRANGER)
    # Not the time of the last access: to look is to read.
    for field in ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
        assert getattr(_segment().stat(), field) == getattr(before, field)
    owner.say(("num_accumulated",))
    assert owner.hear() == 1


def _take_part() -> None:
    with pytest.raises(errors.PermissionDeniedError, match=rf"uid {OWNER}, mode 0666.*owners="):
        shmacc.attach("theirs")
    with shmacc.attach("theirs", owners={OWNER}) as acc:
        assert isinstance(acc, ConditionalAccumulator)
        assert acc.apply_grad(2.0)
        assert acc.take_partial(2, timeout=0).value == 3.0
        assert acc.stats().attached == 2


def _stay_out() -> None:
    acc = shmacc.attach("theirs", owners="any")
    # /dev/shm is sticky: what is another's can be used, not removed.
    for removal in (
        acc.unlink,
        lambda: inspection.remove("theirs", force=True),
    ):
        with pytest.raises(errors.PermissionDeniedError):
            removal()
    # It was not marked as given up on the way there.
    assert not acc._handle.unlinked
    acc.close()
    with shmacc.attach("theirs", owners="any") as again:
        assert isinstance(again, ConditionalAccumulator)
        assert again.apply_grad(2.0)


@open_to_all
def test_users_share_what_is_open_to_all(owner: Apart) -> None:
    run_apart(_take_part, uid=STRANGER)
    run_apart(_stay_out, uid=STRANGER)
    owner.say(("num_accumulated",))
    assert owner.hear() == 1


def _wait_for_it() -> float:
    with shmacc.attach("theirs", owners="any") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        return float(acc.take_grad(2, timeout=LONG))


@open_to_all
def test_users_wake_each_other_and_a_dead_ones_place_is_free(owner: Apart) -> None:
    with Apart(_wait_for_it, uid=STRANGER) as waiting:
        until(lambda: inspection.describe("theirs").stats.waiting == 1)
        waiting.kill()
    with Apart(_wait_for_it, uid=STRANGER) as waiting:
        until(lambda: inspection.describe("theirs").stats.waiting == 1)
        owner.say(("apply_grad", 5.0))
        assert owner.hear() is True
        assert waiting.result() == 6.0


def _attach() -> None:
    shmacc.attach("theirs", owners="any").close()


@open_to_all
@pytest.mark.parametrize(("uid", "made"), [(STRANGER, []), (OWNER, [OWNER]), (None, [OWNER])])
def test_a_lost_semaphore_is_made_with_the_segments_owner(
    owner: Apart, uid: int | None, made: list[int]
) -> None:
    """A stranger cannot, and does without; the owner and root can."""
    for semaphore in _semaphores():
        semaphore.unlink()
    run_apart(_take_part, uid=STRANGER)
    owner.say(("apply_grad", 1.0))
    assert owner.hear()
    run_apart(_attach, uid=uid)
    assert [path.stat().st_uid for path in _semaphores()] == made
