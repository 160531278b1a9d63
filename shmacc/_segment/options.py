"""Checks the keyword arguments that all constructors of segments share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from shmacc._base import layout
from shmacc._base.shown import shown
from shmacc._values import arguments
from shmacc.errors import InvalidArgumentError

Owners = Literal["mine", "any"] | Iterable[int]
"""The owners whose segments may be attached: this user and root; all users; or these uids."""

IfExists = Literal["attach", "error", "replace"]
"""What a constructor does if a segment of its name exists already."""

BY_MAKER: Any = object()
"""A value of `unlink_on_close`: the maker removes the names, but no other process takes over this
duty. For callers that remove the names themselves if the maker dies."""

_LARGEST_UID = 2**32 - 2
_OWNERS_BITS = 0o600
_IF_EXISTS: tuple[IfExists, ...] = ("attach", "error", "replace")


@dataclass(frozen=True, slots=True)
class Options:
    """A constructor's keywords; `SparseConditionalAccumulator` describes them.

    Shared arrays have neither lanes nor a capacity. `inherits` says whether this process takes over
    a dead maker's duty to remove the names.

    Raises:
        InvalidArgumentError: A keyword has an impossible value.
    """

    mode: int | None
    owners: Owners
    if_exists: IfExists
    unlink_on_close: bool
    lanes: int | None = None
    capacity: int | None = None
    inherits: bool = False

    def __post_init__(self) -> None:
        """Check the keywords, and keep them in their normal form."""
        checked = {
            "mode": _mode_bits(self.mode),
            "owners": checked_owners(self.owners),
            "if_exists": _checked_if_exists(self.if_exists),
            "unlink_on_close": bool(self.unlink_on_close),
            "inherits": bool(self.unlink_on_close) and self.unlink_on_close is not BY_MAKER,
            "lanes": arguments.limit(self.lanes, "lanes", layout.MAX_LANES),
            "capacity": arguments.limit(self.capacity, "capacity", arguments.MOST_GRADIENTS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def checked_owners(owners: object) -> Owners:
    """Check `owners`; return them in the form in which objects keep and pickle them.

    Raises:
        InvalidArgumentError: `owners` is neither "mine" nor "any" nor an iterable of uids.
    """
    if isinstance(owners, str):
        if owners == "mine":
            return "mine"
        if owners == "any":
            return "any"
    elif isinstance(owners, Iterable) and not isinstance(owners, bytes):
        uids = tuple(owners)
        if all(type(uid) is int and 0 <= uid <= _LARGEST_UID for uid in uids):
            return uids
    raise InvalidArgumentError(
        f'owners must be "mine", "any" or an iterable of uids, but was {shown(owners)}'
    )


def _checked_if_exists(value: object) -> IfExists:
    for word in _IF_EXISTS:
        if isinstance(value, str) and value == word:
            return word
    raise InvalidArgumentError(
        f'if_exists must be "attach", "error" or "replace", but was {shown(value)}'
    )


def _mode_bits(mode: object) -> int | None:
    if mode is None:
        return None
    bits = arguments.int64(mode, "mode")
    if not 0 <= bits <= 0o777:  # noqa: PLR2004  permission bits
        raise InvalidArgumentError(f"mode must be permission bits, 0 to 0o777, but was {bits:#o}")
    if bits & _OWNERS_BITS != _OWNERS_BITS:  # the owner must keep access
        raise InvalidArgumentError(f"mode must let its owner read and write, but was {bits:#o}")
    return bits
