"""Notes accumulators whose rounds cannot update any parameters.

The parameters that an accumulator belongs to are gone, or they are past the step of its round. An
accumulator knows its parameters once a round has updated them. Until then, parameters that one of
its processes has attached are taken for its own. That is a guess, so this is only a note.
"""

import contextlib
from collections.abc import Iterable, Iterator

from shmacc._gradients.handlers import pass_on
from shmacc._layout import layout
from shmacc._layout.names import SegmentName
from shmacc.errors import NotFoundError, ShmaccError
from shmacc.inspection._description import Description, describe
from shmacc.inspection._findings import Finding, note
from shmacc.inspection._listing import list_names, open_view
from shmacc.inspection._processes import Look

_REMEDY = 'load a checkpoint into both, or begin both anew (if_exists="replace")'


def findings(segments: Iterable[SegmentName]) -> Iterator[Finding]:
    """Yield a note for each of these accumulators whose rounds no parameters take."""
    look, parameters = Look(), None
    unread: set[str | None] = set()
    for name in segments:
        kind, belongs_to = _kind(name)
        if kind in {None, *layout.ARRAYS}:
            continue
        if parameters is None:
            parameters, unread = _parameters(look)
        with contextlib.suppress(ShmaccError):  # it is gone
            seen = describe(name.system_name, look)
            all_read = name.namespace not in unread
            yield from _of(seen, belongs_to, parameters, all_read=all_read)


def _parameters(look: Look) -> tuple[list[Description], set[str | None]]:
    """Return all parameters, and the namespaces of segments that could not be read."""
    found, unread = [], set()
    for name in list_names():
        try:
            with open_view(name) as view:
                kind = view.config()["kind"]
            if kind == layout.KINDS["parameters"]:
                found.append(describe(name.system_name, look))
        except NotFoundError:
            pass
        except ShmaccError as error:
            pass_on(error)
            unread.add(name.namespace)
    return found, unread


def _kind(name: SegmentName) -> tuple[int | None, int]:
    """Return the kind, and the token of the parameters that it belongs to; 0: not known."""
    with contextlib.suppress(ShmaccError), open_view(name) as view:
        return view.config()["kind"], view.state()["belongs_to"]
    return None, 0


def _of(
    accumulator: Description, belongs_to: int, parameters: list[Description], *, all_read: bool
) -> Iterator[Finding]:
    name, users = accumulator.summary.name, _users(accumulator)
    step = accumulator.summary.global_step or 0
    beside = [
        each
        for each in parameters
        if each.summary.name.namespace == name.namespace and users & _users(each)
    ]
    own = [each for each in parameters if each.token == belongs_to]
    if belongs_to and not own and all_read and (beside or not users):
        yield note(
            name.system_name,
            "of_other_parameters",
            f"its rounds, of step {step}, belong to parameters that were removed or replaced: "
            "others refuse them",
            _REMEDY,
        )
    own = own or ([] if belongs_to else beside)
    past = [each for each in own if (each.summary.global_step or 0) - 1 > step]
    if accumulator.stats.finished or len(past) < len(own):
        return
    for each in past:
        yield note(
            name.system_name,
            "steps_apart",
            f"its round is of step {step}, and its parameters, {each.summary.name.shared_name!r}, "
            f"are of step {each.summary.global_step}, past it: they refuse each update by them",
            f"if its rounds are to update them, {_REMEDY}",
        )


def _users(seen: Description) -> set[tuple[int, bool]]:
    return {(each.pid, each.pid_is_here) for each in seen.processes if each.alive}
