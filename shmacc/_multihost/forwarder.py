"""The forwarder: it makes a host's segment follow the owner's orders.

Its driver asks for the next action, does it, and says that it is done. It does one action on the
segment at a time. Shipping (sending sums to shards) may take long, and a new order may come
meanwhile: so the driver passes the grant to `shipped`, which ignores all but the current grant.

If the group has parameters, the host has a copy of them. The copy changes first, the segment
afterwards, so that a worker never sees a step before its parameters. `next_change` says what to do
with the copy. This takes long, too, and the driver does one such change at a time. While the copy
changes, the forwarder follows no later owner: it would report a copy that is just being changed.
The copy changes, and gradients are dropped, only if the segment's step rises, too: `apply` refuses
only lower steps, so at the same step it would accept a gradient computed from the old copy.
"""

from dataclasses import replace
from enum import Enum, auto

from shmacc._base.lineage import Copy
from shmacc._multihost.changes import same
from shmacc._multihost.messages import (
    Batch,
    Death,
    Fence,
    Order,
    Refusal,
    Report,
    Stage,
    Timing,
)

_QUIET = 5.0  # after this many seconds without news, reports become rare


class Do(Enum):
    """What the driver must do; then it calls `done`, or the method in brackets."""

    HOLD = auto()  # open a round of the segment if none is open; then report its content (`held`)
    SHIP = auto()  # send that content to the shards in pieces, for a grant (`shipped`)
    RELEASE = auto()  # give the segment's round up: nothing is consumed
    CONSUME = auto()  # consume the segment's round, which moves its step on by one
    RESET = auto()  # empty the segment and set its step, in one commit
    SET_STEP = auto()  # set the segment's step; gradients stay, its round ends
    FINISH = auto()  # finish the segment
    STOP = auto()  # a later incarnation is at work: give the segment's round up, and end


Action = tuple[Do, int]
"""What to do, and a number: the grant with SHIP, the step with RESET and SET_STEP, else 0."""


class Get(Enum):
    """What the driver must do with the copy; then it calls the method in brackets."""

    STAGE = auto()  # get a change, and check it (`staged` or `refused`)
    MAKE = auto()  # make the change that was staged (`changed`)
    REPLACE = auto()  # make all later changes of the order's source, or get its copy (`changed`)


class ForwarderCore:
    """The forwarder of one host."""

    def __init__(
        self,
        host: str,
        incarnation: int,
        timing: Timing,
        copy: Copy | None = None,  # of the parameters; None: the group has none
        promise: int = 0,  # the highest term of an owner that this host has answered
        copies: int = 0,  # how many hosts had the owner's lineage when this host last had it
    ) -> None:
        self._host = host
        self._incarnation = incarnation
        self._timing = timing
        self._copy = copy
        self._promise = promise
        self.stage: Stage | None = None  # the change that this host has got, and can make
        self._refused: Refusal | None = None
        self._problem = ""
        self.nameless = ""  # the problem to report once the segment's name was removed
        self.copies = copies  # the driver stores this number beside the copy
        self._getting: Get | None = None  # what is being done with the copy
        self._whole = False  # whether another host's whole copy is being got
        self._order: Order | None = None
        self.fence: Fence | None = None  # the content is of this fence; None: not known yet
        self._step = 0
        self._count = 0
        self._is_finished = False
        self._held = False
        self._held_for: int | None = None  # the grant that the segment was last held for
        self._unshipped: Batch | None = None  # held for that grant, and not shipped yet
        self._batch: Batch | None = None  # shipped for that grant
        self._unreached: frozenset[str] = frozenset()  # hosts that lack pieces of `_unshipped`
        self._hold_began = float("-inf")
        self._deaths: tuple[Death, ...] = ()  # noticed at this fence
        self._death_number = 0
        self._number = 0
        self._reported_at = float("-inf")
        self._reported: Report | None = None
        self._news_at = float("-inf")  # when the last report with something new was made
        self._usual = 0  # gradients in the last round's batch
        self._moved: tuple[Fence | None, float] = None, 0.0  # a fence, and since when it is current
        self._waits: tuple[object, float] = None, 0.0  # what is to be reported, and since when
        self._lag = 0.0  # seconds from a fence until its first count was reported

    @property
    def shard_hosts(self) -> tuple[str, ...]:
        """The host of each shard, as the last order says; empty: there is nothing to ship."""
        return () if self._order is None else self._order.shard_hosts

    @property
    def has_answer_to_come(self) -> bool:
        """Whether a report will come soon: an order is being carried out, or there is news."""
        last = self._reported
        ships = self._unshipped is not None and self._held_for != (last and last.held_for)
        return ships or self._getting is not None or (last is not None and last.fence != self.fence)

    @property
    def _pace(self) -> float:
        return 1.0 if self._order is None else self._order.pace

    def may_follow(self, order: Order) -> bool:
        """Whether to accept an order now: while the copy changes, accept none of a later term."""
        return order.term <= self._promise or self._getting in {None, Get.STAGE}

    def receive(self, order: Order) -> None:
        """Accept an order; ignore an old order, or one for another incarnation.

        Before it passes an order with a later term, the driver stores the term where it outlives
        the process (`promise`). So no later incarnation follows an earlier owner.
        """
        last = self._order
        if order.incarnation != self._incarnation or order.term < self._promise:
            return
        if last is None or (order.term, order.serial) >= (last.term, last.serial):
            if order.term > self._promise:
                self._promise, self.stage = order.term, None
            self._order = order
            self._deaths = tuple(death for death in self._deaths if death.number not in order.told)
            if self._copy is not None and self._is_in_line(order):
                self.copies = order.copies

    def observe(self, step: int, count: int, *, finished: bool = False) -> None:
        """Note the segment's step and number of gradients; call it before each `next_action`."""
        self._step, self._count, self._is_finished = step, count, finished

    def is_passed_by(self, step: int) -> bool:
        """Whether another process of the host has moved the segment on to this later step.

        Then the segment may have kept gradients of earlier steps, which may be in a round already.
        """
        return self._copy is not None and self.fence is not None and step > self._step

    def died(
        self,
        pids: tuple[int, ...],
        contributors: tuple[int, ...],
        reasons: tuple[str, ...] = (),
    ) -> None:
        """Note that workers have died or failed.

        If this forwarder dies before it reports them, no chief learns of them: a segment reports
        each death only once.
        """
        self._death_number += 1
        self._deaths += (Death(self._death_number, pids, contributors, reasons),)

    # Actions, and notes that they are done

    def next_action(self) -> Action | None:
        """Return what the driver must do now; None: nothing until the next order."""
        order = self._order
        if order is None or not (order.ready or order.refused):
            return None
        if order.refused:
            return Do.STOP, 0
        if not self._is_in_line(order):
            return None
        if self._is_finished and not order.finished and self.fence != order.fence:
            # A process of the host has finished the run, and the owner may not know it yet. A reset
            # would begin the segment anew, and lose the fact that the run is finished.
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

    def _is_in_line(self, order: Order) -> bool:
        """Whether the segment may follow the order: the host has the copy that the order wants."""
        copy, wanted = self._copy, order.lineage
        if copy is None:
            return True
        return wanted is not None and same(copy.lineage, wanted) and copy.begun <= order.step

    def _next_move(self, order: Order) -> Action | None:
        """Return the next action that takes the segment to the order's fence and step."""
        if self._copy is not None and order.step < self._step:
            return None  # the owner will move past the segment's step
        if self.fence == order.fence:
            return None if self._step == order.step else (Do.SET_STEP, order.step)
        is_other = self.fence is None or self.fence.term != order.term
        # With parameters, gradients of this step and copy count, whatever their fence.
        if order.adopt and self._step == order.step and (is_other or self._copy is not None):
            self.fence = order.fence
            self._forget_grant()
            return None
        if (
            not is_other
            and self._held
            and self._batch is not None
            and order.consumed == self._held_for
            and order.step == self._step + 1
        ):
            return Do.CONSUME, 0
        return Do.RESET, order.step

    def next_change(self) -> tuple[Get, Order] | None:
        """Return what to do with the copy, and for which order; None: nothing, or not yet."""
        order, copy, staged = self._order, self._copy, self.stage
        if order is None or copy is None or self._getting is not None:
            return None
        get, wanted, stage = None, order.lineage, order.stage
        if wanted is not None and not same(copy.lineage, wanted):
            may_replace = order.step > self._step
            if staged is not None and staged.update == wanted[:2] and self._can_make(staged, order):
                get = Get.MAKE
            elif order.source and may_replace:
                get = Get.REPLACE
        if get is None and stage is not None and stage.parent in {None, copy.lineage}:
            seen = {staged and staged.update, self._refused and self._refused.update}
            get = None if stage.update in {*seen, copy.lineage[:2]} else Get.STAGE
        self._getting = get
        return None if get is None else (get, order)

    def _can_make(self, staged: Stage, order: Order) -> bool:
        """Whether the change is for this copy, and raises the segment's step."""
        if staged.parent is None:
            return order.step > self._step
        copy = self._copy
        return copy is not None and copy.lineage == staged.parent and staged.step > self._step

    def wants(self, stage: Stage) -> bool:
        """Whether the owner still wants the host to get this change. Any thread may call it."""
        order = self._order
        return order is not None and order.stage is not None and order.stage.update == stage.update

    def follows(self, order: Order) -> bool:
        """Whether the copy must still get this order's lineage. Any thread may call it."""
        last = self._order
        return last is not None and last.lineage == order.lineage

    def want_nothing(self) -> None:
        """Forget the last order, so that nothing is to be done."""
        self._order = None

    def staged(self, stage: Stage) -> None:
        """Note that this host has got a change and can make it."""
        self._getting, self.stage = None, stage

    def refused(self, update: Fence, error: Exception | None) -> None:
        """Note that this host cannot make a change, or (`error` is None) cannot get the change."""
        self._getting, self._refused = None, Refusal(update, error)

    def gets_whole(self) -> None:
        """Note that the source lacks old updates, so that this host gets the source's whole copy.

        Any thread may call it.
        """
        self._whole = True

    def changed(self, copy: Copy, refused: Refusal | None = None) -> None:
        """Note the state of the copy after a try to change it; `refused`: why the try failed."""
        self._getting, self._copy, self._whole = None, copy, False
        self._refused = refused or self._refused

    def noticed(self, copy: Copy, problem: str = "") -> None:
        """Note the copy's state, since other processes may change it, and what is wrong with it."""
        if self._getting is None:
            self._copy, self._problem = copy, problem

    def held(self, content: Batch, began: float) -> None:
        """Note that the segment is held, its content, and when holding began."""
        self._hold_began, self._held, self._count = began, True, content.count
        self._forget_grant()
        if self._order is None or self._order.grant is None:
            return
        self._held_for, self._unshipped = self._order.grant, content
        if content.count == 0:
            self.shipped(self._held_for)

    def shipped(self, grant: int, unreached: frozenset[str] = frozenset()) -> None:
        """Note that the pieces have reached their shards, except for those on `unreached` hosts."""
        if self._unshipped is not None and grant == self._held_for:
            self._unreached = unreached
            if not unreached:
                self._batch, self._unshipped = self._unshipped, None

    def done(self, action: Do) -> None:
        """Note that an action is done: FINISH leaves the segment finished, the others open."""
        if action is Do.FINISH:
            self._is_finished = True
            return
        if action in {Do.CONSUME, Do.RESET} and self._order is not None:
            self.fence, self._step = self._order.fence, self._order.step
            self._usual = 0 if self._batch is None else self._batch.count
            self._count = 0
            self._is_finished = False
            self._deaths = ()  # no chief needs to know of deaths before the last take
        self._held = False
        self._forget_grant()

    def _forget_grant(self) -> None:
        self._held_for = self._unshipped = self._batch = None
        self._unreached = frozenset()

    # Reports

    def report_due(self, now: float) -> float:
        """Return when the next report is due; if not later than `now`, it is due at once.

        Each report costs the owner time, so there are few. The end of a host's round needs no
        report of its own: the report of its next gradients contains it. A count that has become as
        high as in the last round is reported at once; a lower count is reported a little later.
        """
        last = self._reported
        if last is None:
            return now
        report = self._make(last.number)
        heartbeat = self._timing.heartbeat * self._pace
        announce = self._timing.announce * self._pace
        if report == last:
            is_quiet = now - self._news_at >= _QUIET
            return self._reported_at + (self._timing.quiet(self._pace) if is_quiet else heartbeat)
        if self._getting is Get.MAKE:  # one report will announce both: received and made
            last = replace(last, staged=report.staged)
        has_moved = report.fence != last.fence
        if has_moved and self._usual:
            last = _moved(last, report)
        grown = report.count - last.count
        if self._moved[0] != report.fence:
            self._moved = report.fence, now
        if self._waits[0] != (waits := (last.number, report.fence, grown > 0)):
            self._waits = waits, now
        since = self._waits[1]
        # Counts may be reported late. The owner needs changes of most other fields at once.
        if _told_at_once(report) != _told_at_once(last):
            return now
        if report.held_for != last.held_for:
            # Wait a little for the pieces to arrive: then one report announces hold and batch.
            answer = now if self._unshipped is None else self._hold_began + self._timing.grace / 4
            return min(answer, self._reported_at + self._timing.patience(self._pace) / 4)
        if last.count < self._usual <= report.count:
            return now
        slack = 1 if self._order is None else self._order.slack
        late = min(2 * self._lag if has_moved and not grown else 4 * announce, heartbeat)
        return since + (announce if grown >= slack else late)

    def report(self, now: float) -> Report:
        """Return the report to send now."""
        self._number += 1
        last, self._reported = self._reported, self._make(self._number)
        self._reported_at = now
        if self._count and (last is None or not last.count or last.fence != self.fence):
            self._lag = now - self._moved[1]
        if last is None or self._make(last.number) != last:
            self._news_at = now
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
            unreached=self._unreached,
            deaths=self._deaths,
            pace=self._pace,
            term=self._promise,
            finished=self._is_finished,
            copy=self._copy,
            staged=None if self.stage is None else self.stage.update,
            refused=self._refused,
            copies=self.copies,
            problem=self._problem or self.nameless,
            whole=self._whole,
        )


def _told_at_once(report: Report) -> Report:
    return replace(report, number=0, count=0, held_for=None, unreached=frozenset(), copies=0)


def _moved(report: Report, later: Report) -> Report:
    """Return `report` as it would be if only the end of the host's round had changed it."""
    over = replace(report, fence=later.fence, step=later.step, count=0, batch=None, deaths=())
    return replace(over, held_for=None, unreached=frozenset())
