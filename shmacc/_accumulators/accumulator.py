"""The common base of accumulators: a handle on a segment, its step, its life.

The behaviour is that of TensorFlow's ``SparseConditionalAccumulator`` and
``ConditionalAccumulator`` (ops ``SparseAccumulatorApplyGradient`` and so on); where it differs, a
docstring says so. Data flows one way: arguments are converted and checked (gradients.py), the
extension does the work under the lock, and its results become NumPy arrays (results.py).
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from shmacc import _core
from shmacc._accumulators import saving, taking
from shmacc._gradients import arguments
from shmacc._gradients.spec import MemberSpec, Spec
from shmacc._layout import layout, names
from shmacc._layout.names import SegmentName
from shmacc._opening import exits, removal, segment
from shmacc._opening.segment import Owners
from shmacc._records.records import IndexArray, ValueArray
from shmacc._records.stats import Stats
from shmacc.errors import DataLossError, DeadlineExceededError, InvalidArgumentError

NEVER_STALE: int = 2**63 - 1
"""A ``local_step`` that no accumulator's step is past."""

_logger = logging.getLogger("shmacc")


class AccumulatorRef:
    """The ``handle`` that raw ops take; keeps its accumulator open."""

    __slots__ = ("accumulator",)

    def __init__(self, accumulator: "Accumulator") -> None:
        self.accumulator = accumulator

    def __repr__(self) -> str:
        return f"AccumulatorRef({self.accumulator!r})"


class Accumulator(exits.Owner):
    """The common base of accumulators, single ones and groups.

    Use as a context manager to close at the end of the block; one that is collected unclosed is
    closed with a ResourceWarning. Handles pickle: another process that unpickles one attaches to
    the same segment.
    """

    _KIND: ClassVar[str]
    _DEFAULT_NAME: ClassVar[str]

    def _open(
        self,
        members: tuple[MemberSpec, ...],
        shared_name: str | None,
        name: str | None,
        reduction_type: object,
        *,
        mode: object,
        owners: object,
        if_exists: object,
        unlink_on_close: object,
        lanes: object,
        capacity: object,
    ) -> None:
        """Create the segment or attach to it; the constructors' common part."""
        private = not shared_name and not isinstance(shared_name, bytes)
        spec = Spec(
            kind=self._KIND,
            members=members,
            reduction=arguments.reduction(reduction_type),
            lanes=arguments.limit(lanes, "lanes", layout.MAX_LANES),
            capacity=arguments.limit(capacity, "capacity", arguments.MOST_GRADIENTS),
            mode=arguments.mode_bits(mode),
            private=private,
        )
        label = self._DEFAULT_NAME if name is None else name
        segment_name = names.segment_name(names.generated_name() if private else shared_name)
        whose = segment.check_owners(owners)
        handle = segment.open_or_create(
            segment_name,
            spec,
            whose,
            arguments.if_exists(if_exists),
            unlink_on_close=bool(unlink_on_close),
        )
        self._adopt(handle, segment_name, label, whose)
        try:
            self._check_agreement(spec)
        except BaseException:
            self.close()
            raise
        self.opened_by_user()

    @classmethod
    def attach(
        cls, shared_name: str, *, owners: Owners = "mine", timeout: float | None = None
    ) -> Self:
        """Return the accumulator of that name and this kind: the typed form of ``shmacc.attach``.

        Args:
            shared_name: The name.
            owners: As at construction.
            timeout: As for ``shmacc.attach``.

        Raises:
            NotFoundError: There is none, and no timeout.
            DeadlineExceededError: There was none until the end of the timeout.
            InvalidArgumentError: No possible name, a bad timeout, or it is of the other kind.
            PermissionDeniedError: It is another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        segment_name, whose = names.segment_name(shared_name), segment.check_owners(owners)
        handle = segment.attach(segment_name, whose, arguments.attach_timeout(timeout))
        self = cls.of_handle(handle, segment_name, whose)
        self.opened_by_user()
        return self

    @classmethod
    def of_name(cls, segment_name: SegmentName, label: str, owners: Owners) -> Self:
        """Attach to the segment of that name; called by unpickling.

        Raises:
            NotFoundError: There is none.
            InvalidArgumentError: It is of the other kind.
            PermissionDeniedError: It is another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        return cls.of_handle(segment.attach(segment_name, owners), segment_name, owners, label)

    @classmethod
    def of_handle(
        cls,
        handle: _core.Handle,
        segment_name: SegmentName,
        owners: Owners,
        label: str | None = None,
    ) -> Self:
        """Return the accumulator that this handle is attached to.

        Raises:
            InvalidArgumentError: It is of the other kind.
            DataLossError: It has an unknown dtype or reduction.
        """
        self = cls.__new__(cls)
        label = cls._DEFAULT_NAME if label is None else label
        self._adopt(handle, segment_name, label, owners)
        if self._spec.kind != cls._KIND:
            self.close()
            raise InvalidArgumentError(
                f"The accumulator {segment_name.shared_name!r} is {self._spec.kind}, "
                f"not {cls._KIND}"
            )
        return self

    def _adopt(
        self,
        handle: _core.Handle,
        segment_name: SegmentName,
        label: str,
        owners: Owners,
    ) -> None:
        self._handle = handle
        self._segment_name = segment_name
        self._label = label
        self._owners = owners
        self._finalizer = exits.close_with(self, handle)
        config = handle.config()
        if config["kind"] == layout.KINDS["arrays"]:
            self._finalizer()
            raise segment.disagreement(
                segment_name,
                f"{segment_name.shared_name!r} is the name of shared arrays (shmacc.SharedArrays)",
                "kind",
                "arrays",
                self._KIND,
            )
        spec = Spec.of_config(config, handle.mode)
        if spec is None:
            self._finalizer()
            raise DataLossError(f"{segment_name.system_name}: unknown dtype or reduction")
        self._spec = spec
        self._shared_name: str = config["name"]
        self._adopted()

    def _adopted(self) -> None:
        """Keep what a subclass needs of the spec at hand."""

    def _check_agreement(self, asked: Spec) -> None:
        for what, existing, wanted in self._spec.disagreements(asked):
            raise segment.disagreement(
                self._segment_name,
                f"The accumulator {self._shared_name!r} exists",
                what,
                existing,
                wanted,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the segment's whole system name; unpickling attaches (NotFoundError)."""
        self._handle.config()  # a closed handle does not pickle
        return type(self).of_name, (self._segment_name, self._label, self._owners)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reduction_type(self) -> str:
        """MEAN, SUM or CMEAN; of a group, that of members without their own."""
        return self._spec.reduction

    @property
    def lanes(self) -> int:
        """How many applies go on at the same time."""
        return self._spec.lanes or 1

    @property
    def capacity(self) -> int | None:
        """How many gradients may be pending; None: any number."""
        return self._spec.capacity

    @property
    def name(self) -> str:
        """The label given at construction."""
        return self._label

    @property
    def shared_name(self) -> str:
        """The name that processes share; for a private accumulator, its generated name."""
        return self._shared_name

    @property
    def accumulator_ref(self) -> AccumulatorRef:
        """The handle that raw ops take."""
        return AccumulatorRef(self)

    @property
    def global_step(self) -> int:
        """The accumulator's step; gradients of older steps are dropped. Takes no lock."""
        return self._handle.step

    def num_accumulated(self, name: str | None = None) -> int:  # noqa: ARG002  TensorFlow's signature
        """How many gradients wait to be taken. Takes no lock (TF: AccumulatorNumAccumulated)."""
        return self._handle.count

    def set_global_step(self, new_global_step: int, name: str | None = None) -> None:  # noqa: ARG002
        """Set the step. Accumulated gradients stay (TF: AccumulatorSetGlobalStep).

        A step lower than the current one is set all the same, with a warning to logger "shmacc".

        Raises:
            InvalidArgumentError: Not an integer of 64 bits.
        """
        new = arguments.int64(new_global_step, "new_global_step")
        old = self._handle.set_step(new)
        if new < old:
            _logger.warning(
                "Attempt to set current_global_step_ to smaller value: "
                "current_global_step_ = %d >= %d = new_global_step.",
                old,
                new,
            )

    def advance_step(self, step: int) -> int:
        """Move the step forward: drop the gradients of older steps, and unseal.

        A step that is not past the current one changes nothing, so repeated and late announcements
        of a step are harmless.

        Returns:
            How many accumulated gradients were dropped.

        Raises:
            InvalidArgumentError: Not an integer of 64 bits.
        """
        return self._handle.advance_step(arguments.int64(step, "step"))

    def wait_step(self, after: int, *, timeout: float | None = None) -> int:
        """Wait until the global step is past `after`; this is how a worker follows the chief.

        Returns:
            The global step.

        Raises:
            DeadlineExceededError: The timeout (seconds) passed.
            CancelledError: The handle was closed.
            InvalidArgumentError: A bad argument.
        """
        past, seconds = arguments.int64(after, "after"), arguments.timeout(timeout)
        try:
            return self._handle.wait_step(past, seconds, None)
        except DeadlineExceededError as error:
            raise taking.with_attached(error, self._handle) from None

    async def wait_step_async(self, after: int, *, timeout: float | None = None) -> int:
        """Wait as `wait_step` does, without blocking the event loop of asyncio.

        Raises:
            asyncio.CancelledError: The task was cancelled.
            ShmaccError: As for `wait_step`; ResourceExhaustedError: no thread could be started for
                the wait.
        """
        from shmacc._accumulators import (
            coroutines,  # asyncio takes longer to import than all of shmacc
        )

        past, seconds = arguments.int64(after, "after"), arguments.timeout(timeout)
        return await coroutines.wait_step(self._handle, past, seconds)

    def contributors(self) -> IndexArray:
        """Return who is in the open round, without consuming it: int64, ascending.

        Only applies that were given a ``contributor`` are listed.
        """
        contributors: IndexArray = taking.look(
            self._handle, lambda taken: taken.contributors, partial=True
        )
        return contributors

    def state(self) -> dict[str, ValueArray]:
        """Return everything accumulated, and the step, as a dict of arrays for ``np.savez``.

        Consumes nothing. In an open round it is that of the round.
        """
        members = self._spec.members
        return taking.look(
            self._handle, lambda taken: saving.to_arrays(taken, members), partial=True
        )

    def restore(self, state: Mapping[str, ValueArray]) -> None:
        """Replace everything by what `state` returned, here or of an equal accumulator.

        One commit, also while other processes are attached: sums, counts, contributors and step.
        What was accumulated before is dropped, the step is open, and a round that is open ends.
        Counters go on counting.

        Args:
            state: The dict, or what ``np.load`` made of it.

        Raises:
            InvalidArgumentError: It is no state, or that of an accumulator with other members,
                dtypes, shapes or reductions. Nothing was changed.
            ResourceExhaustedError: Shared memory is full. Nothing was changed.
        """
        parts, step, terms = saving.from_arrays(state, self._spec.members)
        self._handle.restore(parts, step, terms)

    def unseal(self) -> None:
        """Accept gradients again after ``take_partial(seal=True)``, at the same step."""
        self._handle.unseal()

    def stats(self) -> Stats:
        """Return the segment's counters at one instant. Takes no lock."""
        return Stats.of(self._handle.state())

    def cancel(self) -> None:
        """End every take that waits now, in all processes, with CancelledError."""
        self._handle.cancel()

    def close(self) -> None:
        """Detach. Takes that wait through this handle end with CancelledError. Idempotent."""
        self._close()

    def unlink(self) -> None:
        """Remove the segment and its semaphore from the system. Idempotent.

        Processes that have it open go on using it until they close it, as with an unlinked file;
        the next one that opens the name makes a new segment.

        Raises:
            PermissionDeniedError: The segment is another user's.
            FailedPreconditionError: The handle is closed.
        """
        removal.unlink(self._segment_name, self._handle)
