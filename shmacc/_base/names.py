"""How names of accumulators become names in ``/dev/shm``, and back.

=====================================  ===================================================
``shmacc.NAME``                        a segment
``shmacc.NAMESPACE:NAME``              a segment made with ``SHMACC_NAMESPACE=NAMESPACE``
``shmacc.NAMESPACE:%run``              the record of the run (`shmacc.run`) whose children have
                                       this namespace
``sem.shmacc.[NAMESPACE:]NAME.TOKEN``  a segment's semaphore; each segment has a TOKEN of its own
                                       (16 hexadecimal digits), so that a new segment of an old
                                       name never meets an old semaphore
=====================================  ===================================================

In NAME, ASCII letters, digits, ``.``, ``_`` and ``-`` are written as they are. Any other character
is written as its bytes of UTF-8, a colon as ``%3A``. Names and written forms are one-to-one: ``%``
is always written ``%25``, and hexadecimal digits are capitals. Except for a run's record, a file of
this library always has the written form of a name. So no user's name can be the name of a record.
The segment contains NAME in its written form, too.

Neither NAMESPACE nor a written NAME has a colon, so the names parse unambiguously. The system's
limit is 255 bytes. If namespace and name together would not fit, ``~`` and a hash replace the tail.
"""

import contextlib
import os
import re
from dataclasses import dataclass

from shmacc._base.shown import shown
from shmacc.errors import InvalidArgumentError

SHM_DIRECTORY = "/dev/shm"  # noqa: S108  where Linux keeps POSIX shared memory, not a temp file
NAMESPACE_VARIABLE = "SHMACC_NAMESPACE"
PREFIX = "shmacc."
SEMAPHORE_FILE_PREFIX = "sem."

_TOKEN_DIGITS = 16
_LONGEST_FILE_NAME = 255
_LONGEST_STEM = _LONGEST_FILE_NAME - len(SEMAPHORE_FILE_PREFIX) - len(PREFIX) - 1 - _TOKEN_DIGITS
_HASH_DIGITS = 16
_LONGEST_WRITTEN = 200  # layout.hpp: kMaxName
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_ESCAPE = re.compile(rb"%([0-9A-F]{2})")
LONGEST_NAMESPACE = 60
_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{LONGEST_NAMESPACE}}}", re.ASCII)
_SEGMENT_FILE = re.compile(
    r"shmacc\.(?:([A-Za-z0-9._-]+):)?([A-Za-z0-9._%-]+)(~[0-9a-f]{16})?", re.ASCII
)
_RUN = "%run"  # no name has this written form
_SEMAPHORE_FILE = re.compile(r"sem\.(shmacc\.[A-Za-z0-9._%~:-]+)\.([0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's name in ``/dev/shm``.

    Attributes:
        system_name: The file's name, which starts with ``shmacc.``.
        namespace: The value of ``SHMACC_NAMESPACE`` when the segment was made; None without one.
        shared_name: The accumulator's name; for a very long name, its head and a hash.
    """

    system_name: str
    namespace: str | None
    shared_name: str

    @property
    def path(self) -> str:
        """The segment's file."""
        return f"{SHM_DIRECTORY}/{self.system_name}"

    @property
    def is_of_run(self) -> bool:
        """Whether the segment is a run's record."""
        return self.system_name.endswith(f":{_RUN}")

    @property
    def written_name(self) -> str:
        """The name as the segment contains it."""
        return _RUN if self.is_of_run else written(self.shared_name)

    @property
    def is_cut(self) -> bool:
        """Whether `shared_name` is only a long name's head and a hash."""
        return "~" in self.system_name  # a name's own "~" is written %7E


def current_namespace() -> str | None:
    """Return the namespace that the environment sets; None without one.

    Raises:
        InvalidArgumentError: ``SHMACC_NAMESPACE`` is malformed.
    """
    namespace = os.environ.get(NAMESPACE_VARIABLE)
    return checked_namespace(namespace, NAMESPACE_VARIABLE) if namespace else None


def is_namespace(text: str) -> bool:
    """Return whether this text can be a namespace."""
    return _NAMESPACE.fullmatch(text) is not None


def checked_namespace(namespace: object, what: str) -> str:
    """Return a namespace that was given as `what`.

    Raises:
        InvalidArgumentError: The namespace is malformed.
    """
    if not isinstance(namespace, str) or not is_namespace(namespace):
        raise InvalidArgumentError(
            f"{what} must be 1 to {LONGEST_NAMESPACE} of letters, digits, '.', '_' and '-', "
            f"but was {shown(namespace)}"
        )
    return namespace


def written(shared_name: str) -> str:
    """Return a name as it is written in ``/dev/shm``.

    Raises:
        UnicodeEncodeError: The text has lone surrogates, which UTF-8 cannot encode.
    """
    return _OTHER_CHARACTERS.sub(
        lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), shared_name
    )


def given(written_name: str) -> str | None:
    """Return the name that has this written form; None if no name has it."""
    try:
        name = _ESCAPE.sub(
            lambda match: bytes.fromhex(match[1].decode()), written_name.encode()
        ).decode()
    except UnicodeError:
        return None
    return name if "\0" not in name and written(name) == written_name else None


def name_made_as(written_name: str) -> str:
    """Return the name that has this written form; if none has it (damage), return the text."""
    return given(written_name) or written_name


def segment_name(shared_name: object) -> SegmentName:
    """Return the segment's name for an accumulator's name, in this process's namespace.

    Raises:
        InvalidArgumentError: The name is no string, has NUL or a lone surrogate, or its written
            form does not have 1 to 200 characters.
    """
    text = ""
    if isinstance(shared_name, str) and "\0" not in shared_name:
        # str.__str__, since an f-string may show an enum's name differently.
        with contextlib.suppress(UnicodeEncodeError):
            text = written(str.__str__(shared_name))
    if not 1 <= len(text) <= _LONGEST_WRITTEN:
        raise InvalidArgumentError(
            f"A shared_name must be a string of 1 to {_LONGEST_WRITTEN} letters, digits, '.', '_' "
            "and '-'; any other character, but no NUL or lone surrogate, counts 3 for each byte of "
            f"its UTF-8; but was {shown(shared_name)}"
        )
    return name_under(current_namespace(), text)


def name_under(namespace: str | None, written_name: str) -> SegmentName:
    """Return the segment's name for a written name in a namespace. Nothing is checked."""
    stem = f"{namespace}:{written_name}" if namespace else written_name
    if len(stem) > _LONGEST_STEM:
        import hashlib  # rarely needed, and slow to import

        digest = hashlib.blake2b(stem.encode(), digest_size=_HASH_DIGITS // 2).hexdigest()
        head = stem[: _LONGEST_STEM - _HASH_DIGITS - 1]
        while given(head[head.rfind(":") + 1 :]) is None:  # the cut was within a character
            head = head[:-1]
        stem = f"{head}~{digest}"
    return SegmentName(PREFIX + stem, namespace, name_made_as(written_name))


def of_run(namespace: str) -> SegmentName:
    """Return the name of the record of the run whose children have this namespace."""
    return name_under(namespace, _RUN)


def generated_name() -> str:
    """Return a fresh name for a private accumulator, with this process's pid in it."""
    return f"private-{os.getpid()}-{os.urandom(8).hex()}"


def parse_segment_file(file_name: str) -> SegmentName | None:
    """Return the parts of a segment's file name; None if it is not a name of this library."""
    match = _SEGMENT_FILE.fullmatch(file_name)
    if match is None:
        return None
    if match[1] and match[2] == _RUN and not match[3]:
        return of_run(match[1])
    shared_name = given(match[2])
    if shared_name is None:
        return None
    return SegmentName(file_name, match[1], shared_name + (match[3] or ""))


def semaphore_name(system_name: str, token: int) -> str:
    """Return the POSIX name of a segment's semaphore."""
    return f"/{system_name}.{token:0{_TOKEN_DIGITS}x}"


def semaphore_file(system_name: str, token: int) -> str:
    """Return the name of a segment's semaphore in ``/dev/shm``."""
    return SEMAPHORE_FILE_PREFIX + semaphore_name(system_name, token)[1:]


def semaphore_path(system_name: str, token: int) -> str:
    return f"{SHM_DIRECTORY}/{semaphore_file(system_name, token)}"


def files_in(namespace: str | None) -> tuple[str, ...]:
    """Return the files of segments and semaphores in a namespace (None: anywhere), sorted.

    The files of runs that were started in it have the namespaces ``NAMESPACE.RUN``, and count too.
    """
    found = []
    for file_name in sorted(os.listdir(SHM_DIRECTORY)):
        semaphore = parse_semaphore_file(file_name)
        segment = semaphore[0] if semaphore else parse_segment_file(file_name)
        if segment is not None and (namespace is None or is_in(namespace, segment.namespace)):
            found.append(file_name)
    return tuple(found)


def is_in(outer: str, namespace: str | None) -> bool:
    """Return whether `namespace` is `outer`, or begins with `outer` and a dot."""
    return f"{namespace}.".startswith(f"{outer}.")


def parse_semaphore_file(file_name: str) -> tuple[SegmentName, int] | None:
    """Return the segment's name and token from a semaphore's file name; None for other files."""
    match = _SEMAPHORE_FILE.fullmatch(file_name)
    name = parse_segment_file(match[1]) if match else None
    return (name, int(match[2], 16)) if match and name else None
