"""A process that is killed at the n-th line of shmacc's own Python that it runs, for every n."""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helpers.apart import Apart
from helpers.killing_scenes import NAME, Record, path

import shmacc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from helpers.killing_scenes import Scene

_OWN_FILES: Final = str(Path(shmacc.__file__).parent) + os.sep


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
    """Run process after process, each killed one line further on, until one comes through.

    Yields:
        The number of the line, when the process is gone.
    """
    for line in count(1):
        died = dies(line, prepare, operate)
        yield line
        if not died:
            return


def at_every_line(scene: Scene, record: Record) -> None:
    """Hold the scene's operation to being all or nothing; record how many lines there were."""
    image = scene.prepare()
    before, after = scene.testimony(image), scene.testimony(scene.perform())

    def attach() -> Any:
        image.write(path())
        return scene.begin(shmacc.attach(NAME))

    done, line = False, 0
    for line in deaths(attach, scene.operation):
        testimony = scene.testify()
        done = done or testimony == after
        assert testimony == (after if done else before), f"torn before line {line}"
    assert done
    record("lines", line)


def _perform(prepare: Callable[[], Any], operate: Callable[[Any], object], last: int) -> bool:
    prepared = prepare()
    left = last

    def count_line(_: FrameType, event: str, __: object) -> Callable[..., Any]:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return count_line

    def enter(frame: FrameType, _: str, __: object) -> Callable[..., Any] | None:
        return count_line if frame.f_code.co_filename.startswith(_OWN_FILES) else None

    sys.settrace(enter)
    try:
        operate(prepared)
    finally:
        sys.settrace(None)
    return left > 0
