"""A group: the gradients of many tensors, accumulated as one."""

from collections.abc import Mapping
from typing import Any

from shmacc._accumulators import gradient_checks, results
from shmacc._accumulators.accumulator import Accumulator
from shmacc._accumulators.member_gradient import MemberInput
from shmacc._accumulators.members import AccumulatedMember, AccumulatorSpec
from shmacc._accumulators.taken import GroupPartial, GroupTaken
from shmacc._base import layout
from shmacc._base.signals import pass_on
from shmacc._core import Answer, MemberGradient, RoundResult
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._values import arguments
from shmacc._values.specs import OVER_HOSTS, TensorSpec
from shmacc.errors import FailedPreconditionError, InvalidArgumentError, ShmaccError


class AccumulatorGroup(Accumulator[GroupTaken, GroupPartial]):
    """Accumulates the gradients of many tensors as one, with a common step, count and commit.

    A gradient is in the round with all its members or not at all, even if processes die.
    """

    _KIND = "group"
    _DEFAULT_NAME = "accumulator_group"

    def __init__(
        self,
        members: Mapping[str, TensorSpec],
        shared_name: str | None = None,
        name: str | None = None,
        reduction_type: str | None = "MEAN",
        *,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
        lanes: int | None = None,
        capacity: int | None = None,
    ) -> None:
        """Create the group, or attach to the existing group of this shared_name.

        Args:
            members: A mapping from name (1 to 200 printable characters) to `TensorSpec` (dense) or
                `IndexedSlicesSpec` (sparse); 1 to 4,096 members, in any order.
            shared_name: The same as for an accumulator, like all arguments below.
            name: A label.
            reduction_type: The reduction of members without their own.
            mode: Permission bits.
            owners: Whose group may be attached.
            if_exists: What to do with an existing group.
            unlink_on_close: Whether its creator removes the name.
            lanes: How many applies can go on at the same time.
            capacity: How many gradients may be pending.

        Raises:
            InvalidArgumentError: A bad argument, or the existing group of this name disagrees (the
                message names the first member that differs, and both values).
            FailedPreconditionError: The members come from `Parameters.member_specs`, but the
                existing group has gradients, or had rounds, of other parameters.
            All other errors are those of an accumulator.
        """
        reduction = arguments.reduction(reduction_type)
        specs = _member_specs(members, reduction)
        owners_of = {spec.parameters for spec in specs if spec.parameters is not None}
        for token, parameters in owners_of if shared_name else ():
            if token in OVER_HOSTS:
                raise InvalidArgumentError(
                    f"The members are gradients of the parameters {parameters!r} over hosts: make "
                    "the group with shmacc.ray.AccumulatorGroup, with the same arguments"
                )
        options = Options(mode, owners, if_exists, unlink_on_close, lanes, capacity)
        self._open(specs, shared_name, options, name, reduction=reduction)

    def _examine(self, existing: AccumulatorSpec, own: str | None) -> None:
        super()._examine(existing, own)
        # (contributor, answer): an apply of the contributor also stores its result in the answer,
        # since the caller does not see it if a signal handler raises as the apply returns.
        self._awaited: tuple[int, Answer] | None = None
        self._members = {
            spec.name: MemberInput(number, spec) for number, spec in enumerate(self._spec.members)
        }
        self._names = tuple(self._members)

    def _check_asked(self, asked: AccumulatorSpec) -> None:
        """Refuse a group whose step and gradients belong to other parameters than its specs."""
        super()._check_asked(asked)
        for token, name in {member.parameters for member in asked.members if member.parameters}:
            if not self._handle.belong_to(token):
                raise FailedPreconditionError(
                    f"The group {self._shared_name!r} exists and belongs to other parameters than "
                    f"{name!r}, which were replaced or removed since: its step, "
                    f"{self._handle.step}, and its {self._handle.count} gradients are of those. "
                    'Make the group new, too (if_exists="replace"), then load a checkpoint of both '
                    "if there is one"
                )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._shared_name!r} of {len(self._members)} members "
            f"{self._spec.reduction}{' closed' if self._handle.closed else ''}>"
        )

    @property
    def members(self) -> dict[str, TensorSpec]:
        """The specs of the members, by name."""
        return {spec.name: spec.tensor_spec() for spec in self._spec.members}

    def apply(
        self,
        gradient: Mapping[str, Any],
        local_step: int,
        *,
        contributor: int | None = None,
        weight: int = 1,
        timeout: float | None = None,
    ) -> bool:
        """Add a gradient for some members or all, unless it is stale.

        Args:
            gradient: A mapping from member to its gradient: an array for a dense member;
                ``(indices, values)``, or an object with ``.indices``, ``.values`` and
                ``.dense_shape``, for a sparse member. Nothing is added to members that are left
                out. An empty mapping is a gradient, too, and counts.
            local_step: The step that the gradient was computed at.
            contributor: Whose gradient it is, 0 to ``2**63 - 1``: within a round a second gradient
                of the same contributor adds nothing, as in
                `SparseConditionalAccumulator.apply_grad`.
            weight: How often the values count, in the sum and in the divisor; a quorum counts the
                gradient once.
            timeout: Seconds to wait: for a stopped process that keeps the lock, for the end of an
                open round, for room (``capacity``); None: for ever.

        Returns:
            True if the gradient, or another gradient of its contributor, is in the round; False if
            it was dropped: ``local_step`` is less than the group's step, or the step is sealed.

        Raises:
            InvalidArgumentError: An unknown member, or a member's gradient is malformed or does not
                fit (the message names the member). Nothing was added to any member.
            OutOfRangeError: A 64-bit sum would overflow. Nothing was added.
            ResourceExhaustedError: Shared memory is full. Nothing was added.
            DeadlineExceededError: The timeout passed. Nothing was added.
        """
        terms = None  # most gradients need no terms, which saves a call
        if contributor is not None or timeout is not None or weight is not arguments.ONCE:
            terms = self._terms(contributor, weight, timeout)
        step = arguments.int64(local_step, "local_step")
        times = 1 if terms is None else terms[1]
        if not isinstance(gradient, Mapping):
            raise InvalidArgumentError(
                "A gradient of a group is a mapping from member to its gradient, but was a "
                f"{type(gradient).__name__}"
            )
        members = []
        # Check all members before the lock is taken: if one is bad, none of them adds anything.
        for name, value in gradient.items():
            member = self._member(name)
            try:
                members.append(member.gradient(value, times))
            except ShmaccError as error:
                pass_on(error)
                raise error.of_member(name) from error.__cause__
        awaited, answer = self._awaited, None
        if awaited is not None and awaited[0] == contributor:
            answer = awaited[1]
        added = self._handle.apply_group(members, step, terms, answer)
        return added or self._dropped(local_step)

    def apply_partial(
        self,
        partial: GroupPartial,
        local_step: int = arguments.NO_STEP,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Add a partial from another group's `take_partial`.

        It counts as ``partial.count`` gradients with the total weight ``partial.weight``, in each
        member with the member's own count and weight. Its contributors become the round's.

        Args:
            partial: A partial from a group whose members have these names, kinds, dtypes and
                shapes.
            local_step: The step that its gradients were computed at.
            timeout: The same as for `apply`.

        Returns:
            The same as for `apply`.

        Raises:
            The same errors as `apply`; also AlreadyExistsError if one of the partial's contributors
            is in the round already.
        """
        step, seconds = arguments.int64(local_step, "local_step"), arguments.timeout(timeout)
        if isinstance(partial, GroupTaken):
            raise InvalidArgumentError(
                "A partial was expected, but this GroupTaken is the result of a take, which is "
                "reduced already; take_partial hands out sums"
            )
        members, count, weight = self._members_of(partial)
        who = gradient_checks.partial_contributors(partial)
        # A partial of no gradients adds nothing, but the result says whether its step is stale.
        if count == 0:
            return not self._handle.drop_if_stale(step, 0, seconds) or self._dropped(local_step)
        added = self._handle.apply_group(members, step, (count, weight, who, seconds))
        return added or self._dropped(local_step)

    def _members_of(self, partial: GroupPartial) -> tuple[list[MemberGradient], int, int]:
        """Return the members' sums, and the count and weight of the whole partial."""
        gradient_checks.check_has(partial, "A partial of a group", "items", "count")
        count, weight = gradient_checks.count_and_weight(partial)
        members = []
        for name, sums in partial.items():
            member = self._member(name)
            try:
                members.append(member.partial(sums, count, weight))
            except ShmaccError as error:
                pass_on(error)
                raise error.of_member(name) from error.__cause__
        return members, count, weight

    def _member(self, name: object) -> MemberInput:
        member = self._members.get(name) if isinstance(name, str) else None
        if member is None:
            known = ", ".join(map(repr, list(self._members)[:8]))
            more = f" and {len(self._members) - 8} more" if len(self._members) > 8 else ""  # noqa: PLR2004
            raise InvalidArgumentError(f"The group has no member {name!r}; it has {known}{more}")
        return member

    def _taken(self, taken: RoundResult) -> GroupTaken:
        return results.group_taken(taken, self._spec.members, self._names)

    def _partial(self, taken: RoundResult) -> GroupPartial:
        return results.group_partial(taken, self._spec.members)


def _member_specs(members: object, reduction: str) -> tuple[AccumulatedMember, ...]:
    if not isinstance(members, Mapping):
        raise InvalidArgumentError(
            "The members of a group are a mapping from name to TensorSpec or IndexedSlicesSpec, "
            f"but were a {type(members).__name__}"
        )
    specs: dict[str, AccumulatedMember] = {}
    for name, spec in members.items():
        arguments.check_member_name(name)
        if name in specs:
            raise InvalidArgumentError(f"Member {name!r} occurs more than once")
        if not isinstance(spec, TensorSpec):
            raise InvalidArgumentError(
                f"Member {name!r} must be a TensorSpec or an IndexedSlicesSpec, but was a "
                f"{type(spec).__name__}"
            )
        specs[name] = AccumulatedMember.of_tensor(name, spec, reduction)
    owners = {spec.parameters for spec in specs.values() if spec.parameters is not None}
    if len(owners) > 1:
        whose = " and ".join(sorted(repr(name) for _, name in owners))
        raise InvalidArgumentError(
            f"A group belongs to one Parameters, but its members are of {whose}: make a group of "
            "each"
        )
    if not 1 <= len(specs) <= layout.MAX_MEMBERS:
        raise InvalidArgumentError(
            f"A group has 1 to {layout.MAX_MEMBERS} members, but {len(specs)} were given"
        )
    return tuple(specs.values())
