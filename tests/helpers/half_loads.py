"""Stops a process in the middle of a load of parameters and their group."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from helpers.stepping_tracer import Mark, Traced, mark_call, on_one_core
from helpers.stepping_walk import LockView

import shmacc
from shmacc import Parameters, _core


def loading(path: Path, attach: Callable[[], dict[str, Any]]) -> Callable[[Mark], None]:
    """Return a function that loads the file, and marks the extension's `load` before and after."""

    def load(mark: Mark) -> None:
        what = attach()
        mark_call(_core, "load", mark)
        shmacc.load(path, what)
        for one in what.values():
            one.close()

    return load


@contextmanager
def half_loaded(params: Parameters, load: Callable[[Mark], None]) -> Iterator[Traced]:
    """Stop a loader as soon as it has marked the parameters as being loaded."""
    with on_one_core(), Traced(load) as child:
        child.run_to_mark()
        with closing(LockView(params.shared_name)) as lock:
            child.run_until(lock.held)
        while not params._half_loaded:
            child.step()
        yield child
