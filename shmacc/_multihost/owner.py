"""The owner: how it answers the messages of hosts and chiefs.

It keeps the step, counts all hosts' gradients, and decides which of them a round has (rounds.py).
"""

import zlib
from dataclasses import replace

from shmacc._base.lineage import Lineage
from shmacc._multihost.changes import MARK_BITS
from shmacc._multihost.copies import ChangeAnswer
from shmacc._multihost.hosts import Host, tasks
from shmacc._multihost.messages import (
    LAST_STEP,
    Answer,
    AtLastStep,
    Chiefless,
    Died,
    Ended,
    Finished,
    Loss,
    NotReady,
    Opened,
    Order,
    Report,
    Staging,
    Told,
    Waiting,
)
from shmacc._multihost.rounds import Rounds
from shmacc.errors import FailedPreconditionError


class OwnerCore(Rounds):
    """The owner of a group over hosts. It takes the arguments of `Rounds`."""

    # Hosts

    def enrol(self, host: str, now: float) -> int:
        """Return a starting forwarder's incarnation; from now on refuse the host's earlier ones."""
        incarnation = self._hosts.enrol(host, now)
        self._changed()
        return incarnation

    def report(self, report: Report, now: float) -> None:
        if report.term > self.fence.term:
            leads = self.has_copies and not self.is_learning
            if leads and not self.copies.is_of_another_line(report):
                self.has_resigned = True  # two owners would make different changes
                self._changed()
                return
            if leads and self._is_busy:
                return  # the round ends first; the host reports again
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
        if host is None or incarnation < host.incarnation:
            return Order(self.fence.term, self.serial, incarnation, refused=host is not None)
        host.order = order = self._order(host)
        report = host.report
        if report and order.ready and not order.adopt and report.fence != order.fence:
            # The order empties the host's segment, and its workers wait for a new step.
            self._in_doubt |= report.step == order.step
        return order

    def _order(self, host: Host) -> Order:
        copies, report, change = self.copies, host.report, self.copies.change
        if report is None or not (self.has_copies or self.is_ready):
            return Order(self.fence.term, self.serial, host.incarnation)
        held = self._grant is not None or self.block is not None
        return Order(
            term=self.fence.term,
            serial=self.serial,
            incarnation=host.incarnation,
            ready=self.is_ready,
            fence=self.fence,
            step=self.step,
            hold=held,
            finished=self.finished and not held,
            grant=None if self._grant is None else self._grant.number,
            shard_hosts=() if self._grant is None else self._grant.shard_hosts,
            consumed=host.consumed,
            adopt=host.may_be_adopted(self.fence, self.step, self._set_at),
            slack=self._slack(),
            pace=self.pace,
            lineage=copies.lineage,
            stage=change.stage if change and change.has_asked(report) else None,
            source=copies.source(self._hosts.reports, report),
            copies=copies.count(self._hosts.reports),
            told=host.told,
        )

    def has_news(self, name: str, serial: int) -> bool:
        """Whether the host must do something that the order with this `serial` does not say."""
        host = self._hosts.find(name)
        if host is None or host.report is None or host.order is None or host.order.serial != serial:
            return serial != self.serial
        return tasks(host.order, host.report) != tasks(self._order(host), host.report)

    @property
    def pace(self) -> float:
        """The factor by which hosts report more rarely than usual, since there are many hosts."""
        return self._timing.pace(self._hosts.counted(self.fence)[1])

    def _slack(self) -> int:
        """Return by how many gradients a host's count must grow to be reported at once.

        Most orders are made between two rounds, when no chief waits. So if there are many hosts,
        this assumes that the next round requires as many gradients as the last one.
        """
        head = self._head
        accumulated, living = self._hosts.counted(self.fence)
        expected = self._last_required if self.pace > 1 else 0
        missing = (expected if head is None else head.required) - accumulated
        return max(1, missing // (2 * max(1, living)))

    # Chiefs

    def ask(
        self, ticket: str, required: int, now: float, *, host: str = "", tell: bool = False
    ) -> Answer:
        """Queue the ticket of a chief on `host`, or keep it queued; return the ticket's answer."""
        self._chiefless = False
        if (self.is_ready or self.is_learning) and not self.finished:
            self._queue.ask(ticket, required, host, now, tell=tell)
            self.tick(now)
        return self.answer(ticket)

    @property
    def is_learning(self) -> bool:
        """Whether the step is not known yet, but will be once all hosts have answered."""
        return self.copies.is_learning

    def hear(self, ticket: str, now: float) -> bool:
        """Keep a queued ticket alive, and return True; False: the ticket is not in the queue."""
        found = self._queue.find(ticket)
        if found is not None:
            found.heard = now
        return found is not None

    def resume(
        self, ticket: str, block: Opened, now: float, *, host: str = ""
    ) -> Opened | Told | Ended | None:
        """Go on with a round that an earlier owner opened, and whose chief is in its block.

        If the copies' lineage and the step are unchanged, no gradient of the round is in any other
        round, so it is open again. Gradients that hosts have accepted since are dropped at its end.

        Returns:
            The round; `Told` if its update was made, which has ended it; `Ended` if anything else
            has come in between; None if the owner does not know yet.
        """
        self.tick(now)
        copies = self.copies
        if copies.is_learning or not self.has_copies:
            return None if self.has_copies else Ended()
        if self.block is not None and self._block_ticket == ticket:
            return self.block
        is_as_it_was = (copies.lineage, self.step) == (block.lineage, block.step)
        if is_as_it_was and self.block is None and copies.change is None and self.is_ready:
            self._queue.forget(ticket)  # its chief may have tried to end the block
            self._queue.ask(ticket, block.count, host, now, tell=False)
            self._grant, self._granted = None, True
            self._block_ticket, self.block = ticket, replace(block, fence=self.fence)
            self._changed()
            return self.block
        made = copies.is_made(block, self._mark(ticket), self._hosts.reports)
        return Told() if made else Ended()

    def _mark(self, ticket: str) -> int:
        """Return a ticket's mark: the bits by which the updates of its round are recognised."""
        return zlib.crc32(ticket.encode()) % (1 << MARK_BITS)

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

    def step_past(
        self, after: int, now: float, *, tell: bool = False
    ) -> int | NotReady | Finished | Chiefless | None:
        """Return the step once it is past `after`, or why it never will be; None: wait longer.

        With `tell`, the loss of the last chief counts as a reason.
        """
        self.tick(now)
        if self.is_ready and self.step > after:
            return self.step
        if self.finished:
            return Finished()
        if tell and self._chiefless:
            return Chiefless()
        return None if self.is_ready or self.is_learning else NotReady()

    def leave(self, ticket: str, now: float, *, consume: bool, told: int = 0) -> bool:
        """End a chief's wait or block; return whether its round was consumed.

        A repeated message gets the same answer. `told` is how many losses have reached the chief.
        """
        if self.block is not None and self._block_ticket == ticket:
            if not self._end_block(consume=consume):
                self._queue.leave(ticket, served=False)
        else:
            left = self._queue.find(ticket)
            for loss in left.lost[:told] if left else ():
                if (host := self._hosts.find(loss.host)) is not None:
                    host.note_told(loss)
            self._queue.leave(ticket, served=False, told=told)
        self.tick(now)
        return self._queue.served(ticket) is True

    def chiefs(self, now: float) -> int:
        """Return how many chiefs wait for a round, or have one."""
        self.tick(now)
        return len(self._queue.tickets())

    def cancel(self, now: float) -> None:
        """End the wait of every chief in the queue; a block that is open goes on."""
        for ticket in self._queue.tickets():
            if self.block is None or ticket != self._block_ticket:
                self._queue.leave(ticket, served=False)
        self._changed()
        self.tick(now)

    def finish(self, now: float) -> None:
        """End the run for good: no round is opened from now on, but an open round goes on."""
        if not self.finished:
            self.finished = True
            self._grant = None
            self._changed()
            self.tick(now)

    def missing(self, ticket: str, now: float) -> None:
        """End the block of a chief that found pieces missing at shards.

        Its ticket stays at the head of the queue; for the next grant the hosts ship again.
        """
        if self.block is not None and self._block_ticket == ticket:
            self.counters.lost_blocks += 1
            self._end_block(consume=False)
            self._go_on(now)
            self.tick(now)

    def set_global_step(self, step: int, request: str, now: float) -> int:
        """Set the step, keep the gradients, end an open round; return the previous step.

        With parameters, this is `advance_step`: the step only goes up, and gradients are dropped.
        Gradients that a host accepts before its next order count as accepted before this call.
        """
        before = self.step
        if self.has_copies:
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
        """Move the step on, drop all gradients, end an open round; return how many were dropped."""
        if step <= self.step and self.is_ready:
            return 0
        if self.has_copies and (not self.is_ready or self.copies.change is not None):
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

    def has_line(self, now: float) -> bool | None:
        """Whether any host has a copy of the parameters; None: the owner does not know yet."""
        self.tick(now)
        return None if self.is_learning else self.copies.lineage is not None

    def update(
        self,
        call: str,
        ticket: str,
        source: object,
        size: int,
        now: float,
        *,
        checked: Lineage | None = None,  # that the copy of its host had when the chief checked it
    ) -> ChangeAnswer:
        """Begin the update of a chief's round, if this call has not begun it; return the answer.

        `call` is unique for ever, to recognise repeats. See `Stage` for `source` and `size`.
        """
        copies, chief = self.copies, self._queue.find(ticket)
        has_block = self.block is not None and self._block_ticket == ticket
        if has_block and chief and copies.change is None and copies.answered(call) is None:
            given = call, chief.host, self.fence.term, self.step + 1, source, size, now
            copies.begin(*given, mark=self._mark(ticket), checked=checked)
            self._changed()
        self.tick(now)
        return self._answer_to(call, now)

    def restore(
        self,
        call: str,
        host: str,
        source: object,
        size: int,
        step: int,  # the saved state's step; the group's step becomes at least this
        now: float,
        *,
        only_first: bool,  # whether to do nothing if a host has a copy already
    ) -> ChangeAnswer:
        """Begin to replace all copies, at a higher step; see `update` for the other arguments."""
        copies = self.copies
        if copies.answered(call) is None and not self._is_busy and not copies.is_learning:
            if only_first and copies.lineage is not None:
                return Told()
            least = max(self.step + 1, step)
            if least > LAST_STEP:
                return AtLastStep()
            copies.begin(call, host, self.fence.term, least, source, size, now)
            self._changed()
        self.tick(now)
        is_begun = copies.change is not None and copies.change.call == call
        if copies.answered(call) is None and not is_begun:
            return Staging((), committed=False)
        return self._answer_to(call, now)

    def withdraw(self, call: str, now: float) -> ChangeAnswer:
        """Ensure that this call's change, unless committed, is never made; return its answer."""
        copies, change = self.copies, self.copies.change
        if change is not None and change.call == call and not change.committed:
            copies.end(Ended())
            self._changed()
            self.tick(now)
        elif change is None or change.call != call:
            copies.note(call, Ended())
        return self._answer_to(call, now)

    def _answer_to(self, call: str, now: float) -> ChangeAnswer:
        return self.copies.answer(call, self._hosts.reports, now, self._timing.lease)

    def list_hosts(self, names: frozenset[str], now: float) -> None:
        """Note which hosts can take part: a new owner must first have a report of each."""
        if self.copies.listed != names:
            self.copies.listed = names
            self._changed()
            self.tick(now)

    def problems(self) -> dict[str, str]:
        """Return, by host, what is wrong with its copy, or why it cannot make a change."""
        found = dict(self.copies.problems)
        found |= {each.host: each.problem for each in self._hosts.reports if each.problem}
        for host in self._hosts:
            refused = None if host.in_line or host.report is None else host.report.refused
            if refused is not None and refused.error is not None:
                found[host.name] = f"{type(refused.error).__name__}: {refused.error}"
        return found

    def unanswered(self) -> frozenset[str]:
        """Return the hosts whose answers this owner still needs before it can make rounds."""
        hosts = self.copies.must_answer(self._hosts.reports, self.fence.term)
        return hosts if self.is_learning else frozenset()
