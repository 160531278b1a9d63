"""A process that is killed at the n-th of its stops before and after system calls, for every n.

A death at a stop leaves the bytes that are in shared memory at that stop, and no lock. So a stop
before which no byte changed needs no judgement of its own, and the bytes can be judged without a
death. At some stops the process is really killed, and the kernel takes back what it held.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Final

from helpers.killing_deeds import Deed, Leftovers, Watcher, clean_up
from helpers.stepping_calls import Call, Calling
from helpers.stepping_tracer import on_one_core
from helpers.support import EVERY_INSTANT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.stepping_tracer import Mark

    # Returns the error with which a call is to fail, or None.
    Failure = Callable[[Call], int | None]
    Fails = Callable[[], Failure]

# At one stop in this many of those before which bytes changed, and of all, a process is killed.
_ONE_CHANGED_IN: Final = 1 if EVERY_INSTANT else 4
_ONE_IN: Final = 1 if EVERY_INSTANT else 32


def deaths(deed: Deed, fails: Fails | None = None) -> Iterator[int]:
    """Leave what a death at each stop would leave, and what a real death at some of them leaves.

    The last death is after the last stop.

    Args:
        deed: The deed that is cut short.
        fails: Makes one of its calls fail; then only stops from that call on count.

    Yields:
        The number of the stop, ascending, once its leftovers are there; the caller cleans up.
    """
    with on_one_core():
        seen, last = _instants(deed, fails)
        real = {*list(seen)[::_ONE_CHANGED_IN], *range(1, last, _ONE_IN)}
        for stop in chain(sorted({*seen, *real} - {last}), count(last)):
            if stop in seen:
                seen[stop].write()
                yield stop
            if stop < last and stop not in real:
                continue
            with _stopping(deed, fails) as stops:
                died = len(list(islice(stops, stop))) == stop
            yield stop
            if stop >= last and not died:
                return


def _instants(deed: Deed, fails: Fails | None) -> tuple[dict[int, Leftovers], int]:
    """Return the leftovers at each stop where they changed; the number after the last stop."""
    seen, stop = {}, 0
    with Watcher() as watcher, _stopping(deed, fails) as stops:
        for stop, _ in enumerate(chain(stops, [None]), start=1):
            now = watcher.change()
            if now is not None:
                seen[stop] = now
    clean_up()
    return seen, stop


@contextmanager
def _stopping(deed: Deed, fails: Fails | None) -> Iterator[Iterator[Call]]:
    """Let a process do the deed, which stops before and after each of its calls; kill it at last.

    It stands at the last stop that was asked for, or has done its deed.
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
