"""Segments of other users: refused with a reason, or shared where the mode says so."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hazards.apart import Apart, forks, needs_root, run_apart
from support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, names
from shmacc.inspection import SegmentState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hazards.apart import Pipe

pytestmark = [forks, needs_root]

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


private_to_its_owner = pytest.mark.parametrize("owner", [0o600, 0o644], indirect=True)
open_to_all = pytest.mark.parametrize("owner", [0o666], indirect=True)


def _refused() -> None:
    before = _segment().stat()
    openers: tuple[Callable[[], Any], ...] = (
        lambda: shmacc.attach("theirs"),
        lambda: ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM"),
        lambda: inspection.describe("theirs"),
        lambda: inspection.cancel("theirs"),
        lambda: inspection.remove("theirs"),
        lambda: inspection.remove("theirs", force=True),
    )
    for opener in openers:
        with pytest.raises(errors.PermissionDeniedError) as caught:
            opener()
        assert isinstance(caught.value, PermissionError)
        assert f"uid {OWNER}" in str(caught.value)
        assert f"{stat.S_IMODE(before.st_mode):04o}" in str(caught.value)
    (summary,) = inspection.list_segments("theirs")
    assert summary.state is SegmentState.UNREADABLE
    assert summary.owner_uid == OWNER
    assert inspection.check("theirs")
    (leftover,) = [
        leftover
        for leftover in inspection.leftovers("theirs")
        if leftover.file_name == _segment().name
    ]
    assert not leftover.removable
    with pytest.raises(errors.PermissionDeniedError):
        inspection.clean(leftover)
    assert _segment().stat() == before


@private_to_its_owner
def test_a_strangers_is_refused(owner: Apart) -> None:
    run_apart(_refused, uid=STRANGER)
    owner.say(("num_accumulated",))
    assert owner.hear() == 1


def _take_part() -> None:
    with shmacc.attach("theirs") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        assert acc.apply_grad(2.0)
        assert acc.take_partial(2, timeout=0).value == 3.0
        assert acc.stats().attached == 2


def _stay_out() -> None:
    acc = shmacc.attach("theirs")
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
    with shmacc.attach("theirs") as again:
        assert isinstance(again, ConditionalAccumulator)
        assert again.apply_grad(2.0)


@open_to_all
def test_users_share_what_is_open_to_all(owner: Apart) -> None:
    run_apart(_take_part, uid=STRANGER)
    run_apart(_stay_out, uid=STRANGER)
    owner.say(("num_accumulated",))
    assert owner.hear() == 1


def _wait_for_it() -> float:
    with shmacc.attach("theirs") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        return float(acc.take_grad(2, timeout=LONG))


@open_to_all
def test_users_wake_each_other(owner: Apart) -> None:
    with Apart(_wait_for_it, uid=STRANGER) as waiting:
        until(lambda: inspection.describe("theirs").stats.waiting == 1)
        owner.say(("apply_grad", 5.0))
        assert owner.hear() is True
        assert waiting.result() == 6.0


@open_to_all
def test_a_dead_strangers_place_is_free(owner: Apart) -> None:
    with Apart(_wait_for_it, uid=STRANGER) as waiting:
        until(lambda: inspection.describe("theirs").stats.waiting == 1)
        waiting.kill()
    owner.say(("take_grad", 1))
    assert owner.hear() == 1.0


def _attach_and_go() -> None:
    shmacc.attach("theirs").close()


@open_to_all
def test_the_owner_removes_what_a_stranger_made_for_it(owner: Apart) -> None:
    """The queue's semaphore was gone, and a stranger who attached made it again."""
    for semaphore in _semaphores():
        semaphore.unlink()
    run_apart(_attach_and_go, uid=STRANGER)
    assert [path.stat().st_uid for path in _semaphores()] == [STRANGER]
    owner.say(("unlink",))
    assert owner.hear() is None
    assert not _segment().exists()
    # Its file is the stranger's, and stays until root or the stranger cleans up.
    for leftover in inspection.leftovers("theirs"):
        inspection.clean(leftover)
    assert _semaphores() == []
    # For the fixture, which removes what it made.
    ConditionalAccumulator("f8", (), "theirs").close()


def _names_clash() -> None:
    # Without a namespace two users' names are the same names.
    with pytest.raises(errors.PermissionDeniedError):
        ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM")
    os.environ[names.NAMESPACE_VARIABLE] = f"{os.environ[names.NAMESPACE_VARIABLE]}-mine"
    with ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM") as mine:
        assert mine.num_accumulated() == 0
        mine.unlink()


@pytest.mark.parametrize("owner", [0o600], indirect=True)
def test_a_namespace_keeps_users_apart(owner: Apart) -> None:
    run_apart(_names_clash, uid=STRANGER)
    owner.say(("num_accumulated",))
    assert owner.hear() == 1
