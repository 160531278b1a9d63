"""Whose segments are attached: only those of who was meant, unless it is said otherwise."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, needs_root, run_apart

import shmacc
from shmacc import ConditionalAccumulator, errors
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe

OWNER: Final = 61001
STRANGER: Final = 61002


def _make(mode: int, *, pipe: Pipe) -> Any:
    acc = ConditionalAccumulator("f8", (), "whose", reduction_type="SUM", mode=mode)
    pipe.say(pickle.dumps(acc))
    pipe.hear()
    taken = acc.take_partial(0)
    acc.unlink()
    return float(taken.value) if taken.count else 0.0


@pytest.fixture
def theirs() -> Iterator[Apart]:
    """Another user's process, with a segment that is open to all, and perhaps a trap."""
    with Apart(_make, 0o666, uid=OWNER) as process:
        yield process
        process.say()
        assert process.result() == 0.0, "somebody's gradient got into a stranger's segment"


def construct(**how: Any) -> ConditionalAccumulator:
    return ConditionalAccumulator("f8", (), "whose", reduction_type="SUM", **how)


def refused() -> pytest.RaisesExc[errors.PermissionDeniedError]:
    return pytest.raises(
        errors.PermissionDeniedError, match=rf"uid {OWNER}, mode 0666.*owners= allows others"
    )


def _stay_out(pickled: bytes) -> None:
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
def test_anothers_is_not_attached_silently(theirs: Apart, uid: int | None) -> None:
    """Also not by root, who may open anything, and by a pickle that says "mine"."""
    run_apart(_stay_out, theirs.hear(), uid=uid)


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
def test_it_is_attached_by_who_says_so(theirs: Apart, uid: int | None) -> None:
    """At construction, by `attach`, and by a pickle, which carries it."""
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
def test_roots_are_everybodys() -> None:
    """Who does not trust root has no choice anyway."""
    with construct(mode=0o666) as acc:
        run_apart(_attach_to_roots, uid=STRANGER)
        acc.unlink()


@needs_root
def test_a_segment_and_a_semaphore_of_different_owners() -> None:
    """Its owner could truncate it under those who have it mapped."""
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


BAD_OWNERS: Final = (
    *("", "everybody", b"mine", None, 0, ["root"], [-1], [2**32 - 1], [True], [1.0]),
    np.array([1, 2]),  # compared with a string, they have no truth
)


@pytest.mark.parametrize("owners", BAD_OWNERS, ids=repr)
def test_what_says_no_owners(owners: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="owners must be"):
        construct(owners=owners)
    with pytest.raises(errors.InvalidArgumentError, match="owners must be"):
        shmacc.attach("whose", owners=owners)
    assert not os.path.lexists(names.segment_name("whose").path)


@pytest.mark.parametrize("made", [0o600, 0o666])
def test_modes_that_agree_and_that_do_not(made: int) -> None:
    with construct(mode=made) as acc:
        construct().close()
        construct(mode=None).close()
        construct(mode=made).close()
        shmacc.attach("whose").close()
        with pytest.raises(errors.InvalidArgumentError, match=f"mode {made:04o}.*0660"):
            construct(mode=0o660)
        assert acc.stats().attached == 1
        assert Path(names.segment_name("whose").path).stat().st_mode & 0o777 == made
        acc.unlink()


def test_a_new_one_is_its_owners_alone() -> None:
    with construct() as acc:
        for file in Path(names.SHM_DIRECTORY).glob(f"*{names.current_namespace()}:*"):
            assert file.stat().st_mode & 0o777 == 0o600
            assert file.stat().st_uid == os.geteuid()
        acc.unlink()
