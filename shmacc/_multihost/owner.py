"""The owner: how it answers the messages of hosts and chiefs.

It keeps the step, counts gradients over all hosts, and decides what a round has (rounds.py).
"""

from shmacc._multihost.copies import ChangeAnswer, Copies
from shmacc._multihost.messages import (
    LAST_STEP,
    Answer,
    AtLastStep,
    Died,
    Ended,
    Finished,
    Loss,
    NotReady,
    Order,
    Report,
    Staging,
    Told,
    Waiting,
)
from shmacc._multihost.rounds import Rounds
from shmacc.errors import FailedPreconditionError


class OwnerCore(Rounds):
    """The owner of a group over hosts; arguments as for `Rounds`."""

    # Hosts

    def enrol(self, host: str, now: float) -> int:
        """Return the incarnation of a forwarder that starts; earlier ones are refused then."""
        incarnation = self._hosts.enrol(host, now)
        self._changed()
        return incarnation

    def report(self, report: Report, now: float) -> None:
        if report.term > self.fence.term:
            if self.copies is not None and not self.copies.is_learning:
                self.has_resigned = True  # two owners would lead two lines
                self._changed()
                return
            self._raise_term(self._later_term(report.term))
        host = self._hosts.heard(report, now)
        self._hosts.changed()
        if host is None:
            self.counters.refused_reports += 1
            return
        if host.lost:
            host.lost = False
            self._changed()
        if report.fence == self.fence:
            for death in host.news(report.deaths):
                self.counters.died_workers += len(death.pids)
                self._queue.lost(Loss(host.name, *death[1:]))
                self._changed()
        if report.finished:
            self.finish(now)
        self.tick(now)

    def order(self, name: str, incarnation: int) -> Order:
        host = self._hosts.find(name)
        term = self.fence.term
        if host is None or incarnation < host.incarnation:
            return Order(term, self.serial, incarnation, refused=host is not None)
        copies, report = self.copies, host.report
        if report is None or (copies is None and not self.is_ready):
            return Order(term, self.serial, incarnation)
        adopt = host.may_be_adopted(self.fence, self.step, self._set_at)
        if report.fence != self.fence and report.step == self.step and not adopt:
            self._in_doubt = True  # its segment is emptied; its workers wait for a new step
        held = self._grant is not None or self.block is not None
        return Order(
            term=term,
            serial=self.serial,
            incarnation=incarnation,
            ready=self.is_ready,
            fence=self.fence,
            step=self.step,
            hold=held,
            finished=self.finished and not held,
            grant=None if self._grant is None else self._grant.number,
            shard_hosts=() if self._grant is None else self._grant.shard_hosts,
            consumed=host.consumed,
            adopt=adopt,
            slack=self._slack(),
            pace=self.pace,
            lineage=None if copies is None else copies.lineage,
            stage=None if self._change is None else self._change.stage,
            source=None if copies is None else copies.source(self._hosts.reports, report),
            copies=0 if copies is None else copies.count(self._hosts.reports),
        )

    def has_news(self, name: str, serial: int) -> bool:
        """Whether the host must follow another order than the one with this `serial`.

        A host that has shipped for a block's grant need not learn that the block is open: its
        segment stays as it is.
        """
        if self.block is not None and (serial, self.serial) == (self._opening - 1, self._opening):
            host = self._hosts.find(name)
            return host is None or host.batch(self._last_grant) is None
        return serial != self.serial

    @property
    def pace(self) -> float:
        """The factor by which hosts report more rarely than usual, to spare an owner with many."""
        return self._timing.pace(self._hosts.counted(self.fence)[1])

    def _slack(self) -> int:
        """Return how many new gradients are worth a report at once.

        Between two rounds no chief waits, yet most orders are given then. So if there are many
        hosts, this assumes that the next round requires as many gradients as the last one.
        """
        head = self._head
        accumulated, living = self._hosts.counted(self.fence)
        if head is not None:
            missing = head.required - accumulated
        else:
            missing = self._last_required - accumulated if self.pace > 1 else 0
        return max(1, missing // (2 * max(1, living)))

    # Chiefs

    def ask(
        self, ticket: str, required: int, now: float, *, host: str = "", tell: bool = False
    ) -> Answer:
        """Put a chief of this host in the queue, or keep it there; return the answer for it."""
        if (self.is_ready or self.is_learning) and not self.finished:
            self._queue.ask(ticket, required, host, now, tell=tell)
            self.tick(now)
        return self.answer(ticket)

    @property
    def is_learning(self) -> bool:
        """Whether the step is not known yet, but will be."""
        return self.copies is not None and self.copies.is_learning

    def hear(self, ticket: str, now: float) -> None:
        """Keep a queued ticket alive. A ticket that this owner does not know is not queued."""
        if (found := self._queue.find(ticket)) is not None:
            found.heard = now

    def answer(self, ticket: str) -> Answer:
        if not (self.is_ready or self.is_learning):
            return Finished() if self.finished else NotReady()
        found = self._queue.find(ticket)
        if found is not None and self.block is not None and self._block_ticket == ticket:
            return self.block
        if self.finished or found is None:
            return Finished() if self.finished else Ended()
        if found.conflict is not None:
            return found.conflict
        if found.lost and self._grant is None:  # not during a grant: first the round
            return Died(tuple(found.lost))
        at_end = self.step == LAST_STEP and found is self._head and self._is_enough()
        return AtLastStep() if at_end else self._waiting()

    def _waiting(self) -> Waiting:
        living = [host for host in self._hosts if not host.lost]
        late = [] if self._grant is None else self._grant.waits_for(self._hosts)
        lost = [host for host in self._hosts if host.lost and host.name not in self.gone]
        names = (tuple(sorted(host.name for host in each)) for each in (living, late, lost))
        return Waiting(self.accumulated, self.step, *names)

    def step_past(self, after: int, now: float) -> int | NotReady | Finished | None:
        """Return the step if it is past `after`, or why there will be none; None: not yet."""
        self.tick(now)
        if self.is_ready and self.step > after:
            return self.step
        if self.finished:
            return Finished()
        return None if self.is_ready or self.is_learning else NotReady()

    def leave(self, ticket: str, now: float, *, consume: bool, told: int = 0) -> bool:
        """End a chief's wait or block; return whether its round was consumed.

        A repeated message gets the same answer. `told` is how many losses have reached the chief.
        """
        if self.block is not None and self._block_ticket == ticket:
            if not self._end_block(consume=consume):
                self._queue.leave(ticket, served=False)
        else:
            self._queue.leave(ticket, served=False, told=told)
        self.tick(now)
        return self._queue.served(ticket) is True

    def cancel(self, now: float) -> None:
        """End the wait of every chief in the queue; a block that is open goes on."""
        for ticket in self._queue.tickets():
            if self.block is None or ticket != self._block_ticket:
                self._queue.leave(ticket, served=False)
        self._changed()
        self.tick(now)

    def finish(self, now: float) -> None:
        """End the run, for good: no round is opened from now on; an open one goes on."""
        if not self.finished:
            self.finished = True
            self._grant = None
            self._changed()
            self.tick(now)

    def missing(self, ticket: str, now: float) -> None:
        """End the block of a chief that found pieces missing at shards.

        Its ticket stays at the head of the queue, and the next grant has the hosts ship again.
        """
        if self.block is not None and self._block_ticket == ticket:
            self.counters.lost_blocks += 1
            self._end_block(consume=False)
            self._go_on(now)
            self.tick(now)

    def set_global_step(self, step: int, request: str, now: float) -> int:
        """Set the step; gradients stay; a round that is open ends. Return the step before.

        With parameters it only goes up, as by `advance_step`.
        Gradients that a host accepts before its next order count as accepted before this call.
        """
        before = self.step
        if self.copies is not None:
            self.advance_step(step, now)
        elif self._queue.served(request) is None:
            self._queue.leave(request, served=True)
            self.is_ready = True
            self._end_round()
            self.step = step
            self._set_at = self.fence
            self._changed()
            self.tick(now)
        return before

    def advance_step(self, step: int, now: float) -> int:
        """Move the step forward, drop what is there, end a round; return how many were dropped."""
        if step <= self.step and self.is_ready:
            return 0
        if self.copies is not None and (not self.is_ready or self.copies.change is not None):
            raise FailedPreconditionError(
                "The step cannot be set now: the owner learns it from the parameters' copies, or "
                "they are being changed"
            )
        dropped = self.accumulated
        self.is_ready = True
        self._end_round()
        self._move(step)
        self.tick(now)
        return dropped

    # The parameters' copies

    @property
    def _line(self) -> Copies:
        if self.copies is None:
            raise FailedPreconditionError("The group has no parameters")
        return self.copies

    def has_line(self, now: float) -> bool | None:
        """Whether some host has a copy of the parameters; None: it is not known yet."""
        self.tick(now)
        if self.is_learning:
            return None
        return self.copies is not None and self.copies.lineage is not None

    def update(self, call: str, ticket: str, source: object, size: int, now: float) -> ChangeAnswer:
        """Begin the update of a chief's round, unless this call has begun it; return the answer.

        `call` is unique for ever, since it may be repeated. The others are as in a `Stage`.
        """
        copies, chief = self._line, self._queue.find(ticket)
        has_block = self.block is not None and self._block_ticket == ticket
        if has_block and chief and copies.change is None and copies.answered(call) is None:
            stage = copies.named(self.fence.term, self.step + 1, source, size, whole=False)
            copies.begin(call, chief.host, stage, now)
            self._changed()
        self.tick(now)
        return self._answer_to(call, now)

    def restore(
        self,
        call: str,
        host: str,
        source: object,
        size: int,
        step: int,  # the state's; the group's is at least this one afterwards
        now: float,
        *,
        only_first: bool,  # whether it is dropped if there is a copy already
    ) -> ChangeAnswer:
        """Begin to replace all copies, at a higher step; as `update`."""
        copies = self._line
        busy = self.block is not None or self._grant is not None or copies.change is not None
        if copies.answered(call) is None and not busy and not copies.is_learning:
            if only_first and copies.lineage is not None:
                return Told()
            least = max(self.step + 1, step)
            if least > LAST_STEP:
                return AtLastStep()
            stage = copies.named(self.fence.term, least, source, size, whole=True)
            copies.begin(call, host, stage, now)
            self._changed()
        self.tick(now)
        is_begun = copies.change is not None and copies.change.call == call
        if copies.answered(call) is None and not is_begun:
            return Staging((), committed=False)
        return self._answer_to(call, now)

    def withdraw(self, call: str, now: float) -> ChangeAnswer:
        """Drop a change that is not committed, or not begun; return the answer to the call."""
        copies = self._line
        change = copies.change
        if change is not None and change.call == call and not change.committed:
            copies.end(Ended())
            self._changed()
            self.tick(now)
        elif change is None or change.call != call:
            copies.note(call, Ended())
        return self._answer_to(call, now)

    def _answer_to(self, call: str, now: float) -> ChangeAnswer:
        return self._line.answer(call, self._hosts.reports, now, self._timing.lease)

    def list_hosts(self, names: frozenset[str], now: float) -> None:
        """Note which hosts can take part: a new owner must hear all of them first."""
        if self.copies is not None and self.copies.listed != names:
            self.copies.listed = names
            self._changed()
            self.tick(now)

    def problems(self) -> dict[str, str]:
        """Return why hosts have no part: what is wrong with their copies, or cannot be made."""
        found = {} if self.copies is None else dict(self.copies.problems)
        for host in self._hosts:
            refused = None if host.in_line or host.report is None else host.report.refused
            if refused is not None and refused.error is not None:
                found[host.name] = f"{type(refused.error).__name__}: {refused.error}"
        return found

    def unanswered(self) -> frozenset[str]:
        """Return the hosts that this owner must hear, and has not heard, before it leads."""
        copies = self.copies
        if copies is None or not copies.is_learning or copies.listed is None:
            return frozenset()
        return copies.must_answer(self._hosts.reports, self.fence.term)
