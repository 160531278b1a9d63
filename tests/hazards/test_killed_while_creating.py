"""A process that is killed while it creates or attaches leaves a whole accumulator, or none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import pytest
from hazards.apart import forks
from hazards.killing_lines import at_every_line, deaths
from hazards.killing_scenes import NAME, SOON, Scene, path, rows
from hazards.stepping_tracer import needs_ptrace
from hazards.stepping_walk import judge, walk_between_marks

import shmacc
from shmacc import SparseConditionalAccumulator, _core, errors, inspection, names, testing

if TYPE_CHECKING:
    from hazards.stepping_tracer import Mark

pytestmark = forks

FULL: Final = Scene(
    "attaching",
    "float32",
    3,
    before=lambda acc: acc.apply_grad(*rows(1, 2)),
    operation=lambda acc: type(acc)("float32", None, NAME, reduction_type="SUM").close(),
    more=(2, 3),
)


def create(shared_name: str | None = NAME) -> SparseConditionalAccumulator:
    """Make the accumulator, or attach to it."""
    return SparseConditionalAccumulator("float32", [None, 3], shared_name, mode=0o640)


def go_on() -> None:
    """Whether it was made or not: somebody opens it, and works."""
    with create() as acc:
        assert acc.stats().attached == 1
        assert acc.num_accumulated() == 0
        acc.apply_grad([1], [[1.0, 2.0, 3.0]])
        assert acc.take_grad(1, timeout=SOON).indices.tolist() == [1]
        acc.unlink()


def test_creating_at_every_line() -> None:
    made = False
    for line in deaths(lambda: None, lambda _: create()):
        try:
            shmacc.attach(NAME).close()
            made = True
        except errors.NotFoundError:
            assert not made, f"gone again before line {line}"
            assert not os.path.lexists(path())  # noqa: PTH110
        go_on()
        assert testing.leaked_names(names.current_namespace()) == ()
    assert made


def test_its_permissions_are_as_asked_for() -> None:
    """Those of the semaphore, too, whoever makes it and whatever the umask."""
    before = os.umask(0o077)
    try:
        for line in deaths(lambda: None, lambda _: create()):
            with create() as acc:
                files = testing.leaked_names(names.current_namespace())
                modes = [os.stat(f"{names.SHM_DIRECTORY}/{file}").st_mode & 0o777 for file in files]  # noqa: PTH116
                assert modes == [0o640, 0o640], f"killed before line {line}"
                acc.unlink()
    finally:
        os.umask(before)


def test_creating_a_private_one_at_every_line() -> None:
    """Nobody knows its name: the cleaner finds what is left of it."""
    for _ in deaths(lambda: None, lambda _: create(None)):
        for leftover in inspection.leftovers(namespace=names.current_namespace()):
            assert leftover.removable
            inspection.clean(leftover)
        assert testing.leaked_names(names.current_namespace()) == ()


def test_attaching_at_every_line() -> None:
    at_every_line(FULL)


def claim_a_place(mark: Mark) -> None:
    """Attach: the part that the extension does."""
    handle: Any = _core.open(path())
    mark()
    handle.attach()
    mark()
    handle.close()


@needs_ptrace
def test_attaching_at_every_instruction() -> None:
    image = FULL.prepare()
    looks = walk_between_marks(image, image, claim_a_place)
    assert len(looks) > 10
    before = FULL.testimony(image)
    judge(FULL, looks, before, before)


@pytest.mark.parametrize("places", [1, 3])
def test_its_place_is_given_to_the_next(places: int) -> None:
    """However many die, the table of processes does not fill up."""
    with create() as acc:
        for _ in range(places):
            for _ in deaths(lambda: None, lambda _: create()):
                pass
        create().close()
        assert len(inspection.describe(NAME).processes) == 1
        acc.unlink()
