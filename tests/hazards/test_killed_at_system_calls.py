"""A process that is killed before or after any of its system calls leaves all or nothing.

The extension opens, makes, closes and removes segments in one piece, from Python's view: so lines
of Python say little about where a death may fall. What a death leaves is changed by system calls,
and by stores to shared memory between them; both are cut off at each call here.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import pytest
from helpers.apart import forks
from helpers.killing_deeds import (
    CREATING,
    DEEDS,
    SCENE,
    Deed,
    Leftovers,
    Watcher,
    clean_up,
    create,
    judge,
)
from helpers.stepping_calls import NAMES, Calling, needs_calls, needs_failures
from helpers.stepping_tracer import on_one_core

from shmacc import errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from helpers.killing_scenes import Record, Testimony
    from helpers.stepping_calls import Call
    from helpers.stepping_tracer import Mark

pytestmark = [forks, needs_calls]


Failure = Callable[["Call"], int | None]
Fails = Callable[[], Failure]

# Beside the stops at which something has changed, a process is killed for real at each n-th one;
# with SHMACC_EVERY_INSTANT=1 at all.
_ONE_IN: Final = 1 if os.environ.get("SHMACC_EVERY_INSTANT") else 8


@contextmanager
def stopping(deed: Deed, fails: Fails | None) -> Iterator[Iterator[Call]]:
    """Let a process do the deed, which stops before and after each of its calls; kill it at last.

    Args:
        deed: What it does.
        fails: Makes what says with which error a call is to fail, or None. Then the stops are
            those from that call on.

    Yields:
        The stops. The process stands at the last one that was asked for, or has done its deed.
    """
    kept = deed.before()

    def act(mark: Mark) -> None:
        begun = deed.begin(kept)
        mark()
        done = deed.act(begun)
        mark()
        del done

    with Calling(act) as child:
        child.run_to_mark()
        yield _stops(child, None if fails is None else fails())
    if kept is not None:
        kept.close()


def _stops(child: Calling, fail: Failure | None) -> Iterator[Call]:
    for call in child.calls_to_mark():
        if call.before and fail is not None and (code := fail(call)) is not None:
            child.fail(code)
            fail = None
        if fail is None:
            yield call
    assert fail is None


def instants(deed: Deed, fails: Fails | None) -> tuple[dict[int, Leftovers], int]:
    """See what a death would leave at each stop, of one process that does all of the deed.

    Returns:
        By stop, what there is where it is something else than at the stop before; and how many
        stops there are, the end of the deed included.
    """
    seen, stop = {}, 0
    with Watcher() as watcher, stopping(deed, fails) as stops:
        for stop, _ in enumerate(chain(stops, [None]), start=1):
            now = watcher.change()
            if now is not None:
                seen[stop] = now
    clean_up()
    return seen, stop


def killed_at(deed: Deed, stop: int, fails: Fails | None) -> Testimony | None:
    """Kill a process at that stop of the deed; what is found."""
    with stopping(deed, fails) as stops:
        for _ in islice(stops, stop):
            pass
    return judge()


def found_in(leftovers: Leftovers) -> Testimony | None:
    """What is found where this is left."""
    leftovers.write()
    return judge()


def at_every_call(
    deed: Deed, expected: tuple[Any, Any], record: Record, fails: Fails | None = None
) -> None:
    """Hold each stop to: what is found is what was before, and from some call on after.

    What a death leaves at a stop are the bytes that are in shared memory there, and no lock. So a
    stop at which they are as at the one before needs no judgement of its own, and they can be
    judged without a death. For real, with all that the kernel takes back of a dead process, there
    is a death wherever they have changed, and at some more stops.
    """
    with on_one_core():
        seen, last = instants(deed, fails)
        hold(expected, ((stop, found_in(leftovers)) for stop, leftovers in seen.items()))
        kills = sorted({*seen, *range(1, last, _ONE_IN), last})
        hold(expected, ((stop, killed_at(deed, stop, fails)) for stop in kills))
    record("stops", last)
    record("instants", len(seen))
    record("kills", len(kills))


def hold(expected: tuple[Any, Any], found: Iterable[tuple[int, Any]]) -> None:
    """Hold what is found at these stops to being what was before, and from one on after."""
    before, after = expected
    done = False
    for stop, one in found:
        done = done or one == after
        assert one == (after if done else before), f"torn at stop {stop}"
    assert done


def expected(deed: Deed) -> tuple[Testimony | None, Testimony | None]:
    """What is to be found before and after it."""
    one = SCENE.testimony(SCENE.prepare())
    match deed.name:
        case "creating":
            create().close()
            return None, SCENE.testify()
        case "creating a private one" | "creating shared arrays" | "closing a private one":
            return None, None  # under another name
        case "a child's first operation" | "applying behind the dead":
            return one, SCENE.testimony(SCENE.perform())
        case "taking behind the dead":
            return one, SCENE.testimony(replace(SCENE, operation=deed.act).perform())
        case "unlinking" | "cleaning":
            return one, None
    return one, one


@pytest.mark.parametrize("deed", DEEDS, ids=str)
def test_killed_at_every_call(deed: Deed, record_property: Record) -> None:
    at_every_call(deed, expected(deed), record_property)


class _FirstMappingOfTheNamed:
    """Lets the first mapping fail that a maker makes once the segment has its name."""

    def __init__(self) -> None:
        self.names = 0

    def __call__(self, call: Call) -> int | None:
        name = NAMES.get(call.number)
        self.names += name == "linkat"
        shared = name == "mmap" and call.arguments[3] & mmap.MAP_SHARED
        return errno.ENOMEM if self.names == 2 and shared else None


def _create_in_vain() -> None:
    with pytest.raises(errors.ResourceExhaustedError):
        create()


@needs_failures
def test_killed_while_taking_back_what_could_not_be_attached(record_property: Record) -> None:
    """A maker removes the new segment again, unless somebody else has attached by then."""
    create().close()
    new = SCENE.testify()
    vain = replace(CREATING, act=lambda _: _create_in_vain())
    at_every_call(vain, (new, None), record_property, fails=_FirstMappingOfTheNamed)
