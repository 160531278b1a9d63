"""Kills a process at each of its stops, which are before and after each system call.

A death at a stop leaves the bytes that are in shared memory then, and no lock. So, without a kill,
the test judges a copy of the bytes if they have changed since the last stop. At some stops the
process is really killed, so that the kernel releases its locks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Final

from helpers.killing_deeds import Deed, Leftovers, Watcher, clean_up
from helpers.stepping_calls import Call, Calling
from helpers.stepping_tracer import Mark, on_one_core
from helpers.support import EVERY_INSTANT

# Returns the errno with which this call must fail; None: the call is made.
Failure = Callable[[Call], int | None]
Fails = Callable[[], Failure]

# Real kills: at one in this many of the stops where bytes have changed, and of all stops.
_ONE_CHANGED_IN: Final = 1 if EVERY_INSTANT else 4
_ONE_IN: Final = 1 if EVERY_INSTANT else 32


def deaths(deed: Deed, fails: Fails | None = None) -> Iterator[int]:
    """At each stop, leave in shared memory what a death there leaves; at some stops, really kill.

    The last kill is after the last stop.

    Args:
        deed: The deed to interrupt.
        fails: Makes one of the deed's calls fail; stops before that call are skipped.

    Yields:
        The stop's number, ascending, once its leftovers are in place. The caller removes them.
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
    """Return the leftovers at each stop where they changed, and the last stop's number plus 1."""
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
    """Start a process for the deed; yield its stops before and after each call; then kill it.

    The process runs only while the caller asks for the next stop.
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
