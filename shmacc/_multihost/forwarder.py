"""The forwarder: it makes a host's segment follow the owner's orders.

Its driver asks for the next action, does it, and says that it is done. Actions on the segment are
done one at a time. Shipping may take long, and a new order may come meanwhile: so `shipped` says
for which grant pieces have arrived, and counts only for the current grant.
"""

from enum import Enum, auto

from shmacc._multihost.messages import Batch, Death, Fence, Order, Report, Timing


class Do(Enum):
    """What the driver must do; in brackets, the method to call when it is done."""

    HOLD = auto()  # open a round of the segment, unless one is open; tell its content (`held`)
    SHIP = auto()  # send that content to the shards in pieces, for a grant (`shipped`)
    RELEASE = auto()  # give the segment's round up: nothing is consumed (`released`)
    CONSUME = auto()  # consume the segment's round, which moves its step on by one (`moved`)
    RESET = auto()  # empty the segment and set its step, in one commit (`moved`)
    SET_STEP = auto()  # set the segment's step; gradients stay, its round ends (`step_set`)
    FINISH = auto()  # finish the segment (`finished`)
    STOP = auto()  # a later incarnation is at work: give the segment's round up, and end


Action = tuple[Do, int]
"""What to do; and with SHIP the grant, with RESET and SET_STEP the step, else 0."""


class ForwarderCore:
    """The forwarder of one host."""

    def __init__(self, host: str, incarnation: int, timing: Timing) -> None:
        self._host = host
        self._incarnation = incarnation
        self._timing = timing
        self._order: Order | None = None
        self.fence: Fence | None = None  # the content is of this fence; None: not known yet
        self._step = 0
        self._count = 0
        self._is_finished = False
        self._held = False
        self._held_for: int | None = None  # the grant that the segment was last held for
        self._unshipped: Batch | None = None  # held for that grant, and not shipped yet
        self._batch: Batch | None = None  # shipped for that grant
        self._hold_began = float("-inf")
        self._deaths: tuple[Death, ...] = ()  # noticed at this fence
        self._death_number = 0
        self._number = 0
        self._reported_at = float("-inf")
        self._reported: Report | None = None

    @property
    def shard_hosts(self) -> tuple[str, ...]:
        """The host of each shard, as the last order says; empty: there is nothing to ship."""
        return () if self._order is None else self._order.shard_hosts

    @property
    def has_answer_to_come(self) -> bool:
        """Whether a report will come soon: this ships for a grant that it has not answered."""
        last = None if self._reported is None else self._reported.held_for
        return self._unshipped is not None and self._held_for != last

    @property
    def _pace(self) -> float:
        return 1.0 if self._order is None else self._order.pace

    def receive(self, order: Order) -> None:
        """Accept an order, unless it is an old one or for another incarnation."""
        last = self._order
        if order.incarnation != self._incarnation:
            return
        if last is None or (order.term, order.serial) >= (last.term, last.serial):
            self._order = order

    def observe(self, step: int, count: int, *, finished: bool = False) -> None:
        """Note the segment's step and number of gradients; call it before each `next_action`."""
        self._step, self._count, self._is_finished = step, count, finished

    def died(
        self,
        pids: tuple[int, ...],
        contributors: tuple[int, ...],
        reasons: tuple[str, ...] = (),
    ) -> None:
        """Note that workers have died or failed.

        If this forwarder dies before it reports them, no chief is told: a segment tells of a death
        once.
        """
        self._death_number += 1
        self._deaths += (Death(self._death_number, pids, contributors, reasons),)

    # Actions, and notes that they are done

    def next_action(self) -> Action | None:
        """Return what is to be done now; None: nothing until the next order."""
        order = self._order
        if order is None or not (order.ready or order.refused):
            return None
        if order.refused:
            return Do.STOP, 0
        if self._is_finished and not order.finished and self.fence != order.fence:
            # A process of the host has ended the run, and the owner may not know it. A reset would
            # begin the segment anew, and the end would be forgotten.
            return None
        return self._next_move(order) or (
            self._when_held(order) if order.hold else self._when_open(order)
        )

    def _when_open(self, order: Order) -> Action | None:
        if self._held:
            return Do.RELEASE, 0
        return (Do.FINISH, 0) if order.finished and not self._is_finished else None

    def _when_held(self, order: Order) -> Action | None:
        if not self._held or order.grant not in {None, self._held_for}:
            return Do.HOLD, 0
        return None if self._unshipped is None or order.grant is None else (Do.SHIP, order.grant)

    def _next_move(self, order: Order) -> Action | None:
        """Return how the segment gets to the order's fence and step."""
        if self.fence == order.fence:
            return None if self._step == order.step else (Do.SET_STEP, order.step)
        if self.fence is None or self.fence.term != order.term:
            if order.adopt and self._step == order.step:
                self.fence = order.fence
                self._forget_grant()
                return None
        elif (
            self._held
            and self._batch is not None
            and order.consumed == self._held_for
            and order.step == self._step + 1
        ):
            return Do.CONSUME, 0
        return Do.RESET, order.step

    def held(self, content: Batch, began: float) -> None:
        """Note that the segment is held, its content, and when holding began."""
        self._hold_began, self._held, self._count = began, True, content.count
        self._forget_grant()
        if self._order is None or self._order.grant is None:
            return
        self._held_for, self._unshipped = self._order.grant, content
        if content.count == 0:
            self.shipped(self._held_for)

    def shipped(self, grant: int) -> None:
        """Note that the pieces have reached their shards."""
        if self._unshipped is not None and grant == self._held_for:
            self._batch, self._unshipped = self._unshipped, None

    def released(self) -> None:
        """Note that the segment is open again."""
        self._held = False
        self._forget_grant()

    def moved(self) -> None:
        """Note that the segment is empty, at the order's step."""
        if self._order is not None:
            self.fence, self._step = self._order.fence, self._order.step
        self._count = 0
        self._is_finished = False
        self._deaths = ()  # deaths before the last take concern nobody
        self.released()

    def finished(self) -> None:
        """Note that the segment is finished."""
        self._is_finished = True

    def step_set(self) -> None:
        """Note that the segment is at the order's step, and open."""
        if self._order is not None:
            self._step = self._order.step
        self.released()

    def _forget_grant(self) -> None:
        self._held_for = self._unshipped = self._batch = None

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
        # The owner cannot go on without these; a count may be late.
        if _told_at_once(report) != _told_at_once(last):
            return now
        if report.held_for != last.held_for:
            # If the pieces arrive soon, one report tells of both the hold and the batch.
            answer = now if self._unshipped is None else self._hold_began + self._timing.grace / 4
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
            fence=self.fence,
            step=self._step,
            count=self._count,
            held_for=self._held_for,
            batch=self._batch,
            deaths=self._deaths,
            pace=self._pace,
            term=0 if self._order is None else self._order.term,
            finished=self._is_finished,
        )


def _told_at_once(report: Report) -> tuple[object, ...]:
    state = (report.fence, report.step, report.batch)
    return (*state, report.deaths, report.pace, report.finished)
