"""The forwarder: it makes a host's segment follow the owner's orders.

Its driver asks for the next action, does it, and says that it is done. Actions on the segment are
done one at a time. Shipping may take long, and a new order may come meanwhile: so `shipped` says
what has been shipped, and it counts only if the segment is still sealed with that content.
"""

from dataclasses import dataclass

from shmacc._multihost.messages import NO_GRANT, Batch, Death, Fence, Order, Report, Sealed, Timing


@dataclass(frozen=True, slots=True)
class Seal:
    """Open a round of the segment, unless it is open, and say what it has (`sealed`)."""


@dataclass(frozen=True, slots=True)
class Ship:
    """Send the pieces of the sealed content to the shards, and say to which (`shipped`)."""

    seq: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give the segment's round up: nothing is consumed (`released`)."""


@dataclass(frozen=True, slots=True)
class Consume:
    """Consume the segment's round, which moves its step on by one (`moved`)."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Empty the segment and set its step, in one commit (`moved`)."""

    step: int


@dataclass(frozen=True, slots=True)
class SetStep:
    """Set the segment's step; what is there stays, and a round that is open ends (`step_set`)."""

    step: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish the segment (`finished`)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A later incarnation is at work: give the segment's round up, and end."""


Action = Seal | Ship | Release | Consume | Reset | SetStep | Finish | Stop


class ForwarderCore:
    """The forwarder of one host.

    Args:
        host: The host's name.
        incarnation: From the owner's `enrol`.
        timing: How often it reports.
        segment: A number that no other segment has.
    """

    def __init__(self, host: str, incarnation: int, timing: Timing, segment: int) -> None:
        self._segment = segment
        self._host = host
        self._incarnation = incarnation
        self._timing = timing
        self._order: Order | None = None
        self._fence: Fence | None = None  # the content is of this fence
        self._step = 0
        self._count = 0
        self._is_finished = False
        self._held = False
        self._sealed_for: int | None = None  # the grant for which the content was looked at
        self._batch: Batch | None = None  # of the content, while it is known to be unchanged
        self._seq = 0
        self._unshipped: Sealed | None = None
        self._seal_began = float("-inf")
        self._dropped = 0
        self._dropped_before = 0  # when the segment was sealed
        self._grants: frozenset[int] = frozenset()  # for which it has been, since then
        self._refused: frozenset[int] | None = None  # unknown: an earlier forwarder may have
        self._deaths: tuple[Death, ...] = ()  # of this fence
        self._death_number = 0
        self._number = 0
        self._reported_at = float("-inf")
        self._reported: Report | None = None

    @property
    def fence(self) -> Fence | None:
        """What the segment's content belongs to; None: not known yet."""
        return self._fence

    @property
    def places(self) -> tuple[str, ...]:
        """The host of each shard, for what is to be shipped."""
        return () if self._order is None else self._order.places

    @property
    def has_answer_to_come(self) -> bool:
        """Whether it ships for a grant that it has not answered yet: it will report soon anyway."""
        last = None if self._reported is None else self._reported.sealed_for
        return self._unshipped is not None and self._sealed_for != last

    @property
    def _pace(self) -> float:
        return 1.0 if self._order is None else self._order.pace

    def receive(self, order: Order) -> None:
        """Take an order in."""
        last = self._order
        if order.incarnation != self._incarnation:
            return
        if last is None or (order.term, order.serial) >= (last.term, last.serial):
            self._order = order

    def observe(self, step: int, count: int, dropped: int, *, finished: bool = False) -> None:
        """Say what the segment has, before each `next_action`.

        Args:
            step: Its step.
            count: Its gradients.
            dropped: How many it has ever refused, or accepted and then dropped.
            finished: Whether it is finished.
        """
        self._is_finished = finished
        self._step, self._count, self._dropped = step, count, dropped
        if dropped == 0 and self._refused is None:
            self._refused = frozenset()
        if self._grants and dropped > self._dropped_before and self._refused is not None:
            self._refused |= self._grants
        if not self._held:
            self._grants = frozenset()

    def died(
        self,
        pids: tuple[int, ...],
        contributors: tuple[int, ...],
        reasons: tuple[str, ...] = (),
    ) -> None:
        """Say that processes which had applied gradients have died or failed.

        If this forwarder dies before it reports them, no chief is told: a segment says it once.
        """
        self._death_number += 1
        self._deaths += (Death(self._death_number, pids, contributors, reasons),)

    # Actions, and that they have been done

    def next_action(self) -> Action | None:
        """Return what is to be done now; None: nothing until the next order."""
        order = self._order
        if order is not None and order.refused:
            return Stop()
        if order is None or not order.ready:
            return None
        if (move := self._next_move(order)) is not None:
            return move
        if not order.hold:
            if self._held:
                return Release()
            return Finish() if order.finished and not self._is_finished else None
        return Seal() if not self._held else self._next_for(order)

    def _next_for(self, order: Order) -> Action | None:
        """Return what a sealed segment needs for the order's grant."""
        if order.grant is None:
            return None
        if self._sealed_for != order.grant:
            if self._batch is None or order.honoured != self._batch.seq:
                return Seal()
            self._seal_for(order.grant)  # still sealed, unchanged, and at the shards
        return Ship(self._seq) if self._unshipped is not None else None

    def _next_move(self, order: Order) -> Action | None:
        """Return how the segment gets to the order's fence and step."""
        if self._fence == order.fence:
            return None if self._step == order.step else SetStep(order.step)
        if self._fence is None or self._fence.term != order.term:
            # A living forwarder knows its step better than its last report does.
            is_at_step = self._fence is None or self._step == order.step
            # One that is finished, and this group is not, is of an earlier run.
            if order.adopt and is_at_step and (order.finished or not self._is_finished):
                self._fence = order.fence
                self._batch = self._unshipped = self._sealed_for = None
                if self._refused or self._grants:
                    self._refused, self._grants = frozenset({NO_GRANT}), frozenset()
                return self._next_move(order)
        elif (
            self._held
            and self._batch is not None
            and order.consumed == self._batch.seq
            and order.step == self._step + 1
        ):
            return Consume()
        return Reset(order.step)

    def sealed(self, content: Sealed, began: float) -> None:
        """Say that the segment is sealed, and has this; sealing began then."""
        self._seal_began = began
        order = self._order
        if not self._held:
            self._held, self._dropped_before = True, self._dropped
        self._count = content.count
        if order is None or order.grant is None:
            return
        self._seal_for(order.grant)
        batch = self._batch
        if batch is not None and batch.sealed == content and order.honoured == batch.seq:
            return  # as it was when it was shipped
        self._batch = None
        self._seq += 1
        self._unshipped = content
        if content.count == 0:
            self.shipped(self._seq, frozenset())

    def _seal_for(self, grant: int) -> None:
        self._sealed_for = grant
        self._grants |= {grant}

    def shipped(self, seq: int, shards: frozenset[int]) -> None:
        """Say that pieces have reached these shards, which are all that get one."""
        if self._unshipped is not None and seq == self._seq:
            self._batch = Batch(seq, self._unshipped, shards)
            self._unshipped = None

    def released(self) -> None:
        """Say that the segment is open again."""
        self._held = False
        self._sealed_for = self._unshipped = None

    def moved(self) -> None:
        """Say that the segment is empty, at the order's step."""
        self._grants = self._refused = frozenset()
        if self._order is not None:
            if self._step == self._order.step:
                self._refused = frozenset({NO_GRANT})  # those who applied wait for the next
            self._fence, self._step = self._order.fence, self._order.step
        self._count = 0
        self._is_finished = False
        self._deaths = ()  # those before the last take are nobody's concern
        self._batch = None
        self.released()

    def finished(self) -> None:
        """Say that the segment is finished."""
        self._is_finished = True

    def step_set(self) -> None:
        """Say that the segment is at the order's step, and open."""
        if self._order is not None:
            self._step = self._order.step
        self.released()

    # Reports

    def report_due(self, now: float) -> float:
        """Return when the next report is due: `now` or before means at once."""
        last = self._reported
        if last is None:
            return now
        report = self._make(last.number)
        heartbeat, announce = (
            self._timing.heartbeat * self._pace,
            self._timing.announce * self._pace,
        )
        if report == last:
            return self._reported_at + heartbeat
        if _told_at_once(report) != _told_at_once(last):
            return now
        if report.sealed_for != last.sealed_for:
            # Most pieces arrive before the owner would wonder, and then one report says all.
            answer = now if self._unshipped is None else self._seal_began + self._timing.grace / 4
            return min(answer, self._reported_at + self._timing.patience(self._pace) / 4)
        slack = 1 if self._order is None else self._order.slack
        if report.count - last.count >= slack:
            return self._reported_at + announce
        return self._reported_at + min(4 * announce, heartbeat)

    def report(self, now: float) -> Report:
        """Return the report to send now."""
        self._number += 1
        self._reported_at = now
        self._reported = self._make(self._number)
        return self._reported

    def _make(self, number: int) -> Report:
        return Report(
            host=self._host,
            incarnation=self._incarnation,
            number=number,
            fence=self._fence,
            step=self._step,
            count=self._count,
            segment=self._segment,
            sealed_for=self._sealed_for,
            batch=self._batch if self._sealed_for is not None else None,
            refused=self._refused,
            deaths=self._deaths,
            pace=self._pace,
            term=0 if self._order is None else self._order.term,
            finished=self._is_finished,
        )


def _told_at_once(report: Report) -> tuple[object, ...]:
    state = (report.fence, report.step, report.batch)
    told = (report.refused, report.deaths, report.pace, report.finished)
    return (*state, *told)
