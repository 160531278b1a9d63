"""A process that is killed while it creates or attaches leaves a whole accumulator, or none."""

from __future__ import annotations

import itertools
import os
import stat
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart
from helpers.killing_lines import at_every_line, deaths
from helpers.killing_scenes import NAME, Record, Scene, path, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import judge, walk_between_marks

import shmacc
from shmacc import SparseConditionalAccumulator, _core, errors, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Pipe
    from helpers.stepping_tracer import Mark

pytestmark = pytest.mark.beyond_asan

MODE: Final = 0o640

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
    return SparseConditionalAccumulator("float32", [None, 3], shared_name, mode=MODE)


@pytest.fixture
def tight_umask() -> Iterator[None]:
    """Let this process, and its children, create files that nobody else can open."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def go_on() -> None:
    """Whether it was made or not: somebody opens it, as it was to be, and works."""
    with create() as acc:
        assert acc.stats().attached == 1
        assert acc.num_accumulated() == 0
        acc.apply_grad([1], [[1.0, 2.0, 3.0]])
        assert acc.take_grad(1, timeout=0).indices.tolist() == [1]
        for file in testing.leaked_names(names.current_namespace()):
            assert stat.S_IMODE(os.stat(f"{names.SHM_DIRECTORY}/{file}").st_mode) == MODE, file  # noqa: PTH116
        acc.unlink()


@pytest.mark.usefixtures("tight_umask")
def test_creating_at_every_line(record_property: Record) -> None:
    made, line = False, 0
    for line in deaths(lambda: None, lambda _: create()):
        try:
            shmacc.attach(NAME).close()
            made = True
        except errors.NotFoundError:
            assert not made, f"gone again before line {line}"
            assert not os.path.lexists(path())
        go_on()
        assert testing.leaked_names(names.current_namespace()) == ()
    assert made
    record_property("lines", line)


def test_the_cleaner_finds_a_private_one() -> None:
    """Nobody else knows its name."""
    with Apart(create_and_say_so, None) as creator:
        creator.hear()
    before = testing.leaked_names(names.current_namespace())
    found = inspection.leftovers(namespace=names.current_namespace())
    removed = [inspection.clean(leftover) for leftover in found]
    assert sorted(itertools.chain(*removed)) == sorted(before)
    assert testing.leaked_names(names.current_namespace()) == ()


def create_and_say_so(shared_name: str | None, pipe: Pipe) -> None:
    """Create, or attach, and stay."""
    with create(shared_name):
        pipe.say()
        pipe.hear()


def test_attaching_at_every_line(record_property: Record) -> None:
    at_every_line(FULL, record_property)


def claim_a_place(mark: Mark) -> None:
    """Attach: the part that the extension does."""
    handle: Any = _core.open(path(), None)[2]
    semaphore = names.semaphore_path(os.path.basename(path()), handle.config()["token"])  # noqa: PTH119
    mark()
    handle.enter(path(), semaphore)
    mark()
    handle.close()


@needs_ptrace
def test_attaching_at_every_instruction(record_property: Record) -> None:
    image = FULL.prepare()
    looks = walk_between_marks(image, image, claim_a_place)
    assert len(looks) > 3
    before = FULL.testimony(image)
    record_property("judged", judge(FULL, looks, before, before))


def test_its_place_is_given_to_the_next() -> None:
    """However many die, the table of processes does not fill up."""
    for _ in range(10):
        with Apart(create_and_say_so, NAME) as process:
            process.hear()
    with create() as acc:
        assert [process.alive for process in inspection.describe(NAME).processes] == [True]
        acc.unlink()
