"""The errors of this library: builtin exceptions with TensorFlow's names.

Each class also derives from the builtin that a Python programmer would catch, so
``except TimeoutError`` works as well as ``except shmacc.errors.DeadlineExceededError``. The message
is for people; the facts that a program may act on are in attributes, which are None where they do
not apply. Message and attributes pickle, so errors arrive complete from worker processes.
"""

from typing import Any, Self

__all__ = [
    "AlreadyExistsError", "CancelledError", "ChiefDiedError", "DataLossError",
    "DeadlineExceededError", "FailedPreconditionError", "FinishedError", "InternalError",
    "InvalidArgumentError", "NotFoundError", "OutOfRangeError", "PermissionDeniedError",
    "ResourceExhaustedError", "ShmaccError", "WorkerDiedError",
]  # fmt: skip


class ShmaccError(Exception):
    """Base of all errors that this library defines.

    Attributes:
        segment: The name in /dev/shm of the segment concerned.
        problem: The message without the segment's name before it.
    """

    # No __init__ in Python: the extension makes errors where no Python code may run.
    segment: str | None = None
    problem: str | None = None

    def with_fields(self, **fields: Any) -> Self:
        """Set the attributes named in ``fields``; return the error, as ``with_traceback`` does."""
        for name, value in fields.items():
            assert hasattr(type(self), name), f"{type(self).__name__} has no {name}"  # noqa: S101
            setattr(self, name, value)
        return self

    def of_member(self, name: str) -> Self:
        """Return the same error, with the ``name`` of the group's member in the message."""
        return type(self)(f"Member {name!r}: {self}").with_fields(**self.__dict__)

    def about(self, segment: str) -> Self:
        """Return the same error, with the name of its ``segment`` in the message."""
        named = type(self)(f"{segment}: {self}")
        return named.with_fields(**self.__dict__).with_fields(segment=segment, problem=str(self))


class InvalidArgumentError(ShmaccError, ValueError):
    """A bad argument. Nothing was changed.

    What to do: Correct the call; the message says what was expected. If an existing segment
    disagrees, ask for its values, or replace it (``if_exists="replace"``).

    Attributes:
        what: The property that differs, such as "dtype" or "lanes". For a member, array or table:
            the property with its name ("dtype of member 'w'"), or only the name.
        existing: The existing value, as text.
        asked: The value that was asked for, as text.
    """

    what: str | None = None
    existing: str | None = None
    asked: str | None = None


class DeadlineExceededError(ShmaccError, TimeoutError):
    """A timeout passed. Nothing was consumed.

    The message of a take also names the processes that have died or failed at this step or the step
    before, each with its exception.

    What to do: Make the call again, since nothing is lost; if that does not help,
    ``shmacc-inspect check`` names the cause.

    Attributes:
        accumulated: How many gradients had arrived.
        required: How many gradients the take waited for; None for ``wait_step`` and applies.
        step: The accumulator's global step.
        dropped: How many gradients were dropped during the wait: as stale, because of a seal, or
            because the accumulator is finished.
        pids: The processes that are attached.
        shared_name: The name that ``attach`` waited for.
        namespace: The namespace in which ``attach`` looked for the name.
    """

    accumulated: int | None = None
    required: int | None = None
    step: int | None = None
    dropped: int | None = None
    pids: tuple[int, ...] | None = None
    shared_name: str | None = None
    namespace: str | None = None


class CancelledError(ShmaccError):
    """The wait was cancelled, or its handle was closed meanwhile. Nothing was consumed.

    What to do: End, if ``cancel()`` or ``close()`` was meant to end the wait; else call it again.

    Attributes:
        signal: The number of the signal that has ended a run (`shmacc.run`).
    """

    signal: int | None = None


class NotFoundError(ShmaccError, FileNotFoundError):
    """No segment has that name, or the segment was removed while in use.

    What to do: Compare the name and SHMACC_NAMESPACE with those of the process that creates the
    segment, or wait until it exists (``attach(name, timeout=60)``). If the name was removed while
    the job ran, start the job again.

    Attributes:
        shared_name: The name that was looked for.
        namespace: The namespace that was searched.
    """

    shared_name: str | None = None
    namespace: str | None = None


class AlreadyExistsError(ShmaccError, FileExistsError):
    """The name of a new segment is taken; or a partial's contributor is in the round already.

    What to do: Attach to the segment, or replace it (``if_exists="replace"``). Do not apply the
    partial: its contributor has been counted.

    Attributes:
        shared_name: The name.
        namespace: The namespace that the name is in.
    """

    shared_name: str | None = None
    namespace: str | None = None


class FailedPreconditionError(ShmaccError, RuntimeError):
    """The handle is closed, or the segment is in use.

    What to do: Open it again, or end the processes that use it; the message says what the call
    needs.

    Attributes:
        pids: The processes that use the segment.
    """

    pids: tuple[int, ...] | None = None


class ResourceExhaustedError(ShmaccError, MemoryError):
    """Shared memory, descriptors or entries for processes have run out. Nothing was changed.

    What to do: Make room (``shmacc-inspect clean --yes``, a larger /dev/shm, ``ulimit -n``), then
    call it again.

    Attributes:
        needed: How many more bytes of shared memory were needed.
        free: How many bytes of shared memory are free.
        total: How many bytes of shared memory the system has.
        kept: How many of the free bytes are kept for others.
    """

    needed: int | None = None
    free: int | None = None
    total: int | None = None
    kept: int | None = None


class PermissionDeniedError(ShmaccError, PermissionError):
    """The segment belongs to another user.

    What to do: Let the owner give the segment a ``mode`` that permits the access, attach with
    ``owners=``, or use another namespace.

    Attributes:
        uid: The segment's owner.
        mode: The segment's permission bits.
    """

    uid: int | None = None
    mode: int | None = None


class OutOfRangeError(ShmaccError, OverflowError):
    """A result exceeds its integer dtype (the round stays), or a sum exceeds 64 bits (not added).

    What to do: Use a wider dtype, or smaller numbers and weights; a round that stays can be dropped
    by ``advance_step``.
    """


class FinishedError(OutOfRangeError):
    """The accumulator is finished: nothing is accepted or taken any more. Nothing was consumed.

    What to do: Leave the loop: the run is over.

    Attributes:
        step: The accumulator's global step.
        accumulated: How many gradients are pending.
    """

    step: int | None = None
    accumulated: int | None = None


class DataLossError(ShmaccError):
    """The file under the name is not a valid segment of this version.

    What to do: End the processes that use it, then ``shmacc-inspect remove NAME --force --yes``; or
    use the version of shmacc that made the file.

    Attributes:
        version: The file's layout version, if that is the reason.
    """

    version: int | None = None


class WorkerDiedError(ShmaccError):
    """A worker has died or failed (``on_death="raise"``). Nothing was consumed.

    A worker is a process that has applied a gradient, has called `apply` with a ``contributor``, or
    has made a `shmacc.torch.Replica`.

    What to do: Take again, for as many gradients as the living processes can send, or start the
    dead ones again.

    Attributes:
        pids: The processes that have died or failed, as their own pid namespaces know them.
        reasons: Why, in the same order: "killed", or an exception's type and the beginning of its
            text, "ValueError: ...".
        contributors: The contributors of their applies in the open round, ascending; without
            refused applies.
    """

    pids: tuple[int, ...] | None = None
    reasons: tuple[str, ...] | None = None
    contributors: tuple[int, ...] | None = None


class ChiefDiedError(ShmaccError):
    """No process is left that moves the step, and a wait for the step had ``on_death="raise"``.

    All processes that had taken have died or failed, and no other process takes.

    What to do: Start the chief again and wait again, or end.

    Attributes:
        pids: The processes that had taken and have died or failed, as their own pid namespaces
            know them.
        reasons: Why, in the same order, as in `WorkerDiedError`.
    """

    pids: tuple[int, ...] | None = None
    reasons: tuple[str, ...] | None = None


class InternalError(ShmaccError, AssertionError):
    """An assertion of this library does not hold: it has a fault, or its memory was written over.

    The call has ended as if its process had died there: it has its whole effect or none. Other
    processes go on, and the next call of any process undoes what was half written.

    What to do: Report the message, which names the place in the source. End the process, which may
    be damaged; a run (`shmacc.run`) starts it again.
    """
