"""Another user who may only read a segment can look at it and delay others, but no more."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from helpers import segment_layout as layout
from helpers.apart import Apart, Pipe, needs_root, run_apart
from helpers.lock_holder import activity
from helpers.segment_file import SegmentFile
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection
from shmacc._base import names

pytestmark = needs_root

STRANGER: Final = 61002
MANY: Final = 60
SECRET: Final = Path(names.SHM_DIRECTORY, f"secret-{os.getpid()}")


def _serve(*, pipe: Pipe) -> None:
    with ConditionalAccumulator("f8", (), "read", reduction_type="SUM", mode=0o644) as acc:
        acc.apply_grad(1.0)
        pipe.say()
        while request := pipe.hear():
            pipe.say(getattr(acc, request[0])(*request[1:]))
        acc.unlink()


@pytest.fixture
def owner() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls methods in root's process, whose segment everybody may read."""
    with Apart(_serve).ready() as process:

        def request(name: str, *args: Any) -> Any:
            process.say((name, *args))
            return process.hear()

        yield request
        process.finish()


def segment() -> Path:
    return Path(names.segment_name("read").path)


def semaphore() -> Path:
    (found,) = Path(names.SHM_DIRECTORY).glob(f"sem.{segment().name}.*")
    return found


def attach() -> bool:
    with shmacc.attach("read") as again:
        assert isinstance(again, ConditionalAccumulator)
        return again.apply_grad(2.0)


def _try_to_harm() -> list[str]:
    """Try every change; return those that were not refused."""
    done = []
    for file in (segment(), semaphore()):
        os.close(os.open(file, os.O_RDONLY))
        for harm in (
            lambda file: os.open(file, os.O_RDWR),
            lambda file: os.open(file, os.O_WRONLY | os.O_TRUNC),
            lambda file: os.truncate(file, 0),
            lambda file: os.chmod(file, 0o600),  # noqa: PTH101
            lambda file: os.rename(file, f"{file}-"),  # noqa: PTH104
            os.unlink,
        ):
            try:
                harm(file)
            except PermissionError:
                continue
            done.append(f"{harm} of {file}")
    with pytest.raises(errors.PermissionDeniedError, match="uid 0, mode 0644"):
        shmacc.attach("read")
    for remove in (
        lambda: inspection.remove("read", force=True),
        lambda: inspection.cancel("read"),
    ):
        with pytest.raises(errors.PermissionDeniedError):
            remove()
    assert inspection.leftovers(namespace=names.current_namespace()) == ()
    assert inspection.describe("read").stats.num_accumulated == 1
    return done


def _state_of_files() -> list[object]:
    """Return the files' metadata without access times, which reading changes."""
    kept = "mode", "ino", "nlink", "uid", "gid", "size", "blocks", "mtime_ns", "ctime_ns"
    return [getattr(f.stat(), f"st_{what}") for f in (segment(), semaphore()) for what in kept]


def test_a_user_who_may_read_can_change_nothing(owner: Callable[..., Any]) -> None:
    before = _state_of_files()
    assert run_apart(_try_to_harm, uid=STRANGER) == []
    assert _state_of_files() == before
    assert owner("take_grad", 1) == 1.0


def _make_many(*, pipe: Pipe) -> None:
    made = [ConditionalAccumulator("f8", (), f"made-{i}", mode=0o644) for i in range(MANY)]
    pipe.turn()
    for acc in made:
        acc.unlink()


def test_the_semaphore_exists_before_the_segment_has_its_name() -> None:
    """Another user could make a semaphore that does not exist yet."""
    own = f"shmacc.{names.current_namespace()}:made-"
    with Apart(_make_many) as maker:
        while not maker.pipe.poll():
            segments = {name for name in os.listdir(names.SHM_DIRECTORY) if name.startswith(own)}  # noqa: PTH208
            semaphores = Path(names.SHM_DIRECTORY).glob(f"sem.{own}*")
            assert segments <= {file.name[len("sem.") : -17] for file in semaphores}
        maker.hear()
        maker.finish()


def _plant_a_file(path: Path) -> None:
    path.write_bytes((1).to_bytes(8, "little").ljust(32, b"\0"))
    path.chmod(0o666)


@pytest.fixture
def secret() -> Iterator[Path]:
    """Yield a file that only root may read; its size is a semaphore's."""
    SECRET.write_bytes(b"secret".ljust(32))
    SECRET.chmod(0o600)
    yield SECRET
    SECRET.unlink()


def test_another_users_file_at_the_semaphores_name_is_not_mapped(owner: Callable[..., Any]) -> None:
    """If the file were mapped, its owner could truncate it and so cause a SIGBUS here."""
    planted = semaphore()
    planted.unlink()
    run_apart(_plant_a_file, planted, uid=STRANGER)
    content = planted.read_bytes()
    with pytest.raises(errors.PermissionDeniedError, match=r"owner, uid 0; remove it"):
        run_apart(attach)
    run_apart(os.truncate, planted, 0, uid=STRANGER)
    assert content == (1).to_bytes(8, "little").ljust(32, b"\0")
    assert owner("apply_grad", 3.0)  # an attached process keeps the old semaphore
    planted.unlink(missing_ok=True)
    assert run_apart(attach)
    assert semaphore().stat().st_uid == 0
    assert owner("take_grad", 3) == 6.0


@pytest.mark.parametrize("plant", [lambda path: path.symlink_to(SECRET), os.mkfifo])
def test_another_users_link_under_the_semaphores_name_is_not_followed(
    owner: Callable[..., Any], secret: Path, plant: Callable[[Path], None]
) -> None:
    """If root followed the link, it would change its secret file's mode, or write into the file."""
    planted = semaphore()
    planted.unlink()
    run_apart(plant, planted, uid=STRANGER)
    assert run_apart(attach)
    assert secret.read_bytes() == b"secret".ljust(32)
    assert secret.stat().st_mode & 0o777 == 0o600
    made = semaphore()
    assert not made.is_symlink()
    assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (0, 0o644)
    assert owner("take_grad", 2) == 3.0


def _plant_links_for_ever(path: Path, *, pipe: Pipe) -> None:
    pipe.say()
    while not pipe.poll():
        with contextlib.suppress(OSError):
            path.symlink_to(SECRET)


def _attach_without_a_semaphore(path: Path) -> None:
    for _ in range(MANY):
        path.unlink(missing_ok=True)
        with contextlib.suppress(errors.ShmaccError, OSError):
            attach()


def test_a_link_that_appears_while_the_semaphore_is_made_is_not_followed(
    owner: Callable[..., Any], secret: Path
) -> None:
    """The link appears between any two steps of making the semaphore."""
    planted = semaphore()
    with Apart(_plant_links_for_ever, planted, uid=STRANGER).ready() as stranger:
        run_apart(_attach_without_a_semaphore, planted)
        stranger.finish()
    assert secret.read_bytes() == b"secret".ljust(32)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert owner("num_accumulated") > 0


def _lock_for_reading(first: int, count: int, *, pipe: Pipe) -> None:
    fd = os.open(segment(), os.O_RDONLY)
    fcntl.lockf(fd, fcntl.LOCK_SH, count, first)
    pipe.turn("locked")


@contextlib.contextmanager
def reader(first: int, count: int = 1) -> Iterator[Apart]:
    """Another user holds read locks on these bytes, as any reader of the file may."""
    with Apart(_lock_for_reading, first, count, uid=STRANGER).ready() as process:
        yield process


def _take_in_vain() -> None:
    acc: Any = shmacc.attach("read")
    acc.take(1, timeout=0.05)


def _apply_later(*, pipe: Pipe) -> bool:
    acc: Any = shmacc.attach("read")
    pipe.turn()
    return bool(acc.apply_grad(2.0))


def test_a_readers_lock_delays_others_until_their_timeouts(owner: Callable[..., Any]) -> None:
    """Permission to read allows such locks; others go on when the reader is gone."""
    with Apart(_apply_later).ready() as applying, reader(layout.lane_byte()) as process:
        applying.say()
        until(lambda: activity("read", applying.pid) == "waits for the lock")
        with pytest.raises(errors.DeadlineExceededError):
            run_apart(_take_in_vain)
        assert owner("num_accumulated") == 1
        process.kill()
        assert applying.result()
    assert owner("take_grad", 2) == 3.0


def test_a_readers_lock_on_the_name_delays_openers(owner: Callable[..., Any]) -> None:
    with (
        reader(layout.NAME_BYTE),
        pytest.raises(errors.DeadlineExceededError, match="opening or removing"),
    ):
        run_apart(attach)
    assert run_apart(attach)
    assert owner("take_grad", 2) == 3.0


def _cut_short() -> None:
    with SegmentFile(names.segment_name("read").path) as file:
        generation = file.committed("lane").generation
        file.put("journal", layout.Journal(generation + 1, 0, 0))


def test_a_readers_locks_on_all_entries_keep_others_out(owner: Callable[..., Any]) -> None:
    # The reader locks all entries but the owner's, which is the first and locked already.
    with reader(layout.PRESENCE_BYTE + 2, 1 << 14) as process:
        with pytest.raises(errors.ResourceExhaustedError, match="entries for processes"):
            run_apart(attach)
        # A process that finds no free entry frees the entries of the dead, and first undoes what
        # the dead left half done.
        run_apart(_cut_short)
        with pytest.raises(errors.ResourceExhaustedError, match="entries for processes"):
            run_apart(attach)
        assert owner("apply_grad", 4.0)
        process.kill()
    assert run_apart(attach)
    assert owner("take_grad", 3) == 7.0
