"""How names of accumulators become names in ``/dev/shm``, and back.

=====================================  ===================================================
``shmacc.NAME``                        a segment
``shmacc.NAMESPACE:NAME``              a segment made with ``SHMACC_NAMESPACE=NAMESPACE``
``sem.shmacc.[NAMESPACE:]NAME.TOKEN``  its semaphore; TOKEN (16 hexadecimal digits) is the
                                       segment's own, so that a new segment of an old name
                                       never meets an old semaphore
=====================================  ===================================================

Neither NAMESPACE nor NAME may have a colon, so the names parse unambiguously. The system's limit is
255 bytes. If namespace and name together would not fit, a hash replaces the tail; the segment
contains the whole name.
"""

import os
import re
from dataclasses import dataclass

from shmacc.errors import InvalidArgumentError

SHM_DIRECTORY = "/dev/shm"  # noqa: S108  where Linux keeps POSIX shared memory, not a temp file
NAMESPACE_VARIABLE = "SHMACC_NAMESPACE"
PREFIX = "shmacc."
SEMAPHORE_FILE_PREFIX = "sem."

_TOKEN_DIGITS = 16
_LONGEST_FILE_NAME = 255
_LONGEST_STEM = _LONGEST_FILE_NAME - len(SEMAPHORE_FILE_PREFIX) - len(PREFIX) - 1 - _TOKEN_DIGITS
_HASH_DIGITS = 16
_LONGEST_SHOWN = 250  # characters in a message: a name that is just too long is shown whole
_SHARED_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,60}", re.ASCII)
_SEGMENT_FILE = re.compile(r"shmacc\.(?:([A-Za-z0-9._-]+):)?([A-Za-z0-9._~-]+)", re.ASCII)
_SEMAPHORE_FILE = re.compile(r"sem\.(shmacc\.[A-Za-z0-9._~:-]+)\.([0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's name in ``/dev/shm``.

    Attributes:
        system_name: The file's name, which starts with ``shmacc.``.
        namespace: The value of ``SHMACC_NAMESPACE`` when the segment was made; None without one.
        shared_name: The accumulator's name (for a very long name: its head and a hash).
    """

    system_name: str
    namespace: str | None
    shared_name: str

    @property
    def path(self) -> str:
        """The segment's file."""
        return f"{SHM_DIRECTORY}/{self.system_name}"

    @property
    def is_cut(self) -> bool:
        """Whether `shared_name` is a head and a hash."""
        return "~" in self.shared_name


def current_namespace() -> str | None:
    """Return the namespace that the environment sets; None without one.

    Raises:
        InvalidArgumentError: ``SHMACC_NAMESPACE`` is malformed.
    """
    namespace = os.environ.get(NAMESPACE_VARIABLE)
    if not namespace:
        return None
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidArgumentError(
            f"{NAMESPACE_VARIABLE} must be 1 to 60 of letters, digits, '.', '_' and '-', "
            f"but was {shown(namespace)}"
        )
    return namespace


def shown(given: object) -> str:
    """Return text for a message that shows an invalid name; a long name is cut."""
    text = repr(given)
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def segment_name(shared_name: object) -> SegmentName:
    """Return the segment's name for an accumulator's name, in this process's namespace.

    Raises:
        InvalidArgumentError: The name is not a string of 1 to 200 allowed characters.
    """
    if not isinstance(shared_name, str) or not _SHARED_NAME.fullmatch(shared_name):
        raise InvalidArgumentError(
            "A shared_name must be a string of 1 to 200 letters, digits, '.', '_' and '-', "
            f"but was {shown(shared_name)}"
        )
    # In an f-string, an enum's name may be another text.
    return name_under(current_namespace(), str.__str__(shared_name))


def name_under(namespace: str | None, shared_name: str) -> SegmentName:
    """Return the segment's name for an accumulator's name in a namespace, both unchecked."""
    stem = f"{namespace}:{shared_name}" if namespace else shared_name
    if len(stem) > _LONGEST_STEM:
        import hashlib  # rarely needed, and slow to import

        digest = hashlib.blake2b(stem.encode(), digest_size=_HASH_DIGITS // 2).hexdigest()
        stem = f"{stem[: _LONGEST_STEM - _HASH_DIGITS - 1]}~{digest}"
    return SegmentName(PREFIX + stem, namespace, shared_name)


def generated_name() -> str:
    """Return a fresh name for a private accumulator, with this process's pid in it."""
    return f"private-{os.getpid()}-{os.urandom(8).hex()}"


def parse_segment_file(file_name: str) -> SegmentName | None:
    """Return the parts of a segment's file name; None if it is not one of this library's."""
    match = _SEGMENT_FILE.fullmatch(file_name)
    return SegmentName(file_name, match[1], match[2]) if match else None


def semaphore_name(system_name: str, token: int) -> str:
    """Return the POSIX name of a segment's semaphore."""
    return f"/{system_name}.{token:0{_TOKEN_DIGITS}x}"


def semaphore_file(system_name: str, token: int) -> str:
    """Return the name of a segment's semaphore in ``/dev/shm``."""
    return SEMAPHORE_FILE_PREFIX + semaphore_name(system_name, token)[1:]


def semaphore_path(system_name: str, token: int) -> str:
    return f"{SHM_DIRECTORY}/{semaphore_file(system_name, token)}"


def parse_semaphore_file(file_name: str) -> tuple[str, int] | None:
    """Return the segment's system name and token from a semaphore's file; None if not ours."""
    match = _SEMAPHORE_FILE.fullmatch(file_name)
    return (match[1], int(match[2], 16)) if match else None
