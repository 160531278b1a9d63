"""A process that stands in the middle of a load of parameters and their group."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from helpers.stepping_tracer import Traced, on_one_core

import shmacc
from shmacc import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from helpers.stepping_tracer import Mark

    from shmacc import Parameters


def loading(path: Path, attach: Callable[[], dict[str, Any]]) -> Callable[[Mark], None]:
    """What a loader does that marks the beginning and the end of the extension's call."""
    real = _core.load

    def load(mark: Mark) -> None:
        def marked(*args: Any) -> None:
            mark()
            real(*args)
            mark()

        what = attach()
        _core.load = marked  # type: ignore[assignment]
        shmacc.load(path, what)
        for one in what.values():
            one.close()

    return load


@contextmanager
def half_loaded(params: Parameters, load: Callable[[Mark], None]) -> Iterator[Traced]:
    """The loader, stopped after the parameters were marked as being loaded."""
    with on_one_core(), Traced(load) as child:
        child.run_to_mark()
        while not params._half_loaded:
            child.step()
        yield child
