"""Objects that have a segment open: how they are created, attached, unpickled, closed, removed.

Every way of opening goes through `_adopt`. If anything fails from there on, the segment is closed.
A subclass may keep one more value, `own`, in the object and its pickles: accumulators keep their
label, shared arrays keep whether they are writable.
"""

import logging
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from shmacc import _core
from shmacc._base import layout, names
from shmacc._base.names import SegmentName, semaphore_path
from shmacc._base.reports import Config, MemberConfig
from shmacc._segment import exit_hooks, opening, removal
from shmacc._segment.opening import Contents
from shmacc._segment.options import Options, Owners, checked_owners
from shmacc._segment.owner import Owner
from shmacc._segment.spec import NOT_REDUCED, MemberSpec, Spec, differences
from shmacc._values import arguments
from shmacc.errors import DataLossError, InvalidArgumentError

_logger = logging.getLogger("shmacc")
_Opened = TypeVar("_Opened", bound="Opened")


class Opened(Owner):
    """The common base of accumulators and shared arrays."""

    __slots__ = (
        "__weakref__", "_finalizer", "_handle", "_owners", "_segment_name", "_shared_name",
        "_token",
    )  # fmt: skip

    _KIND: ClassVar[str]
    _COPY: ClassVar[str]
    """How to get a copy of the segment's contents, for a message."""

    def _open(
        self,
        members: tuple[MemberSpec, ...],
        shared_name: str | None,
        options: Options,
        own: Any,
        *,
        reduction: str = NOT_REDUCED,
        contents: Contents = list,
    ) -> None:
        """Create the segment or attach to it: the common part of all constructors."""
        private = shared_name is None or (isinstance(shared_name, str) and not shared_name)
        asked = Spec(
            kind=self._KIND,
            members=members,
            reduction=reduction,
            lanes=options.lanes,
            capacity=options.capacity,
            mode=options.mode,
            private=private,
        )
        segment_name = names.segment_name(names.generated_name() if private else shared_name)
        handle = opening.open_or_create(segment_name, asked, options, contents)
        self._adopt(handle, segment_name, options.owners, own, asked)
        if options.unlink_on_close:
            # Only after `_adopt`: a segment that `_adopt` refuses as different must keep its name.
            try:
                semaphore = semaphore_path(segment_name.system_name, self._token)
                handle.keep_names(segment_name.path, semaphore, options.inherits)
            except BaseException:
                self._close()
                raise
        self._opened_by_user()

    @classmethod
    def _attach(cls, shared_name: object, owners: object, timeout: object, own: Any = None) -> Self:
        """Attach to the segment of that name: the common part of all `attach` methods."""
        segment_name, whose = names.segment_name(shared_name), checked_owners(owners)
        handle = opening.attach(segment_name, whose, arguments.attach_timeout(timeout))
        return of_handle(cls, handle, segment_name, whose, own)

    def _adopt(
        self,
        handle: _core.Handle,
        segment_name: SegmentName,
        owners: Owners,
        own: Any,
        asked: Spec[Any] | None,
    ) -> None:
        # From here on the object owns the handle: any failure below must close it.
        self._handle = handle
        self._segment_name = segment_name
        self._owners = owners
        self._finalizer = exit_hooks.close_with(self, handle)
        try:
            config = handle.config()
            self._shared_name = names.name_made_as(config["name"])
            self._token: int = config["token"]
            try:
                self._examine(self._existing(config, own, asked), own)
            except DataLossError as error:
                raise error.about(segment_name.system_name) from None
            if asked is not None:
                self._check_asked(asked)
            self._log_what_is_there(config)
        except BaseException:
            self._close()
            raise

    def _log_what_is_there(self, config: Config) -> None:
        """Log that a segment has been used before: an earlier run may have left it."""
        if not _logger.isEnabledFor(logging.INFO):
            return
        step, gradients = self._handle.step, self._handle.count
        if step > 0 or gradients > 0:
            made = datetime.fromtimestamp(config["created_ns"] / 1e9, UTC)
            _logger.info(
                "Attached to %r, made by uid %d at %s: its step is %d, gradients pending: %d",
                self._shared_name,
                self._handle.owner,
                made.isoformat(" ", "seconds"),
                step,
                gradients,
            )

    def _existing(self, config: Config, own: Any, asked: Spec[Any] | None) -> Spec[Any]:
        """Return the spec of the segment; InvalidArgumentError if it differs from `asked`."""
        kind = layout.KIND_NAMES[config["kind"]]
        if not self._can_be(kind, own, asked):
            constructed = asked is not None
            raise opening.wrong_kind(self._segment_name, kind, self._KIND, constructed=constructed)
        existing = Spec.of_config(config, self._handle.mode, self._member_of_config)
        self._map(existing, own)  # before `differences`: damage may look like a difference
        for what, has, wants in differences(existing, asked) if asked is not None else ():
            exists = f"{self._shared_name!r} exists"
            raise opening.differs(self._segment_name, exists, what, has, wants)
        return existing

    def _can_be(self, kind: str, own: Any, asked: Spec[Any] | None) -> bool:  # noqa: ARG002
        """Return whether an object of this class can open a segment of this kind."""
        return kind == self._KIND

    def _member_of_config(self, number: int, config: MemberConfig) -> MemberSpec:
        """Return the spec of a member; DataLossError if it has unknown values."""
        raise NotImplementedError

    def _map(self, existing: Spec[Any], own: Any) -> None:
        """Map memory that the object reads directly; DataLossError unless it fits the file."""

    def _examine(self, existing: Spec[Any], own: Any) -> None:
        """Keep what the object needs from the segment.

        Args:
            existing: The segment's spec.
            own: What only this object has, such as its label; None: the default.
        """
        raise NotImplementedError

    def _check_asked(self, asked: Spec[Any]) -> None:
        """Check what the comparison of the specs leaves out; by default nothing."""

    def _own(self) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the segment's name; unpickling attaches, or raises NotFoundError."""
        self._handle.config()  # a closed handle does not pickle
        known = self._token, *self._handle.known_steps()
        return _unpickled, (type(self), self._segment_name, self._owners, self._own(), known)

    def __deepcopy__(self, memo: object) -> Self:
        """Refuse a deep copy, which would share its memory with the original.

        Raises:
            InvalidArgumentError: Always; the message says how to get a copy.
        """
        raise InvalidArgumentError(
            f"A deep copy of {self!r} would be the same memory: {self._COPY}; copy.copy() makes "
            "another handle of the same"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def shared_name(self) -> str:
        """The name that processes share; for a private segment, a generated name."""
        return self._shared_name

    def close(self) -> None:
        """Detach. Idempotent."""
        self._close()

    def unlink(self) -> None:
        """Remove the segment and its semaphore from the system. Idempotent.

        Processes that have it open go on using it until they close it, as with an unlinked file;
        the next process that opens the name makes a new segment. This also works after `close`, if
        the name still leads to this very segment.

        Raises:
            PermissionDeniedError: The segment is another user's.
        """
        removal.unlink(self._segment_name, self._token, self._handle)


def of_handle(
    cls: type[_Opened],
    handle: _core.Handle,
    segment_name: SegmentName,
    owners: Owners,
    own: Any = None,
) -> _Opened:
    """Return an object of this class for a handle that a user has just attached.

    Raises:
        InvalidArgumentError: The segment is of another kind.
        DataLossError: The configuration has unknown values, or values that do not fit the file.
    """
    self = cls.__new__(cls)
    self._adopt(handle, segment_name, owners, own, None)
    self._opened_by_user()
    return self


def _unpickled(
    cls: type[_Opened],
    segment_name: SegmentName,
    owners: Owners,
    own: Any,
    known: tuple[int, tuple[int, int], tuple[int, int] | None] | None = None,
) -> _Opened:
    """Attach to the segment of that name, to unpickle an object. It need not be closed.

    `known` is the segment's token, and the steps that the pickling process and its thread know.
    The process that unpickles may apply a gradient of these steps, as a forked child may.
    """
    self = cls.__new__(cls)
    self._adopt(opening.attach(segment_name, owners), segment_name, owners, own, None)
    if known is not None and known[0] == self._token:
        self._handle.inherit_steps(*known[1:])
    return self
