"""A process that is killed while it closes or unlinks takes away nothing that others have."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import Apart
from helpers.killing_lines import at_every_line, deaths, dies
from helpers.killing_scenes import NAME, Record, Scene, path, rows
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import judge, walk_between_marks

import shmacc
from shmacc import SparseConditionalAccumulator, errors, inspection, testing
from shmacc._layout import names

if TYPE_CHECKING:
    from helpers.apart import Pipe
    from helpers.stepping_tracer import Mark

pytestmark = pytest.mark.beyond_asan

CLOSING: Final = Scene(
    "closing",
    "float32",
    3,
    before=lambda acc: acc.apply_grad(*rows(1, 2)),
    operation=lambda acc: acc.close(),
    more=(2, 3),
)


def test_closing_at_every_line(record_property: Record) -> None:
    at_every_line(CLOSING, record_property)


def close_handle(mark: Mark) -> None:
    """Close: the part that the extension does."""
    acc: Any = shmacc.attach(NAME)
    mark()
    acc._handle.close()
    mark()


@needs_ptrace
def test_closing_at_every_instruction(record_property: Record) -> None:
    image = CLOSING.prepare()
    looks = walk_between_marks(image, image, close_handle)
    assert looks
    before = CLOSING.testimony(image)
    record_property("judged", judge(CLOSING, looks, before, before))


def test_closing_a_private_one_at_every_line() -> None:
    """Closing it removes it; what a death leaves of it, the cleaner removes."""
    for _ in deaths(
        lambda: SparseConditionalAccumulator("float32"), SparseConditionalAccumulator.close
    ):
        clean_up()


def clean_up() -> None:
    """Remove what nobody has any more."""
    for leftover in inspection.leftovers(namespace=names.current_namespace()):
        assert leftover.removable
        inspection.clean(leftover)
    assert testing.leaked_names(names.current_namespace()) == ()


def use(pipe: Pipe) -> list[int]:
    """Go on using what others unlink."""
    acc: Any = shmacc.attach(NAME)
    with acc:
        pipe.say()
        pipe.hear()
        acc.apply_grad(*rows(2, 3), local_step=shmacc.NEVER_STALE)
        taken = acc.take(2, timeout=0)
        return [int(index) for index in taken.indices]


def test_unlinking_at_every_line(record_property: Record) -> None:
    """The name is there with all that it had, or it is free."""
    image = CLOSING.prepare()
    gone, line = False, 0
    for line in deaths(lambda: _write_and_attach(image), lambda acc: acc.unlink()):
        try:
            with shmacc.attach(NAME) as acc:
                assert not gone, f"there again before line {line}"
                assert acc.num_accumulated() == 1
        except errors.NotFoundError:
            gone = True
        with SparseConditionalAccumulator("float32", None, NAME, reduction_type="SUM") as acc:
            assert acc.num_accumulated() == (0 if gone else 1)
            acc.unlink()
        clean_up()
    assert gone
    record_property("lines", line)


def _write_and_attach(image: Any) -> Any:
    image.write(path())
    return shmacc.attach(NAME)


def test_unlinked_by_the_dead_under_the_living() -> None:
    image = CLOSING.prepare()
    for line in count(1):
        image.write(path())
        with Apart(use) as user:
            user.hear()
            died = dies(line, lambda: shmacc.attach(NAME), lambda acc: acc.unlink())
            with SparseConditionalAccumulator("float32", None, NAME, reduction_type="SUM") as acc:
                # The same one, or a new one.
                assert acc.stats().attached == 1 + acc.num_accumulated()
                acc.unlink()
            user.say()
            assert user.result() == [1, 2, 3]
        clean_up()
        if not died:
            return
