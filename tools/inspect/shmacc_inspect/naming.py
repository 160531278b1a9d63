"""The names of segments as users type and see them: every name that is shown can be typed."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Final, TypeVar

from shmacc import inspection
from shmacc.errors import InvalidArgumentError, NotFoundError
from shmacc_inspect import NAMESPACE_VARIABLE, formatting
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shmacc.inspection import SegmentName, Summary

Answer = TypeVar("Answer")

_WORD: Final = re.compile(r"[\w.:/-]+")
_HINTS: Final = 5
_ALIKE: Final = 0.7  # names that are at least so similar are hints


def typed_name(name: SegmentName) -> str:
    """Return the name to type for a segment: its shared_name, RUN/NAME, or else its file's name.

    It is the first of these that leads to the segment. A shared_name does not lead to it if the
    segment is in another namespace, damaged or renamed, or if the name looks like that of a file in
    /dev/shm, a name in a run, an option, or a glob.
    """
    for text in (name.shared_name, inspection.in_run(name)):
        if text is not None and not text.startswith("-") and not _is_glob_always(text):
            with contextlib.suppress(InvalidArgumentError):
                if inspection.resolve(text).system_name == name.system_name:
                    return text
    return name.system_name


def word(name: SegmentName) -> str:
    """Return the name to type as one word that neither a shell nor `xargs` changes."""
    typed = typed_name(name)
    return typed if _WORD.fullmatch(typed) else name.system_name


def cell(name: SegmentName, style: str = "bold") -> Cell:
    """Return a cell with the name to type: pasting it into a shell runs nothing."""
    return Cell(word(name), style)


def one(text: str) -> SegmentName | None:
    """Return the name that a text means; None: it is a glob, and may mean several segments.

    A text like `w[0]` is a name only if a segment has that name; if --namespace is a glob, this
    holds for any text. A text with `*` or `?` is always a glob, even if a segment has that name.

    Raises:
        InvalidArgumentError: The text cannot be a name.
    """
    if "[" not in text and not _is_glob_always(text) and not in_many:
        return inspection.resolve(text)
    if not _is_glob_always(text):
        with contextlib.suppress(InvalidArgumentError):
            name = inspection.resolve(text)
            return name if os.path.lexists(name.path) else None
    return None


def _is_glob_always(text: str) -> bool:
    return "*" in text or "?" in text


in_many = ""  # the value of --namespace, if it is a glob

_OF_GLOBS: Final = frozenset("*?[")


def choose(namespace: str | None) -> None:
    """Use this namespace, or all that this glob matches; None: the environment's namespace.

    Raises:
        InvalidArgumentError: The namespace is malformed.
    """
    global in_many  # noqa: PLW0603  one for the process, like the environment
    in_many = ""
    if namespace is not None and _OF_GLOBS.intersection(namespace):
        in_many = namespace
        os.environ.pop(NAMESPACE_VARIABLE, None)
    elif namespace is not None:
        os.environ[NAMESPACE_VARIABLE] = namespace
        inspection.resolve("any")


def scope(*, everywhere: bool) -> str | None:
    """Return the namespace, or glob for namespaces, in which globs look for segments; None: all.

    Raises:
        InvalidArgumentError: The namespace is malformed.
    """
    own = inspection.resolve("any").namespace  # which also verifies it
    return None if everywhere else in_many or own


def select(
    given: Sequence[str], *, everywhere: bool, missing_ok: bool = False
) -> list[SegmentName]:
    """Return the segments of these names and globs, each once; without names, all in the scope.

    Raises:
        NotFoundError: A name is not there, or is the name of a run, or nothing matches a glob.
        InvalidArgumentError: A text cannot be a name.
    """
    namespace = scope(everywhere=everywhere)
    found: dict[str, SegmentName] = {}
    for text in given or ["*"]:
        if (name := one(text)) is None:
            names = inspection.list_names(text, namespace=namespace)
        else:
            names = inspection.list_names(name.system_name)
        if not names and any(run.label == text for run in inspection.list_runs(namespace)):
            raise NotFoundError(f"{text} is a run: its segments are '{text}/*'")
        if given and not names and not missing_ok:
            raise NotFoundError(_not_there(text))
        found |= {name.system_name: name for name in names}
    return list(found.values())


def answers(
    given: Sequence[str],
    answer: Callable[[Summary], Answer],
    *,
    everywhere: bool,
    unfit: Callable[[Summary], str] = lambda _: "",
) -> Iterator[Answer]:
    """Yield a verb's answer for each segment of these names and globs.

    There is no answer for a segment that a glob has found, but that is gone by now.

    Raises:
        NotFoundError: A segment that was given by its name is gone; see `select_fit`, too.
        InvalidArgumentError: See `select_fit`.
    """
    named = _exact(given)
    for summary in select_fit(given, everywhere=everywhere, unfit=unfit):
        try:
            yield answer(summary)
        except NotFoundError:
            if summary.name.system_name in named:
                raise


def _exact(given: Iterable[str]) -> set[str]:
    """Return the system names of the given texts, except globs."""
    return {name.system_name for name in map(one, given) if name is not None}


def select_fit(
    given: Sequence[str], *, everywhere: bool, unfit: Callable[[Summary], str]
) -> list[Summary]:
    """Return the segments of these names and globs that a verb can handle.

    All segments are judged before the verb begins. `unfit` returns why the verb cannot handle a
    segment; empty: it can. An unfit segment is skipped if it was found by a glob.

    Raises:
        InvalidArgumentError: A segment that was given by its name is unfit, or all segments are.
        NotFoundError, InvalidArgumentError: See `select`, too.
    """
    named, found, refused = _exact(given), [], ""
    for summary in summaries(select(given, everywhere=everywhere)):
        why = unfit(summary)
        if not why:
            found.append(summary)
            continue
        refused = f"{summary.name.system_name}: {why}"
        if summary.name.system_name in named:
            raise InvalidArgumentError(refused)
    if refused and not found:
        raise InvalidArgumentError(refused)
    return found


def in_words(summary: Summary) -> str:
    """Return this kind of segments in words: "shared arrays"."""
    words = {"arrays": "shared arrays", "parameters": "parameters"}
    return words.get(summary.kind or "") or f"{summary.kind} accumulators"


def summaries(of: Iterable[SegmentName]) -> Iterator[Summary]:
    """Yield the summaries of the segments that are still there."""
    look = inspection.Look()
    for name in of:
        try:
            yield inspection.summarise(name, look)
        except NotFoundError:
            continue


def _not_there(text: str) -> str:
    if one(text) is None:
        return f"No segment matches {formatting.printable(text)!r}"
    hint = f"; there is {', '.join(alike)}" if (alike := _alike(text)) else ""
    return f"There is no segment named {formatting.printable(text)!r}{hint}"


def _alike(text: str) -> list[str]:
    from difflib import get_close_matches  # late: only a wrong name needs it

    own = os.environ.get("SHMACC_NAMESPACE", "")  # its names first
    names = sorted(
        inspection.list_names(), key=lambda name: not (name.namespace or "").startswith(own)
    )
    alike = get_close_matches(text, {name.shared_name for name in names}, _HINTS, _ALIKE)
    found = [word(name) for like in alike for name in names if name.shared_name == like]
    return found[:_HINTS]
