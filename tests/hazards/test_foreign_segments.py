"""A process attaches only to segments of allowed owners.

Other users' segments are refused with a reason, or shared if their mode and `owners` allow it.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from helpers.apart import Apart, Pipe, needs_root, run_apart
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._base import names
from shmacc.inspection import SegmentState

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
    """Yield another user's process, whose segment has the mode that the test asks for."""
    with Apart(_make, request.param, uid=OWNER).ready() as process:
        yield process
    inspection.remove("theirs", force=True)


def in_mode(mode: int) -> Callable[[Any], Any]:
    return lambda test: needs_root(pytest.mark.parametrize("owner", [mode], indirect=True)(test))


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
    # Two users share names if they have no namespaces of their own.
    os.environ[names.NAMESPACE_VARIABLE] = f"{os.environ[names.NAMESPACE_VARIABLE]}-mine"
    with ConditionalAccumulator("f8", (), "theirs", reduction_type="SUM") as mine:
        assert mine.num_accumulated() == 0
        mine.unlink()


@in_mode(0o600)
def test_another_users_segment_is_refused(owner: Apart) -> None:
    before = _segment().stat()
    run_apart(_refused, uid=STRANGER)
    # Without the time of the last access, which reading changes.
    for field in ("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns"):
        assert getattr(_segment().stat(), field) == getattr(before, field)
    assert owner.turn(("num_accumulated",)) == 1


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
    # /dev/shm is sticky: another user's file can be used, but not removed.
    for removal in (acc.unlink, lambda: inspection.remove("theirs", force=True)):
        with pytest.raises(errors.PermissionDeniedError):
            removal()
    # The attempt has not marked the segment as removed.
    assert not acc._handle.unlinked
    acc.close()
    with shmacc.attach("theirs", owners="any") as again:
        assert isinstance(again, ConditionalAccumulator)
        assert again.apply_grad(2.0)


@in_mode(0o666)
def test_users_share_a_segment_that_is_open_to_all(owner: Apart) -> None:
    run_apart(_take_part, uid=STRANGER)
    run_apart(_stay_out, uid=STRANGER)
    assert owner.turn(("num_accumulated",)) == 1


def _wait_for_it() -> float:
    with shmacc.attach("theirs", owners="any") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        return float(acc.take_grad(2, timeout=LONG))


@in_mode(0o666)
def test_users_wake_each_other_and_a_dead_users_entry_becomes_free(owner: Apart) -> None:
    with Apart(_wait_for_it, uid=STRANGER) as waiting:
        until(lambda: inspection.describe("theirs").stats.waiting == 1)
        waiting.kill()
    with Apart(_wait_for_it, uid=STRANGER) as waiting:
        until(lambda: inspection.describe("theirs").stats.waiting == 1)
        assert owner.turn(("apply_grad", 5.0)) is True
        assert waiting.result() == 6.0


@in_mode(0o666)
@pytest.mark.parametrize(("uid", "made"), [(STRANGER, []), (OWNER, [OWNER]), (None, [OWNER])])
def test_a_lost_semaphore_is_made_again_for_the_segments_owner(
    owner: Apart, uid: int | None, made: list[int]
) -> None:
    """Only the owner and root can make it again; other users work without a semaphore."""
    for semaphore in _semaphores():
        semaphore.unlink()
    run_apart(_take_part, uid=STRANGER)
    assert owner.turn(("apply_grad", 1.0))
    run_apart(lambda: shmacc.attach("theirs", owners="any").close(), uid=uid)
    assert [path.stat().st_uid for path in _semaphores()] == made


# --- owners ---------------------------------------------------------------------------------------


def _make_and_take(mode: int, *, pipe: Pipe) -> Any:
    acc = ConditionalAccumulator("f8", (), "whose", reduction_type="SUM", mode=mode)
    pipe.turn(pickle.dumps(acc))
    taken = acc.take_partial(0)
    acc.unlink()
    return float(taken.value) if taken.count else 0.0


@pytest.fixture
def theirs() -> Iterator[Apart]:
    """Yield another user's process, whose segment is open to all and may be a trap."""
    with Apart(_make_and_take, 0o666, uid=OWNER) as process:
        yield process
        assert process.finish() == 0.0, "somebody's gradient got into a stranger's segment"


def construct(**how: Any) -> ConditionalAccumulator:
    return ConditionalAccumulator("f8", (), "whose", reduction_type="SUM", **how)


def refused() -> pytest.RaisesExc[errors.PermissionDeniedError]:
    return pytest.raises(
        errors.PermissionDeniedError, match=rf"uid {OWNER}, mode 0666.*owners= allows others"
    )


def _refuse_anothers(pickled: bytes) -> None:
    for how in ({}, {"owners": "mine"}, {"owners": [0, os.geteuid()]}, {"owners": ()}):
        for mode in ({}, {"mode": 0o600}, {"mode": 0o666}):
            with refused():
                construct(**how, **mode)
        with refused():
            shmacc.attach("whose", **how)
    with refused():
        pickle.loads(pickled)


@needs_root
@pytest.mark.parametrize("uid", [None, STRANGER], ids=["root", "another user"])
def test_a_segment_of_an_owner_not_allowed_is_refused(theirs: Apart, uid: int | None) -> None:
    """Root is refused, too; so is unpickling the owner's handle: it allows "mine" only."""
    run_apart(_refuse_anothers, theirs.hear(), uid=uid)


def _come_in() -> None:
    for owners in ("any", {OWNER}, range(OWNER, OWNER + 1), [1, 2, OWNER], iter([OWNER])):
        with construct(owners=owners) as acc:
            assert acc.apply_grad(1.0)
            with pickle.loads(pickle.dumps(acc)) as again:
                assert again.take_partial(1).value == 1.0
    several: tuple[Any, ...] = ("any", {OWNER})
    for owners in several:
        with shmacc.attach("whose", owners=owners) as found:
            assert found.stats().attached == 2


@needs_root
@pytest.mark.parametrize("uid", [None, STRANGER], ids=["root", "another user"])
def test_allowed_owners_segments_are_attached(theirs: Apart, uid: int | None) -> None:
    """A constructor or `attach` says which owners are allowed; a pickled handle keeps them."""
    theirs.hear()
    run_apart(_come_in, uid=uid)


def _attach_to_roots() -> None:
    with construct() as acc, shmacc.attach("whose") as again:
        assert acc.stats().attached == 2
        assert again.stats().attached == 2
    for owners in ([STRANGER], {OWNER}):
        with pytest.raises(errors.PermissionDeniedError, match="uid 0, mode 0666"):
            construct(owners=owners)


@needs_root
def test_roots_segments_are_always_allowed() -> None:
    """A refusal would protect nobody, since root can do everything anyway."""
    with construct(mode=0o666) as acc:
        run_apart(_attach_to_roots, uid=STRANGER)
        acc.unlink()


@needs_root
def test_a_semaphore_of_another_owner_is_not_mapped() -> None:
    """A semaphore's owner could truncate it while other processes have it mapped."""
    run_apart(lambda: construct().close())
    file = Path(names.segment_name("whose").path)
    (semaphore,) = file.parent.glob(f"sem.{file.name}.*")
    os.chown(semaphore, STRANGER, STRANGER)
    for owners in ("mine", "any", {0, STRANGER}):
        with pytest.raises(errors.PermissionDeniedError, match=f"{semaphore.name}.*owner, uid 0"):
            shmacc.attach("whose", owners=owners)
    os.chown(semaphore, 0, 0)
    with shmacc.attach("whose") as acc:
        acc.unlink()
