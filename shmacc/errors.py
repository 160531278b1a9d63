"""The errors of this library: builtin exceptions with TensorFlow's names.

Each class also derives from the builtin that a Python programmer would catch, so
``except TimeoutError`` works as well as ``except shmacc.errors.DeadlineExceededError``. All of
them carry just their message, and so pickle back from worker processes.
"""

__all__ = [
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "ShmaccError",
]


class ShmaccError(Exception):
    """Base of all errors that this library raises on its own account."""


class InvalidArgumentError(ShmaccError, ValueError):
    """A bad argument. Nothing was changed."""


class DeadlineExceededError(ShmaccError, TimeoutError):
    """A timeout passed. Nothing was consumed."""


class CancelledError(ShmaccError):
    """The wait was cancelled, or its handle was closed under it. Nothing was consumed."""


class NotFoundError(ShmaccError, FileNotFoundError):
    """No segment has that name, or the segment was removed under its users."""


class FailedPreconditionError(ShmaccError, RuntimeError):
    """The handle is closed."""


class ResourceExhaustedError(ShmaccError, MemoryError):
    """Shared memory, descriptors or places in a table have run out. Nothing was changed."""


class PermissionDeniedError(ShmaccError, PermissionError):
    """The segment belongs to another user and its mode does not let this one in."""


class OutOfRangeError(ShmaccError, OverflowError):
    """An integer result does not fit: its dtype (the round stays) or 64 bits (nothing added)."""


class DataLossError(ShmaccError):
    """What stands under the name is not a valid segment of this version."""
