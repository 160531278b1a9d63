"""Arrays in shared memory, by name, such as the parameters that gradients are computed from."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy.typing as npt

from shmacc import _core
from shmacc._base.reports import MemberConfig
from shmacc._parameters import members
from shmacc._parameters.new_arrays import NewMember, new_members
from shmacc._segment.opened import Opened
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._segment.spec import MemberSpec, Spec
from shmacc._values import arrays
from shmacc.errors import FailedPreconditionError, InvalidArgumentError

_MOST_SHOWN = 8  # arrays that repr() lists


class SharedArrays(Mapping[str, npt.NDArray[Any]], Opened):
    """NumPy arrays in shared memory under a name, for processes that need not be related.

    A mapping from name to array. ``params["emb"]`` *is* the shared memory. If one process writes
    into it, ``params["emb"][rows] -= step``, the others read the new numbers at once, without a
    copy. Names, shapes and dtypes do not change.

    No lock is taken. If arrays are written only in the block of an accumulator's ``round``, then
    gradients that are computed during a write are dropped. A process that is killed while it writes
    leaves a partial write.

    An array keeps its memory mapped as long as the array or a view of it lives, even after `close`
    and `unlink`. It also keeps this object alive, and so the process attached, until `close`;
    ``shmacc-inspect clean`` removes no segment that a process has attached. Forked children share
    the arrays of their parent.

    Use as a context manager to close at the end of the block; an object that is collected unclosed
    is closed with a ResourceWarning. Pickles: another process that unpickles it attaches to the
    same arrays, with the same right to write.
    """

    __slots__ = ("_mapped", "_numbers", "_specs", "_writable")

    _KIND = "arrays"
    _NOUN: ClassVar[str] = "shared arrays"
    _COPY = "{name: array.copy() for name, array in arrays.items()} has copies of the arrays"

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
        """Create the arrays, or attach to the arrays of this shared_name, to read and write.

        New arrays get their name when they are complete: another process finds all of them with
        their contents, or nothing, and a process that dies while it creates them leaves nothing. If
        two processes create them at the same time, one succeeds, and the other attaches; until then
        both use the memory. If memory is short, let one process create them, and the others call
        ``SharedArrays.attach(name, timeout=...)``.

        Args:
            contents: A mapping from name (1 to 200 printable characters) to an array, which is
                copied into the new array; or to a `TensorSpec` without unknown dimensions, which
                makes an array of zeros. There may be 1 to 4,096 arrays, each of at most ``2**40``
                bytes. The dtypes are those of accumulators, and bool. An array of another byte
                order is converted to the machine's. Existing arrays stay as they are, and their
                names, shapes and dtypes must agree; the order does not matter.
            shared_name: The name; None: private, removed with this object.
            mode: Permission bits, exact whatever the umask. None: 0600, or the mode of existing
                arrays. To attach, even to read, a user needs the rights to read and to write.
            owners: Whose arrays may be attached: "mine" (this process's effective user's and
                root's), "any", or an iterable of uids.
            if_exists: "attach"; "error": raise if the name is taken; "replace": remove existing
                arrays that no living process has attached, and create new ones.
            unlink_on_close: Whether the name is removed when its creator closes this object or ends
                in order.

        Raises:
            InvalidArgumentError: A bad argument; or existing arrays disagree (the message names the
                first difference, and both values); or the name is an accumulator's.
            AlreadyExistsError: The name is taken, and `if_exists` is "error".
            FailedPreconditionError: A living process, possibly this one, has the existing arrays
                attached (``pids``), and `if_exists` is "replace".
            ResourceExhaustedError: Shared memory is full; nothing of the arrays was kept.
            PermissionDeniedError: The existing arrays are another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        new = new_members(contents)
        _refuse_tables(new)
        self._open(
            tuple(array.spec for array in new),
            shared_name,
            Options(mode=mode, owners=owners, if_exists=if_exists, unlink_on_close=unlink_on_close),
            own=True,
            contents=lambda: [[array.contents()] for array in new],
        )

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
                read-only, whatever flags NumPy's arrays have. A write that NumPy does not refuse,
                such as one by torch, is undone and raises FailedPreconditionError in the main
                thread, at the end of the next call. If it cannot be undone, the error says so, and
                each later use of this object raises it again. SHMACC_GUARD=0 in the environment
                leaves such a write to the kernel, which ends the process.
            timeout: How many seconds to wait until the arrays exist; None: do not wait. (In every
                other call, None means to wait for ever.)
            owners: The same as in the constructor.

        Raises:
            NotFoundError: There are no arrays of that name, and no timeout.
            DeadlineExceededError: The timeout passed, and there were still no such arrays.
            InvalidArgumentError: An impossible name, a bad timeout, or the name of an accumulator;
                or the name of `Parameters`, which only updates change, and `writable` is set.
            PermissionDeniedError: The arrays are another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        return cls._attach(shared_name, owners, timeout, bool(writable))

    def _can_be(self, kind: str, own: bool | None, asked: Spec[Any] | None) -> bool:
        as_arrays = kind == "parameters" and asked is None and not own  # attach, not `writable`
        return kind == self._KIND or as_arrays

    def _member_of_config(self, _: int, config: MemberConfig) -> MemberSpec:
        return members.of_config(config)

    def _map(self, existing: Spec[Any], own: bool | None) -> None:
        self._writable = bool(own)
        self._specs: tuple[MemberSpec, ...] = existing.members
        self._check_tables()
        self._mapped = _core.MappedArrays(
            self._handle, [spec.dtype.numpy for spec in self._specs], self._writable
        )

    def _examine(self, existing: Spec[Any], _: bool | None) -> None:
        self._numbers = {spec.name: n for n, spec in enumerate(existing.members)}

    def _check_tables(self) -> None:
        """Raise InvalidArgumentError if there are tables, which are not arrays."""
        for spec in self._specs:
            if spec.kind == "table":
                raise InvalidArgumentError(
                    f"{self._segment_name.shared_name!r} has a table, {spec.name!r}, which is no "
                    "shared array: shmacc.Parameters.attach"
                )

    def _own(self) -> bool:
        return self._writable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the segment's name; unpickling attaches, or raises NotFoundError."""
        self._check_open()
        return super().__reduce__()

    def __repr__(self) -> str:
        count = len(self._specs)
        shown = [
            f"{spec.name}: {'table of ' if spec.kind == 'table' else ''}{spec.dtype.name} "
            f"{spec.shape}"
            for spec in self._specs
        ]
        if count > _MOST_SHOWN:
            shown[_MOST_SHOWN:] = [f"and {count - _MOST_SHOWN} more"]
        return (
            f"<{type(self).__name__} {self._shared_name!r} of {count} "
            f"array{'' if count == 1 else 's'}{'' if self._writable else ' read-only'}"
            f"{' closed' if self._handle.closed else ''}: {', '.join(shown)}>"
        )

    # Compare identity. Mapping's `__eq__` would compare the contents of whole arrays.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return the array of that name: the shared memory itself, as an ndarray.

        Each access makes another ndarray on the same memory, which takes a few microseconds; the
        first access takes longer, as it maps the memory.

        Raises:
            KeyError: There is no array of that name.
            FailedPreconditionError: This object is closed.
            NotFoundError: The segment was removed by another program.
            ResourceExhaustedError: The process has no room for the mapping.
        """
        number = self._numbers[name]
        self._check_open()
        return self._mapped.array(number, self)

    def __setitem__(self, name: str, value: Any) -> None:
        """Write numbers into the array of that name, as ``self[name][...] = value`` does.

        So ``params["emb"] -= step`` works: Python completes it by this assignment. NumPy recognises
        an array that is assigned to itself, and copies nothing. Unlike NumPy's own assignment, this
        refuses numbers that the array's dtype cannot represent, as an apply does.

        Raises:
            InvalidArgumentError: The value does not convert to the dtype.
            ValueError: The array is read-only, or the value does not have its shape.
            All other errors are those of reading.
        """
        array, dtype = self[name], self._specs[self._numbers[name]].dtype
        # NumPy's own assignment would round, wrap or drop silently.
        array[...] = arrays.converted(value, dtype, f"the numbers for array {name!r}").view(
            array.dtype
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def name(self) -> str:
        """The same as `shared_name`."""
        return self._shared_name

    @property
    def writable(self) -> bool:
        """Whether this process can write to the arrays."""
        return self._writable

    def _release(self, *, at_once: bool) -> None:
        """Let this process write to its read-only arrays: they become private copies.

        Args:
            at_once: Whether to copy now, since no other process writes to them any more. If not,
                the first write to any array makes all arrays private.
        """
        self._mapped.release(at_once)

    def close(self) -> None:
        """Detach. Idempotent. Arrays that were read before remain valid."""
        self._mapped.forget()
        super().close()

    def unlink(self) -> None:
        """Remove the arrays' name from the system. Idempotent.

        Processes that have the arrays go on using them, as with an unlinked file. The memory is
        freed when no process has it any more. The next process that opens the name makes new
        arrays. This also works after `close`, if the name still leads to these very arrays.

        Raises:
            PermissionDeniedError: The arrays are another user's.
        """
        super().unlink()

    def _check_open(self) -> None:
        if self._handle.closed:
            raise FailedPreconditionError(f"The {self._NOUN} {self._shared_name!r} are closed")


def _refuse_tables(new: tuple[NewMember, ...]) -> None:
    for each in new:
        if each.table is not None:
            raise InvalidArgumentError(
                f"A table, {each.spec.name!r}, is no shared array: shmacc.Parameters have tables"
            )
