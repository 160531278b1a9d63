"""The owner: it has the step, counts gradients over all hosts, decides what a round consists of.

    counting --- a chief waits, and enough are reported ---> granted
    granted  --- the batches are there, and enough       ---> block
             --- they are there, or late, and too few    ---> counting
             --- a contributor is in two of them          ---> counting, at the next step (void);
                 once; if it is again, the chief is told, and gets no round
    block    --- its chief leaves it in order             ---> counting, at the next step
             --- it raises, or its chief is lost          ---> counting
             --- set_global_step, advance_step            ---> counting, at once

Every event ends in `_settle`, which takes the transitions that are due; so they do not depend on
which event it was that made them so.
"""

import logging

from shmacc._multihost.counters import Counters
from shmacc._multihost.grant import Grant
from shmacc._multihost.hosts import Host, Hosts, two_with_one_contributor
from shmacc._multihost.line import Line
from shmacc._multihost.messages import (
    Answer,
    BatchKey,
    Conflict,
    Died,
    Ended,
    Fence,
    Finished,
    Loss,
    Member,
    NotReady,
    Opened,
    Order,
    Report,
    Timing,
    Waiting,
)
from shmacc._multihost.places import Places
from shmacc._multihost.withdrawn import Withdrawn

_logger = logging.getLogger("shmacc")


class OwnerCore:
    """The owner.

    Args:
        term: Higher than those of all owners before it.
        step: The step to begin with; None: unknown, until `set_global_step`.
        timing: How long it waits.
        shards: How many there are.
    """

    def __init__(self, term: int, step: int | None, timing: Timing, shards: int = 1) -> None:
        self.counters = Counters()
        self._timing = timing
        self._ready = step is not None
        self._step = step or 0
        self._fence = Fence(term, 0)
        self._set_at = Fence(term, 0)  # the fence at the last set_global_step
        self._serial = 0
        self._hosts = Hosts(term)
        self._places = Places(shards)
        self._line = Line()
        self._conflict: Conflict | None = None  # for which the last step was void
        self._grant: Grant | None = None
        self._block: Opened | None = None  # the head of the queue has it
        self._opening = 0  # the serial that came with it
        self._last_required = 0  # by the last chief that got a block
        self._block_ticket = ""
        self._finished = False
        self._withdrawn = Withdrawn(timing.expiry, first=self._ready)

    @property
    def serial(self) -> int:
        """Changes whenever an order or an answer has changed."""
        return self._serial

    @property
    def is_ready(self) -> bool:
        """Whether the step is known."""
        return self._ready

    @property
    def finished(self) -> bool:
        """Whether there are no more rounds; a block that is open goes on to its end."""
        return self._finished

    @property
    def step(self) -> int:
        """The step."""
        return self._step

    @property
    def fence(self) -> Fence:
        """How often gradients were consumed or dropped."""
        return self._fence

    @property
    def accumulated(self) -> int:
        """How many gradients the next round could have now."""
        return self._hosts.counted(self._fence)[0]

    @property
    def open_round(self) -> Opened | None:
        """The round whose block some chief is in."""
        return self._block

    @property
    def lost(self) -> frozenset[str]:
        """The hosts that are lost: their shards do not answer, and nobody need wait for them."""
        return frozenset(host.name for host in self._hosts if host.lost)

    def hosts(self) -> dict[str, tuple[bool, int]]:
        """Return of each host whether it lives, and how many of its gradients count."""
        return {
            host.name: (not host.lost, host.pending(self._fence))
            for host in self._hosts
            if host.incarnation
        }

    # Hosts

    def enrol(self, host: str, now: float) -> int:
        """Return the incarnation of a forwarder that starts; earlier ones are refused from now."""
        incarnation = self._hosts.enrol(host, now)
        self._changed()
        return incarnation

    def report(self, report: Report, now: float) -> None:
        """Take a report in."""
        if report.term > self._fence.term:
            self._raise_term(report.term + 1)
        host = self._hosts.heard(report, now)
        self._hosts.changed()
        if host is None:
            self.counters.refused_reports += 1
            return
        if host.lost:
            host.lost = False
            self._changed()
        if report.fence == self._fence:
            for death in host.news(report.deaths):
                self.counters.died_workers += len(death.pids)
                self._line.lost(Loss(host.name, *death[1:]))
                self._changed()
        grant, batch = self._grant, report.batch
        if report.finished and report.fence is not None:  # else it may be of an earlier run
            self.finish(now)
        # Grants of different owners may have the same number, fences never.
        at_fence = report.fence == self._fence
        if grant and batch and at_fence and report.sealed_for == grant.number:
            host.member = Member(BatchKey(host.name, host.incarnation, batch.seq), batch)
            self._hosts.changed()
        self._settle(now)

    def order(self, name: str, incarnation: int) -> Order:
        """Return what the host must follow."""
        host = self._hosts.find(name)
        term = self._fence.term
        if host is None or incarnation < host.incarnation:
            return Order(term, self._serial, incarnation, refused=host is not None)
        if not self._ready or host.report is None:
            return Order(term, self._serial, incarnation)
        sealed = self._grant is not None or self._block is not None
        return Order(
            term=term,
            serial=self._serial,
            incarnation=incarnation,
            ready=True,
            fence=self._fence,
            step=self._step,
            hold=sealed,
            finished=self._finished and not sealed,
            grant=self._grant.number if self._grant is not None else None,
            places=self._places.hosts if self._grant is not None else (),
            honoured=host.member.key.seq
            if host.member is not None and host.member.key.incarnation == incarnation
            else None,
            consumed=host.consumed,
            adopt=host.may_be_adopted(self._fence, self._step, self._set_at),
            slack=self._slack(),
            pace=self.pace,
        )

    def has_news(self, name: str, serial: int) -> bool:
        """Whether the host must follow another order than that of `serial`.

        That a block is open is no news to a host that has shipped for its grant: the segment stays
        as it is.
        """
        if self._block is not None and (serial, self._serial) == (self._opening - 1, self._opening):
            host = self._hosts.find(name)
            return host is None or not host.has_committed(self.counters.grants, self._fence)
        return serial != self._serial

    @property
    def pace(self) -> float:
        """By how much slower than at best hosts report: all of them together not too often."""
        return self._timing.pace(self._hosts.counted(self._fence)[1])

    def _slack(self) -> int:
        """Return how much more a host must have for a report at once: O(hosts x log) a round.

        Between two rounds nobody waits. Then, if there are many hosts, the next round is taken to
        require as many as the last one: most orders are given at that time.
        """
        head = self._line.head
        accumulated, living = self._hosts.counted(self._fence)
        if head is not None:
            missing = head.required - accumulated
        else:
            missing = self._last_required - accumulated if self.pace > 1 else 0
        return max(1, missing // (2 * max(1, living)))

    # Chiefs

    def ask(self, ticket: str, required: int, now: float, *, tell: bool = False) -> Answer:
        """Put a chief in the line, or keep it there; return what it has got.

        Args:
            ticket: Unique for ever.
            required: How many gradients it waits for.
            now: The time.
            tell: Whether hosts that are lost, and workers that have died, end its wait.
        """
        if self._ready and not self._finished:
            self._line.ask(ticket, required, now, tell=tell)
            self._settle(now)
        return self.answer(ticket)

    def answer(self, ticket: str) -> Answer:
        """Return what the chief has got."""
        if not self._ready:
            return NotReady()
        found = self._line.find(ticket)
        if found is not None and self._block is not None and self._block_ticket == ticket:
            return self._block
        if self._finished or found is None:
            return Finished() if self._finished else Ended()
        if found.conflict is not None:
            return found.conflict
        if found.lost and self._grant is None:  # a number that is reached is served
            return Died(tuple(found.lost))
        living = tuple(sorted(host.name for host in self._hosts if not host.lost))
        return Waiting(self.accumulated, self._step, living, self.counters.voided)

    def leave(self, ticket: str, now: float, *, consume: bool) -> bool:
        """End a chief's wait or block; return whether its round was consumed.

        The answer to a message that comes again is the same.
        """
        if self._block is not None and self._block_ticket == ticket:
            self._end_block(consume=consume)
            self._line.leave(ticket, served=consume)
        else:
            self._line.leave(ticket, served=False)
        self._settle(now)
        return self._line.served(ticket) is True

    def cancel(self, now: float) -> None:
        """End the wait of every chief in the line; a block that is open goes on."""
        for ticket in self._line.tickets():
            if self._block is None or ticket != self._block_ticket:
                self._line.leave(ticket, served=False)
        self._changed()
        self._settle(now)

    def finish(self, now: float) -> None:
        """End the run, for good: no round is opened from now on; one that is open goes on."""
        if not self._finished:
            self._finished = True
            if self._grant is not None:
                self._withdrawn.add(self._grant.number)
                self._grant = None
            self._changed()
            self._settle(now)

    def missing(self, ticket: str, keys: tuple[BatchKey, ...], now: float) -> None:
        """Take the block back from a chief for which shards did not have these batches.

        Its ticket stays at the head of the queue, and the next grant has these hosts ship again.
        """
        if self._block is None or self._block_ticket != ticket:
            return
        for host in self._hosts.with_batches(keys):
            self._lose_batch(host)
        self._end_block(consume=False)
        self._settle(now)

    def set_global_step(self, step: int, request: str, now: float) -> int:
        """Set the step; gradients stay; a round that is open ends. Return the step before.

        Gradients that a host has accepted before it follows count as having been there before.
        """
        before = self._step
        if self._line.served(request) is None:
            self._line.leave(request, served=True)
            self._ready = True
            self._end_round()
            self._step = step
            self._set_at = self._fence
            self._changed()
            self._settle(now)
        return before

    def advance_step(self, step: int, now: float) -> int:
        """Move the step forward, drop what is there, end a round; return how many were dropped."""
        if step <= self._step and self._ready:
            return 0
        dropped = self.accumulated
        self._ready = True
        self._end_round()
        self._move(step)
        self._settle(now)
        return dropped

    # Time

    def tick(self, now: float) -> None:
        """Do what is due by time."""
        self._settle(now)

    def next_time(self, now: float) -> float:
        """Return when the next `tick` is worth while."""
        timing = self._timing
        times = [now + min(timing.lease, timing.chief_lease) / 4]
        if self._grant is not None:
            times += self._grant.times(timing)
        return min(time for time in times if time > now)

    # Transitions

    def _settle(self, now: float) -> None:
        self._lose_hosts(now)
        self._lose_chiefs(now)
        if self._grant is not None:
            self._close_grant(self._grant, now)
        self._withdrawn.counted(self.accumulated, now)
        head = self._line.head
        busy = self._grant is not None or self._block is not None
        if head is None or not self._ready or busy or self._finished:
            return
        if self.accumulated >= head.required:
            self._place_shards()
        if self.accumulated >= head.required:
            self.counters.grants += 1
            self._grant = Grant(self.counters.grants, now)
            self._changed()
            self._close_grant(self._grant, now)
        elif self._withdrawn.keep_workers_waiting(self._hosts, self._fence, now):
            _logger.warning(
                "Step %d is void: it has too few gradients, and workers wait", self._step
            )
            self.counters.voided += 1
            self._move(self._step + 1)

    def _place_shards(self) -> None:
        """Have all shards on living hosts; batches of which one was elsewhere are shipped again."""
        living = {h.name for h in self._hosts if not h.lost and h.report is not None}
        members = self._hosts.members()
        moved = self._places.settle(living, even=not members)
        away = [member.key for member in members if not moved.isdisjoint(member.batch.shards)]
        for host in self._hosts.with_batches(away):
            self._lose_batch(host)

    def _close_grant(self, grant: Grant, now: float) -> None:
        """End the grant if its batches are there or late."""
        members = self._hosts.members()
        count = sum(member.batch.sealed.count for member in members)
        head = self._line.head
        enough = head is not None and count >= head.required
        if not grant.is_over(self._hosts, self._fence, now, self._timing, enough=enough):
            return
        self._grant = None
        self._changed()
        if self._has_contested(members):
            return
        if enough and head is not None:
            self._block = Opened(self._fence, self._step, tuple(members), self._places.hosts)
            self._opening, self._last_required = self._serial, head.required
            self._block_ticket = head.name
        else:
            self._withdraw(grant)

    def _withdraw(self, grant: Grant) -> None:
        self._grant = None
        self.counters.withdrawn += 1
        self._withdrawn.add(grant.number)
        self._changed()

    def _has_contested(self, members: list[Member]) -> bool:
        """Drop a lost host's batch, or void the step, if a contributor is in two batches."""
        found = two_with_one_contributor(members)
        if found is None:
            return False
        contributor, *keys = found
        dead = [host for host in self._hosts.with_batches(keys) if host.lost]
        for host in dead:
            self._lose_batch(host)
        if not dead:
            one, two = (key.host for key in keys)
            _logger.warning(
                "Step %d is void: hosts %s and %s have both accepted contributor %d",
                self._step,
                one,
                two,
                contributor,
            )
            self.counters.voided += 1
            head, last = self._line.head, self._conflict
            self._conflict = Conflict(contributor, (one, two))
            if head is not None and last is not None and last.contributor == contributor:
                # Told; what the one that is ended now has left behind is no reason to tell again.
                head.conflict, self._conflict = self._conflict, None
            self._move(self._step + 1)
        return True

    def _lose_batch(self, host: Host) -> None:
        """Drop a batch; so the grants until now have not got enough for a round after all."""
        host.member = None
        self._hosts.changed()
        self.counters.lost_batches += 1
        self._withdrawn.add_all(self.counters.grants)

    def _end_block(self, *, consume: bool) -> None:
        block, self._block = self._block, None
        self._changed()
        if not consume or block is None:
            return
        self.counters.rounds += 1
        self.counters.gradients += block.count
        self._line.consumed()
        self._conflict = None
        consumed = {member.key.host: member for member in block.members}
        self._move(self._step + 1)
        for host in self._hosts:
            if (member := consumed.get(host.name)) and member.key.incarnation == host.incarnation:
                host.consumed = member.key.seq

    def _end_round(self) -> None:
        """End whatever is open, at once; the chief in its block finds its ticket ended."""
        if self._block is not None:
            self._line.leave(self._block_ticket, served=False)
        if self._grant is not None:
            self._withdrawn.add(self._grant.number)
        self._block = self._grant = None

    def _move(self, step: int) -> None:
        """Move the step and the fence on: no gradient that was accepted before counts any more."""
        self._fence = Fence(self._fence.term, self._fence.number + 1)
        self._step = step
        self._withdrawn.moved(self.counters.grants)
        self._hosts.forget_batches()
        self._changed()

    def _raise_term(self, term: int) -> None:
        """Go on as a later owner: the clock is behind that of an earlier one, whom hosts follow.

        What is open ends. Hosts that know this owner's fence already are to it as those of an
        earlier owner: they keep their gradients if they are at its step.
        """
        self._end_round()
        self._fence = self._set_at = Fence(term, 0)
        self._hosts.begin_term(term)
        self._changed()

    def _lose_hosts(self, now: float) -> None:
        for host in self._hosts.silent(now, self._timing):
            host.lost = True
            self.counters.lost_hosts += 1
            self._line.lost(Loss(host.name))
            self._changed()
            if self._grant is not None and host.name in self._places.hosts:
                self._withdraw(self._grant)  # nobody gets a piece to its shards

    def _lose_chiefs(self, now: float) -> None:
        for ticket in self._line.silent(now - self._timing.chief_lease):
            if self._block is not None and self._block_ticket == ticket:
                self._end_block(consume=False)
            self._line.leave(ticket, served=False)
            self.counters.lost_chiefs += 1
            self._changed()

    def _changed(self) -> None:
        self._hosts.changed()
        self._serial += 1
