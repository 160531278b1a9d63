"""Resolves names, globs, and namespaces (with the runs started in them) to segments."""

import contextlib
import os
from collections.abc import Callable
from fnmatch import fnmatchcase

from shmacc._base import names
from shmacc._base.names import SegmentName
from shmacc._base.shown import shown
from shmacc._segment import removal, run_records
from shmacc.errors import InvalidArgumentError, ShmaccError

_SEMAPHORES = names.SEMAPHORE_FILE_PREFIX + names.PREFIX


def resolve(name: str) -> SegmentName:
    """Return the segment that a name means, whether it exists or not.

    A name that begins like a system name is always taken for a system name: else the same name
    could mean different segments at different times, and `remove` could remove the wrong one. So an
    accumulator whose shared_name begins like that can be named only by its system name. Likewise,
    ``RUN/NAME`` is a name in a run if there is such a run.

    Args:
        name: A shared_name in this process's namespace; ``RUN/NAME``, a shared_name in a run that
            was started there; or a file's name in /dev/shm.

    Raises:
        InvalidArgumentError: The text is none of these.
    """
    if name.startswith(names.PREFIX):
        whole = names.parse_segment_file(name)
        if whole is None:
            raise InvalidArgumentError(
                f"{shown(name)} is no possible name of a segment in /dev/shm"
            )
        return whole
    run, _, rest = name.partition("/")
    outer = names.current_namespace()
    # If the outer namespace is long, the run's has only a part of it, and `run` is the whole.
    for namespace in (f"{outer}.{run}" if outer else run, run):
        if rest and names.is_namespace(namespace) and _has_record(namespace):
            return names.name_under(namespace, names.segment_name(rest).written_name)
    return names.segment_name(name)


def _has_record(namespace: str) -> bool:
    return os.path.lexists(names.of_run(namespace).path)


def run_label(namespace: str) -> str:
    """Return a run's namespace, relative to this process's own namespace."""
    outer = names.current_namespace()
    return namespace.removeprefix(f"{outer}.") if outer else namespace


def in_run(name: SegmentName) -> str | None:
    """Return ``RUN/NAME``, as `resolve` takes it; None: the segment is in no run."""
    if name.namespace is None or not _has_record(name.namespace):
        return None
    return f"{run_label(name.namespace)}/{name.shared_name}"


def namespaces(namespace: str | None) -> Callable[[str | None], bool]:
    """Return a function that tells if a namespace is this one, or of a run that was started in it.

    Args:
        namespace: A namespace, or a glob for namespaces; None: all.
    """
    if namespace is None:
        return lambda _: True

    def is_asked(other: str | None) -> bool:
        return fnmatchcase(other or "", namespace)

    of_runs = {record.namespace for record in run_records.started_in(is_asked)}
    return lambda other: is_asked(other) or other in of_runs


def meant(pattern: str, namespace: str | None) -> Callable[[SegmentName, str], bool]:
    """Return a function that tells, by a segment's and a file's name, whether the file is meant.

    A pattern that begins like a system name matches system names only: a shared_name may look like
    another segment's system name. Other patterns match shared_names. They match ``RUN/NAME`` only
    if they have a slash, and file names only if they have a colon or begin like a semaphore's file
    name: else "s*" would mean every segment.
    """
    is_inside = namespaces(namespace)
    of_files = pattern.startswith(_SEMAPHORES) or ":" in pattern

    def is_meant(name: SegmentName, file_name: str) -> bool:
        if not is_inside(name.namespace):
            return False
        if pattern.startswith(names.PREFIX):
            return fnmatchcase(name.system_name, pattern)
        name = _intact(name)
        return (
            fnmatchcase(name.shared_name, pattern)
            or ("/" in pattern and fnmatchcase(in_run(name) or "", pattern))
            or (of_files and fnmatchcase(file_name, pattern))
        )

    return is_meant


def _intact(name: SegmentName) -> SegmentName:
    """Return the name; read the shared_name from the segment if the file's name is cut."""
    if not name.is_cut:
        return name
    with contextlib.suppress(ShmaccError), contextlib.closing(removal.view(name)) as view:
        return named_as(name, view.config()["name"])
    return name


def named_as(name: SegmentName, written_name: str) -> SegmentName:
    """Return the name with the shared_name that the segment holds, if that leads to this file.

    If the file was renamed, copied or linked, return the name of the file.
    """
    own = names.name_under(name.namespace, written_name)
    return own if own.system_name == name.system_name else name
