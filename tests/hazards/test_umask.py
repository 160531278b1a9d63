"""A segment has the mode that was asked for, whatever the umask."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from helpers.apart import apart, needs_root
from helpers.opening import KINDS

import shmacc
from shmacc import ConditionalAccumulator, errors
from shmacc._base import names

UMASKS: Final = (0o000, 0o022, 0o077, 0o777)
MODES: Final = (0o600, 0o660, 0o666, 0o640)


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(name: str) -> dict[str, int]:
    file_name = names.segment_name(name).system_name
    paths = [path for path in Path(names.SHM_DIRECTORY).iterdir() if file_name in path.name]
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.usefixtures("umask")
def test_a_segment_has_the_mode_that_was_asked_for() -> None:
    """The semaphore has that mode, too, even if made again. The first opener's mode stays."""
    for kind, mode in zip(KINDS * 2, MODES, strict=True):
        with kind("f4", shared_name="modes", mode=mode) as acc:
            assert list(modes("modes").values()) == [mode, mode]
            for again in (None, mode):
                kind("f4", shared_name="modes", mode=again).close()
            with pytest.raises(errors.InvalidArgumentError, match=rf"mode 0{mode:o}, but 0620"):
                kind("f4", shared_name="modes", mode=0o620)
            for file_name in modes("modes"):
                if file_name.startswith("sem."):
                    (Path(names.SHM_DIRECTORY) / file_name).unlink()
            shmacc.attach("modes").close()
            assert list(modes("modes").values()) == [mode, mode]
            acc.unlink()


@pytest.mark.usefixtures("umask")
def test_the_default_mode_lets_no_other_user_in() -> None:
    with ConditionalAccumulator("f4") as acc:
        assert list(modes(acc.shared_name).values()) == [0o600, 0o600]


@needs_root
@pytest.mark.parametrize("mode", [0o000, 0o060, 0o400, 0o200], ids=oct)
@apart(uid=61001)
def test_a_mode_that_excludes_its_maker_is_refused(mode: int) -> None:
    """No segment is made that nobody can use, and no name is left."""
    with pytest.raises(errors.ShmaccError):
        ConditionalAccumulator("f4", shared_name="modes", mode=mode)
    assert modes("modes") == {}
