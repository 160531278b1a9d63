"""A process that is killed at the n-th line of shmacc's own Python that it runs, for every n.

A death at a line leaves the bytes that are in shared memory at that line, and no lock. So a line
that changes no byte needs no judgement of its own, and the bytes can be judged without a death. At
each line that changes some, and at a few others, the process is really killed, and the kernel takes
back what a dead process held.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helpers.apart import Apart
from helpers.killing_deeds import Leftovers, clean_up
from helpers.killing_scenes import NAME, Record, path

import shmacc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from helpers.apart import Pipe
    from helpers.killing_scenes import Scene

_OWN_FILES: Final = str(Path(shmacc.__file__).parent) + os.sep

# Beside the lines at which something has changed, a process is killed for real at each n-th one;
# with SHMACC_EVERY_INSTANT=1 at all.
_ONE_IN: Final = 1 if os.environ.get("SHMACC_EVERY_INSTANT") else 8


def dies(line: int, prepare: Callable[[], Any], operate: Callable[[Any], object]) -> bool:
    """Run ``operate(prepare())`` in a process that is killed at that line of it.

    Returns:
        False if there were not so many lines, and it came through.
    """
    with Apart(_perform, prepare, operate, line) as process:
        status = process.wait()
        if os.WIFEXITED(status):
            assert process.result()
            return False
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True


def deaths(prepare: Callable[[], Any], operate: Callable[[Any], object]) -> Iterator[int]:
    """Leave what a death at each line would leave, and then what one does; the last comes through.

    Yields:
        The number of the line, ascending, when it is left; whoever gets it cleans up.
    """
    seen, last = _instants(prepare, operate)
    for line in chain(sorted({*seen, *range(1, last, _ONE_IN)} - {last}), count(last)):
        if line in seen:
            seen[line].write()
            yield line
        died = dies(line, prepare, operate)
        yield line
        if line >= last and not died:
            return


def _instants(
    prepare: Callable[[], Any], operate: Callable[[Any], object]
) -> tuple[dict[int, Leftovers], int]:
    """By line, what is in shared memory where it is something else than at the line before.

    Returns:
        That, and the number of the line after the last one.
    """
    seen, before = {}, None
    with Apart(_pause, prepare, operate) as process:
        for line in count(1):
            more = process.hear() is not None
            now = Leftovers.now()
            if now != before:
                seen[line] = before = now
            if not more:
                break
            process.say()
    clean_up()
    return seen, line


def at_every_line(scene: Scene, record: Record) -> None:
    """Hold the scene's operation to being all or nothing; record at which lines that was judged."""
    image = scene.prepare()
    before, after = scene.testimony(image), scene.testimony(scene.perform())

    def attach() -> Any:
        image.write(path())
        return scene.begin(shmacc.attach(NAME))

    done, lines = False, []
    for line in deaths(attach, scene.operation):
        testimony = scene.testify()
        done = done or testimony == after
        assert testimony == (after if done else before), f"torn before line {line}"
        lines.append(line)
    assert done
    record("lines", lines)


def _pause(prepare: Callable[[], Any], operate: Callable[[Any], object], pipe: Pipe) -> None:
    """Stand still before each line, and at the end; say whether there is more to come."""

    def stand() -> None:
        pipe.say("one more")
        pipe.hear()

    _trace(prepare(), operate, stand)
    pipe.say(None)
    pipe.hear()


def _perform(prepare: Callable[[], Any], operate: Callable[[Any], object], last: int) -> bool:
    left = last

    def die_at_the_last() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _trace(prepare(), operate, die_at_the_last)
    return left > 0


def _trace(
    prepared: Any, operate: Callable[[Any], object], before_line: Callable[[], None]
) -> None:
    def at_event(_: FrameType, event: str, __: object) -> Callable[..., Any]:
        if event == "line":
            before_line()
        return at_event

    def enter(frame: FrameType, _: str, __: object) -> Callable[..., Any] | None:
        return at_event if frame.f_code.co_filename.startswith(_OWN_FILES) else None

    sys.settrace(enter)
    try:
        operate(prepared)
    finally:
        sys.settrace(None)
