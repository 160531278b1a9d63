"""Arrays in shared memory, by name: the parameters that gradients are computed from."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy.typing as npt

from shmacc import _core
from shmacc._gradients import arguments
from shmacc._gradients import array_specs as given
from shmacc._gradients.arguments import IfExists
from shmacc._gradients.spec import MemberSpec, Spec
from shmacc._layout import layout, names
from shmacc._layout.names import SegmentName
from shmacc._opening import exits, removal, segment
from shmacc._opening.segment import Owners
from shmacc.errors import DataLossError, FailedPreconditionError

_KIND = "arrays"


class SharedArrays(Mapping[str, npt.NDArray[Any]], exits.Owner):
    """NumPy arrays in shared memory under a name, for processes that need not be related.

    A mapping from name to array. ``params["emb"]`` *is* the shared memory: what one process writes
    into it, ``params["emb"][rows] -= step``, the others read at once, and nothing is copied. Names,
    shapes and dtypes do not change.

    No lock is taken. Arrays that are written only in the block of an accumulator's ``round`` are
    not written while a gradient that counts is computed from them. A process that is killed while
    it writes leaves what it has written.

    An array keeps its memory mapped for as long as it, or a view of it, lives: also after `close`
    and `unlink`. It also keeps this object, and so the process attached, unless `close` is called:
    ``shmacc-inspect clean`` removes no segment that a process has attached. Forked children share
    the arrays of their parent.

    Use as a context manager to close at the end of the block; one that is collected unclosed is
    closed with a ResourceWarning. Pickles: another process that unpickles it attaches to the same
    arrays, with the same right to write.
    """

    __slots__ = (
        "__weakref__",
        "_finalizer",
        "_handle",
        "_mapped",
        "_numbers",
        "_owners",
        "_segment_name",
        "_shared_name",
        "_writable",
    )

    def __init__(
        self,
        contents: Mapping[str, Any],
        shared_name: str | None = None,
        *,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
    ) -> None:
        """Create the arrays, or attach to those that have this shared_name, to read and write.

        New arrays are complete before they have a name: another process finds all of them with
        their contents, or nothing, and a process that dies while it creates them leaves nothing. Of
        two processes that create at the same time, one succeeds and the other one attaches; until
        then both need the memory. Where it is short, let one create, and the others
        ``SharedArrays.attach(name, timeout=...)``.

        Args:
            contents: From name (1 to 200 printable characters) to an array, which is the contents
                of a new one, copied; or to a `TensorSpec` without unknown dimensions, of which only
                shape and dtype matter: it starts as zeros. 1 to 4,096 of them, each of at most
                ``2**40`` bytes. The dtypes are those of accumulators, and bool; an array of another
                byte order gets the machine's. If the arrays exist, they stay as they are, and
                names, shapes and dtypes must agree; their order does not matter.
            shared_name: The name; None: private, removed with this object.
            mode: Permission bits, exact whatever the umask. None: 0600, or as existing ones have
                them. To attach, even to read, a user needs the rights to read and to write.
            owners: Whose arrays may be attached: "mine" (this process's effective user's and
                root's), "any", or an iterable of uids.
            if_exists: "attach"; "error": raise if the name is taken; "replace": remove what no
                living process has attached.
            unlink_on_close: Whether the name is removed when its creator closes this object or ends
                in order.

        Raises:
            InvalidArgumentError: A bad argument; or existing arrays disagree (the message names the
                first that does, and both values); or the name is an accumulator's.
            AlreadyExistsError: The name is taken, and `if_exists` is "error".
            FailedPreconditionError: A living process has it attached (``pids``), possibly this one,
                and `if_exists` is "replace".
            ResourceExhaustedError: Shared memory is full; nothing of the arrays was kept.
            PermissionDeniedError: They are another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        asked = given.asked(contents)
        private = not shared_name and not isinstance(shared_name, bytes)
        spec = Spec(
            kind=_KIND,
            members=tuple(array.spec for array in asked),
            reduction=given.REDUCTION,
            lanes=None,
            capacity=None,
            mode=arguments.mode_bits(mode),
            private=private,
        )
        segment_name = names.segment_name(names.generated_name() if private else shared_name)
        whose = segment.check_owners(owners)
        handle = segment.open_or_create(
            segment_name,
            spec,
            whose,
            arguments.if_exists(if_exists),
            unlink_on_close=bool(unlink_on_close),
            contents=lambda: [array.contents() for array in asked],
        )
        existing = self._adopt(handle, segment_name, whose, writable=True)
        try:
            self._check_agreement(existing, spec)
        except BaseException:
            self.close()
            raise
        self.opened_by_user()

    @classmethod
    def attach(
        cls,
        shared_name: str,
        *,
        writable: bool = False,
        timeout: float | None = None,
        owners: Owners = "mine",
    ) -> Self:
        """Return the arrays of that name.

        Args:
            shared_name: The name.
            writable: Whether this process may write into them. If not, their memory is mapped
                read-only: no flag of an array changes that.
            timeout: For how many seconds to wait until they exist; None: not at all.
            owners: As at construction.

        Raises:
            NotFoundError: There are none, and no timeout.
            DeadlineExceededError: There were none until the end of the timeout.
            InvalidArgumentError: No possible name, a bad timeout, or the name is an accumulator's.
            PermissionDeniedError: They are another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        segment_name, whose = names.segment_name(shared_name), segment.check_owners(owners)
        handle = segment.attach(segment_name, whose, arguments.attach_timeout(timeout))
        self = cls.of_handle(handle, segment_name, whose, writable=bool(writable))
        self.opened_by_user()
        return self

    @classmethod
    def of_name(cls, segment_name: SegmentName, owners: Owners, writable: bool) -> Self:
        """Attach to the segment of that name; called by unpickling; errors as for `attach`."""
        handle = segment.attach(segment_name, owners)
        return cls.of_handle(handle, segment_name, owners, writable=writable)

    @classmethod
    def of_handle(
        cls, handle: _core.Handle, segment_name: SegmentName, owners: Owners, *, writable: bool
    ) -> Self:
        """Return the arrays that this handle is attached to.

        Raises:
            InvalidArgumentError: It is attached to an accumulator.
            DataLossError: An array's dtype or shape is not known, or does not fit the segment.
        """
        self = cls.__new__(cls)
        self._adopt(handle, segment_name, owners, writable=writable)
        return self

    def _adopt(
        self, handle: _core.Handle, segment_name: SegmentName, owners: Owners, *, writable: bool
    ) -> tuple[MemberSpec, ...]:
        """Return what there is."""
        self._handle = handle
        self._segment_name = segment_name
        self._owners = owners
        self._writable = writable
        self._finalizer = exits.close_with(self, handle)
        try:
            config = handle.config()
            _check_kind(segment_name, layout.KIND_NAMES[config["kind"]])
            existing = tuple(map(given.of_config, config["members"]))
            self._shared_name: str = config["name"]
            self._numbers = {member.name: number for number, member in enumerate(existing)}
            self._mapped = _core.MappedArrays(
                handle, [member.dtype.numpy for member in existing], writable
            )
        except DataLossError as error:
            self._finalizer()
            raise error.about(segment_name.system_name) from None
        except BaseException:
            self._finalizer()
            raise
        return existing

    def _check_agreement(self, existing: tuple[MemberSpec, ...], asked: Spec) -> None:
        has = {member.name: member for member in existing}
        wants = {member.name: member for member in asked.members}
        differences = [
            difference
            for name in wants | has
            for difference in given.differences(name, has.get(name), wants.get(name))
        ]
        mode = self._handle.mode
        if asked.mode not in {None, mode}:
            differences.append(("mode", f"{mode:04o}", f"{asked.mode:04o}"))
        for what, found, wanted in differences:
            raise segment.disagreement(
                self._segment_name,
                f"The shared arrays {self._shared_name!r} exist",
                what,
                found,
                wanted,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the segment's whole system name; unpickling attaches (NotFoundError)."""
        self._check_open()
        return type(self).of_name, (self._segment_name, self._owners, self._writable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = len(self._numbers)
        return (
            f"<{type(self).__name__} {self._shared_name!r} of {count} "
            f"array{'' if count == 1 else 's'}{'' if self._writable else ' read-only'}"
            f"{' closed' if self._handle.closed else ''}>"
        )

    # Two objects with the same arrays are two objects: to compare contents is the caller's.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return the array of that name: the shared memory itself, as an ndarray.

        It is another ndarray each time, of the same memory, for a few microseconds; the first time
        takes longer, as the memory is mapped.

        Raises:
            KeyError: There is none of that name.
            FailedPreconditionError: This object is closed.
            NotFoundError: The segment was removed by another program.
            ResourceExhaustedError: The process has no room for the mapping.
        """
        number = self._numbers[name]
        self._check_open()
        return self._mapped.array(number, self)

    def __setitem__(self, name: str, value: Any) -> None:
        """Write numbers into the array of that name, as ``self[name][...] = value`` does.

        So ``params["emb"] -= step`` works, which Python ends by an assignment; NumPy recognises an
        array that is assigned to itself, and copies nothing.

        Raises:
            ValueError: It is read-only, or the value does not have its shape.
            Everything else as for reading.
        """
        self[name][...] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def shared_name(self) -> str:
        """The name that processes share; of private arrays, their generated name."""
        return self._shared_name

    @property
    def name(self) -> str:
        """The same."""
        return self._shared_name

    @property
    def writable(self) -> bool:
        """Whether arrays that are got from here can be written."""
        return self._writable

    def close(self) -> None:
        """Detach. Idempotent. Arrays that were got before stay as they are."""
        self._mapped.forget()
        self._close()

    def unlink(self) -> None:
        """Remove the arrays' name from the system. Idempotent.

        Processes that have them go on using them, as with an unlinked file; the memory is free when
        the last one has let go of it. The next one that opens the name makes new arrays.

        Raises:
            PermissionDeniedError: They are another user's.
            FailedPreconditionError: This object is closed.
        """
        self._check_open()
        removal.unlink(self._segment_name, self._handle)

    def _check_open(self) -> None:
        if self._handle.closed:
            raise FailedPreconditionError(f"The shared arrays {self._shared_name!r} are closed")


def _check_kind(name: SegmentName, kind: str) -> None:
    if kind != _KIND:
        what = f"{name.shared_name!r} is the name of an accumulator"
        raise segment.disagreement(name, what, "kind", kind, _KIND)
