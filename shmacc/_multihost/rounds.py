"""The owner's state and its transitions: when a grant, a round or a new step begins.

    counting --- enough gradients for a waiting chief ---> granted
    granted  --- batches with enough gradients came   ---> block
             --- batches have too few, or a host with ---> granted again, if hosts have enough now;
                 a shard is lost                           else counting, at the next step (void)
             --- a host does not reach a shard        ---> as above, when the grant expires; ends of
                                                           cut links get no shards for a while
             --- a contributor is in two batches      ---> counting, at the next step (void); the
                 second time before a round, the chief gets an error instead of a round
    block    --- it ends without an exception         ---> counting, at the next step
             --- it raises, or its chief is lost      ---> counting, at the same step
             --- shards have lost their pieces        ---> as for batches with too few gradients
             --- set_global_step, advance_step        ---> counting, at once
    counting --- in doubt, and nothing comes          ---> counting, at the next step (void)

With parameters, there are also transitions for their copies on all hosts (copies.py):

    learning --- all hosts have answered              ---> counting; without copies a restore first
    block    --- its update is committed              ---> final: the round ends, whoever dies
    counting --- a restore is committed               ---> counting, at a higher step (void)
             --- a segment is ahead, or at this step  ---> counting, at a higher step (void)
                 with a wrong copy
             --- no host has the owner's lineage      ---> learning, in a new term

Every event ends in `tick`, which takes all transitions that are due, whatever their reason.
"""

import logging
import secrets
from collections.abc import Callable

from shmacc._multihost.changes import Change
from shmacc._multihost.copies import Copies
from shmacc._multihost.counters import Counters
from shmacc._multihost.hosts import NUMBER_BITS, Grant, Hosts, at_two_hosts
from shmacc._multihost.messages import (
    LAST_STEP,
    Conflict,
    Ended,
    Fence,
    HostBatch,
    Loss,
    Opened,
    Timing,
    Told,
)
from shmacc._multihost.wait_queue import Ticket, WaitQueue

_logger = logging.getLogger("shmacc")

TERM_BITS = 20
"""How many low bits of a term are random, so that no two owners have the same term."""


class Rounds:
    """The owner's state and decisions.

    Args:
        term: A term higher than the terms of all earlier owners.
        step: The step to begin with; None: unknown, until `set_global_step`.
        timing: How long the owner waits, for each kind of wait.
        shards: The number of shards.
        copies: Whether each host has a copy of parameters. Then the step is learned from the hosts.
        home: The owner's host.
        shown: Returns what warnings call a host, given its name.

    Attributes:
        gone: Hosts that will not come back once they are lost, as far as the driver knows.
    """

    def __init__(
        self,
        term: int,
        step: int | None,
        timing: Timing,
        shards: int = 1,
        *,
        copies: bool = False,
        home: str | None = None,
        shown: Callable[[str], str] = str,
    ) -> None:
        self.counters = Counters()
        self._timing = timing
        self._shards = shards
        self._shown = shown
        self.gone: set[str] = set()
        self.has_copies = copies
        self.copies = Copies(copies, shown)
        self.has_resigned = False  # a later owner leads, and this one must end
        self.is_ready: bool = step is not None
        self.step: int = step or 0
        self.fence = Fence(term, 0)
        self._set_at = self.fence  # the fence at the last set_global_step
        self.serial = 0  # is raised whenever an order or an answer has changed
        self._hosts = Hosts(term, home)
        self._queue = WaitQueue()
        self._conflicts: frozenset[int] = frozenset()  # contributors that made steps void
        self._grant: Grant | None = None
        self._last_grant = term << NUMBER_BITS
        self.block: Opened | None = None  # the round that the head of the queue has
        self._block_ticket = ""
        self._last_required = 0  # how many gradients the last chief that got a block required
        self.finished = False
        self._chiefless = False  # whether the last chief was lost, and none has come since
        # Whether workers may be waiting for a new step although this step lacks their gradients:
        # these were dropped without a new step, or refused during a grant that led to no round.
        self._in_doubt = not self.is_ready
        self._granted = False  # whether there was a grant at this fence
        # The numbers of gradients and of hosts seen last by `_is_stuck`, and when they changed.
        self._seen: tuple[tuple[int, int], float] | None = None

    @property
    def accumulated(self) -> int:
        """How many gradients the next round could have now."""
        return self._hosts.counted(self.fence)[0]

    @property
    def lost(self) -> frozenset[str]:
        """The lost hosts: their shards do not answer, and nobody needs to wait for them."""
        return frozenset(host.name for host in self._hosts if host.lost)

    def hosts(self) -> dict[str, tuple[bool, int, int | None]]:
        """Return for each host whether it lives, how many of its gradients count, and its step."""
        found: dict[str, tuple[bool, int, int | None]] = {}
        for host in self._hosts:
            step = None if host.report is None or host.report.step < 0 else host.report.step
            found[host.name] = not host.lost, host.pending(self.fence), step
        return found

    def next_time(self, now: float) -> float:
        """Return the time by which the driver must call `tick` again."""
        rest = min(self._timing.lease, self._timing.chief_lease) / 4
        times = [] if self._grant is None else self._grant.times(self._timing)
        return min([now + rest, *(time for time in times if time > now)])

    def tick(self, now: float) -> None:
        """Take the transitions that are due, by events or by time."""
        # Losses come first: `_close_grant` below must know whether a shard is lost.
        self._lose_hosts(now)
        self._lose_chiefs(now)
        self._tend_copies(now)
        if self._grant is not None:
            self._close_grant(self._grant, now)
        # `_is_stuck` measures time only while a chief waits: forget the time if none does.
        if not self._wants_round():
            self._seen = None
        elif self._is_enough():
            # Wait for hosts that get a whole copy: too many updates meanwhile would outdate it.
            if not any(host.gets_copy(now - self._timing.expiry) for host in self._hosts):
                self._make_grant(now)
        elif self._in_doubt and self._is_stuck(now):
            self._void("nothing comes after an owner's death or a new step")

    def _is_stuck(self, now: float) -> bool:
        """Whether nothing new has come for `chief_lease`, although hosts follow the step."""
        seen = self.accumulated, sum(host.is_at(self.fence) for host in self._hosts)
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, now
        return seen[1] > 0 and now - self._seen[1] >= self._timing.chief_lease

    def _tend_copies(self, now: float) -> None:
        """Take the transitions of the parameters' copies that are due."""
        copies, change, reports = self.copies, self.copies.change, self._hosts.reports
        if copies.is_learning:
            step = copies.learn(reports, self.fence.term, now)
            if step is not None:
                self.step, self.is_ready = step, copies.lineage is not None
                self._changed()
        elif change is not None and change.committed:
            self._tend_committed(change, now)
        elif change is not None:
            self._tend_staged(change, now)
        elif self.is_ready and self._grant is None and self.block is None:
            if copies.is_nowhere(reports, self.fence.term):
                self._begin_learning()
            elif (step := copies.ahead(reports, self.step)) is not None:
                self._void("a host's segment is ahead, or has another copy of the parameters", step)
        self._hosts.note_line(copies.has, now)

    def _tend_staged(self, change: Change, now: float) -> None:
        copies, reports = self.copies, self._hosts.reports
        silent = change.is_whole and now - change.heard > self._timing.chief_lease
        refused = change.refusal(reports)
        if silent or refused is not None:
            copies.end(refused or Ended())
            self._changed()
        elif change.ask_more(reports, now, self._timing.lease):
            self._changed()
        elif change.can_be_committed(reports, now, self._timing.lease):
            copies.commit(change, reports, now)
            self.is_ready = True
            self._changed()
            if change.is_whole:
                self._move(change.stage.step)

    def _tend_committed(self, change: Change, now: float) -> None:
        copies, reports = self.copies, self._hosts.reports
        if change.is_whole and now - change.heard > self._timing.chief_lease:
            change.left = True
        if copies.learn_digest(change, reports):
            self._changed()
        if copies.is_everywhere(change, reports, now, self._timing.lease):
            if change.is_whole:
                copies.end(Told())
                self._changed()
            elif change.left:
                self._consume_block()
            elif copies.answered(change.call) is None:
                copies.note(change.call, Told())
                self._changed()
        elif copies.is_nowhere(reports, self.fence.term):
            self._begin_learning()
        elif change.is_whole and (step := copies.ahead(reports, self.step)) is not None:
            self._move(step)
        elif not change.left and (refused := copies.outcome_at_home(change, reports)) is not None:
            change.left = True  # the other hosts make it
            copies.note(change.call, refused)
            self._changed()

    def _begin_learning(self) -> None:
        """Learn the step as a new owner does, since no host has this owner's lineage any more."""
        self.copies.learn_again()
        self.is_ready = False
        self._raise_term(self._later_term(self.fence.term))

    @staticmethod
    def _later_term(term: int) -> int:
        """Return a higher term that no other owner chooses, since its low bits are random."""
        return ((term >> TERM_BITS) + 1 << TERM_BITS) + secrets.randbits(TERM_BITS)

    @property
    def _head(self) -> Ticket | None:
        """The ticket served next. With parameters, its chief's host must be at this fence."""
        if not self.has_copies:
            return self._queue.first()
        return self._queue.first({host.name for host in self._hosts if host.is_at(self.fence)})

    def _wants_round(self) -> bool:
        may = self.is_ready and self.step < LAST_STEP and not self.finished
        return self._head is not None and may and not self._is_busy

    @property
    def _is_busy(self) -> bool:
        """Whether a grant, a block, or a change of the copies is under way."""
        return any(each is not None for each in (self.copies.change, self._grant, self.block))

    def _is_enough(self) -> bool:
        head = self._head
        return head is not None and self.accumulated >= head.required

    def _make_grant(self, now: float) -> None:
        self.counters.grants += 1
        self._last_grant += 1
        self._granted = True
        self._grant = Grant(self._last_grant, now, self._hosts.shard_hosts(self._shards, now))
        self._changed()
        self._close_grant(self._grant, now)

    def _close_grant(self, grant: Grant, now: float) -> None:
        """End the grant if its batches have come or are late, or if a shard is lost."""
        members = self._hosts.members(grant.number)
        head = self._head
        enough = head is not None and sum(m.batch.count for m in members) >= head.required
        cut = not self.lost.isdisjoint(grant.shard_hosts)  # some of its shards get no pieces
        if not cut and not grant.is_over(self._hosts, now, self._timing, enough=enough):
            return
        if now - grant.since >= self._timing.expiry:
            self._hosts.note_cuts(grant, now, self._timing)
        self._grant = None
        self._changed()
        if not cut and enough and head is not None:
            # Each host refuses a contributor's second gradient, but two hosts may accept one each.
            if found := at_two_hosts(members):
                self._void_for(head, found)
                return
            given = members, grant.shard_hosts, self.copies.lineage
            self.block = Opened(self.fence, self.step, *given)
            self._last_required = head.required
            self._block_ticket = head.name
        else:
            self.counters.withdrawn += 1
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Make another grant after one that led to no round; the hosts stay held meanwhile.

        While hosts hold, they refuse gradients, which never come again. So if there are too few
        gradients now, the step is void. But if a forwarder has just started, nobody knows its
        segment's content yet, so a new grant waits for its first report.
        """
        if self._wants_round():
            if self._is_enough() or any(host.is_coming for host in self._hosts):
                self._make_grant(now)
            else:
                self._void("it has too few gradients after losses, and workers wait")

    def _void_for(self, chief: Ticket, found: dict[int, tuple[str, str]]) -> None:
        """Make the step void: contributors are at two hosts. The second time, tell the chief."""
        again = self._conflicts.intersection(found)
        who = min(again or found)
        if again:
            # Tell the chief only once: it then ends one of the two processes, and a last gradient
            # of this process may still cause another conflict.
            chief.conflict, self._conflicts = Conflict(who, found[who]), frozenset()
        else:
            self._conflicts = self._conflicts.union(found)
        one, two = map(self._shown, found[who])
        self._void(f"hosts {one} and {two} have both accepted contributor {who}")

    def _void(self, why: str, step: int | None = None) -> None:
        """Move on without a round, to `step` (None: to the next step)."""
        _logger.warning("Step %d is void: %s", self.step, why)
        self.counters.voided += 1
        self._move(self.step + 1 if step is None else step)

    def _end_block(self, *, consume: bool) -> bool:
        """End the block; return whether its round is consumed by this call.

        Once its update is committed, the round is consumed in any case: now, if its chief leaves
        in order and knows that all hosts have the update; else once all do (`_tend_committed`).
        """
        change = self.copies.change
        if change is not None and change.committed:
            if not (consume and isinstance(self.copies.answered(change.call), Told)):
                change.left = True
                self._changed()
                return False
        elif change is not None:
            consume = False  # its update has not been made
        if consume:
            self._consume_block()
        else:
            self.copies.end(Ended())
            self.block = None
            self._changed()
        return consume

    def _consume_block(self) -> None:
        block, self.block = self.block, None
        self.copies.end(Ended())
        self._queue.leave(self._block_ticket, served=True)
        if block is not None:
            self.counters.rounds += 1
            self.counters.gradients += block.count
            self._queue.consumed()
            self._conflicts = frozenset()
            self._move(self.step + 1, block.members)

    def _end_round(self) -> None:
        """End an open grant or block at once; the chief in the block finds its ticket ended."""
        self.copies.end(Ended())
        if self.block is not None:
            self._queue.leave(self._block_ticket, served=False)
        # Hosts that were held have refused gradients, whose workers now wait for a new step.
        self._in_doubt |= self._granted
        self.block = self._grant = None

    def _move(self, step: int, consumed: tuple[HostBatch, ...] = ()) -> None:
        """Move step and fence on: gradients that were accepted before do not count any more."""
        self.fence = Fence(self.fence.term, self.fence.number + 1)
        self.step = step
        self._in_doubt = self._granted = False
        self._hosts.consumed(consumed)
        self._changed()

    def _raise_term(self, term: int) -> None:
        """Change to a later term, since hosts know a later one, or this owner must learn again.

        An open round or grant ends. Hosts at a fence of the old term are treated like an earlier
        owner's hosts: they keep their gradients if they are at this owner's step.
        """
        self._end_round()
        self.fence = self._set_at = Fence(term, 0)
        self._last_grant = term << NUMBER_BITS
        self._hosts.begin_term(term)
        self._changed()

    def _lose_hosts(self, now: float) -> None:
        for host in self._hosts.silent(now, self._timing):
            host.lost = True
            self.counters.lost_hosts += 1
            self._queue.lost(Loss(host.name))
            self._in_doubt |= self._granted
            self._changed()

    def _lose_chiefs(self, now: float) -> None:
        for ticket in self._queue.silent(now - self._timing.chief_lease):
            if self.block is not None and self._block_ticket == ticket:
                self._end_block(consume=False)
            self._queue.leave(ticket, served=False)
            self.counters.lost_chiefs += 1
            self._chiefless = not self._queue.tickets()
            self._changed()

    def _changed(self) -> None:
        self._hosts.changed()
        self.serial += 1
