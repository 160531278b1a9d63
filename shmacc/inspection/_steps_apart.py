"""Notes parameters that are past the rounds of the accumulator beside them: no update gets in.

Which of them belong together is written nowhere. A process that has both attached uses them
together, though not always for updates; so this is a note, and none where other parameters fit.
"""

import contextlib
from collections.abc import Iterable, Iterator

from shmacc._layout import layout
from shmacc._layout.names import SegmentName
from shmacc.errors import ShmaccError
from shmacc.inspection._description import Description, describe
from shmacc.inspection._findings import Finding, note
from shmacc.inspection._listing import list_names, open_view
from shmacc.inspection._processes import Look


def findings(segments: Iterable[SegmentName]) -> Iterator[Finding]:
    """Yield a note for each accumulator whose rounds the parameters beside it do not take.

    Args:
        segments: The accumulators that are meant; others are left out.
    """
    by_namespace: dict[str | None, list[Description]] = {}
    look = Look()
    for name in segments:
        if _kind(name) in {None, *layout.ARRAYS}:
            continue
        if name.namespace not in by_namespace:
            by_namespace[name.namespace] = list(_parameters(name.namespace, look))
        if by_namespace[name.namespace]:
            with contextlib.suppress(ShmaccError):  # it is gone
                yield from _beside(describe(name.system_name, look), by_namespace[name.namespace])


def _parameters(namespace: str | None, look: Look) -> Iterator[Description]:
    for name in list_names():
        if name.namespace == namespace and _kind(name) == layout.KINDS["parameters"]:
            with contextlib.suppress(ShmaccError):
                yield describe(name.system_name, look)


def _kind(name: SegmentName) -> int | None:
    with contextlib.suppress(ShmaccError), open_view(name) as view:
        return view.config()["kind"]
    return None


def _beside(accumulator: Description, parameters: list[Description]) -> Iterator[Finding]:
    step = accumulator.summary.global_step or 0
    users = _users(accumulator)
    beside = [each for each in parameters if users & _users(each)]
    past = [each for each in beside if (each.summary.global_step or 0) - 1 > step]
    if accumulator.stats.finished or not past or len(past) < len(beside):
        return
    name = accumulator.summary.name.system_name
    for each in past:
        yield note(
            name,
            "steps_apart",
            f"its round is of step {step}, and the parameters {each.summary.name.shared_name!r}, "
            f"which the same processes use, are of step {each.summary.global_step}, past it: they "
            "refuse each update by its rounds",
            "if its rounds are to update them, load a checkpoint into both, or begin both anew "
            '(if_exists="replace")',
        )


def _users(seen: Description) -> set[tuple[int, bool]]:
    return {(each.pid, each.pid_is_here) for each in seen.processes if each.alive}
