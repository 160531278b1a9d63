"""The owner's state and its transitions: what becomes a grant, a round, a new step.

    counting --- a chief waits, and enough are there  ---> granted
    granted  --- the batches are there, and enough    ---> block
             --- too few are in them, or a host with  ---> granted again, if enough are there;
                 a shard is lost                           else counting, at the next step (void)
             --- a contributor is in two batches      ---> counting, at the next step (void);
                 if so in two steps in a row, the chief gets an error instead of a round
    block    --- its chief leaves it in order         ---> counting, at the next step
             --- it raises, or its chief is lost      ---> counting
             --- shards have lost their pieces        ---> as a grant with too few batches
             --- set_global_step, advance_step        ---> counting, at once
    counting --- in doubt, and nothing comes          ---> counting, at the next step (void)

Every event ends in `tick`, which takes the transitions that are due; so it does not matter which
event made them due.
"""

import logging
from dataclasses import dataclass

from shmacc._multihost.hosts import NUMBER_BITS, Grant, Hosts, two_with_one_contributor
from shmacc._multihost.messages import (
    LAST_STEP,
    Conflict,
    Fence,
    HostBatch,
    Loss,
    Opened,
    Timing,
)
from shmacc._multihost.wait_queue import WaitQueue

_logger = logging.getLogger("shmacc")


@dataclass(slots=True)
class Counters:
    """Counters of one owner; an owner that is started again begins with zeros.

    Attributes:
        rounds: Rounds consumed.
        gradients: Gradients in them.
        grants: How often hosts were asked to ship.
        withdrawn: Grants that came to nothing, since hosts were lost or late.
        voided: Steps that moved on without a round.
        lost_hosts: How often a host was silent for too long.
        died_workers: Workers that died, without those of lost hosts.
        lost_blocks: Rounds that were granted once more, since shards had lost pieces of them.
        lost_chiefs: Chiefs that were silent for too long.
        refused_reports: Reports that were late, doubled, or of an earlier incarnation.
    """

    rounds: int = 0
    gradients: int = 0
    grants: int = 0
    withdrawn: int = 0
    voided: int = 0
    lost_hosts: int = 0
    died_workers: int = 0
    lost_blocks: int = 0
    lost_chiefs: int = 0
    refused_reports: int = 0


class Rounds:
    """The owner's state and decisions.

    Args:
        term: A term higher than those of all earlier owners.
        step: The step to begin with; None: unknown, until `set_global_step`.
        timing: How long it waits.
        shards: How many there are.
    """

    def __init__(self, term: int, step: int | None, timing: Timing, shards: int = 1) -> None:
        self.counters = Counters()
        self._timing = timing
        self._shards = shards
        self.is_ready: bool = step is not None
        self.step: int = step or 0
        self.fence = Fence(term, 0)
        self._set_at = self.fence  # the fence at the last set_global_step
        self.serial = 0  # changes whenever an order or an answer has changed
        self._hosts = Hosts(term)
        self._queue = WaitQueue()
        self._conflict: Conflict | None = None  # made the last step void
        self._grant: Grant | None = None
        self._last_grant = term << NUMBER_BITS
        self.block: Opened | None = None  # the round that the head of the queue has
        self._block_ticket = ""
        self._opening = 0  # `serial` when the block was opened
        self._last_required = 0  # by the last chief that got a block
        self.finished = False
        # Whether workers may be waiting for a new step although this one has no gradient of theirs:
        # those were dropped without a new step, or refused during a grant that led to no round.
        self._in_doubt = not self.is_ready
        self._granted = False  # whether there was a grant at this fence
        # How many gradients and hosts at this fence `_is_stuck` last saw, and since when.
        self._seen: tuple[tuple[int, int], float] | None = None

    @property
    def accumulated(self) -> int:
        """How many gradients the next round could have now."""
        return self._hosts.counted(self.fence)[0]

    @property
    def lost(self) -> frozenset[str]:
        """The hosts that are lost: their shards do not answer, and nobody need wait for them."""
        return frozenset(host.name for host in self._hosts if host.lost)

    def hosts(self) -> dict[str, tuple[bool, int]]:
        """Return for each host whether it lives, and how many of its gradients count."""
        return {host.name: (not host.lost, host.pending(self.fence)) for host in self._hosts}

    def next_time(self, now: float) -> float:
        """Return when the next `tick` is worth while."""
        timing = self._timing
        times = [now + min(timing.lease, timing.chief_lease) / 4]
        if self._grant is not None:
            times += self._grant.times(timing)
        return min(time for time in times if time > now)

    def tick(self, now: float) -> None:
        """Take the transitions that are due, by events or by time."""
        # Losses first: a grant with a lost shard is judged below.
        self._lose_hosts(now)
        self._lose_chiefs(now)
        if self._hosts.lose_publishers(now - self._timing.chief_lease):
            self._changed()
        if self._grant is not None:
            self._close_grant(self._grant, now)
        # Nobody waits: the time in which nothing comes begins with the next wait.
        if not self._wants_round():
            self._seen = None
        elif self._is_enough():
            self._make_grant(now)
        elif self._in_doubt and self._is_stuck(now):
            self._void("nothing comes after an owner's death or a new step")

    def _is_stuck(self, now: float) -> bool:
        """Whether a chief waits, hosts follow the step, and nothing new has come for long."""
        seen = self.accumulated, sum(host.is_at(self.fence) for host in self._hosts)
        if self._seen is None or self._seen[0] != seen:
            self._seen = seen, now
        return seen[1] > 0 and now - self._seen[1] >= self._timing.chief_lease

    def _wants_round(self) -> bool:
        busy = self._grant is not None or self.block is not None
        may = self.is_ready and self.step < LAST_STEP and not self.finished
        return self._queue.head is not None and may and not busy

    def _is_enough(self) -> bool:
        return self._queue.head is not None and self.accumulated >= self._queue.head.required

    def _make_grant(self, now: float) -> None:
        self.counters.grants += 1
        self._last_grant += 1
        self._granted = True
        self._grant = Grant(self._last_grant, now, self._hosts.shard_hosts(self._shards))
        self._changed()
        self._close_grant(self._grant, now)

    def _close_grant(self, grant: Grant, now: float) -> None:
        """End the grant if its batches are there or late, or a shard is lost."""
        members = self._hosts.members(grant.number)
        head = self._queue.head
        enough = head is not None and sum(m.batch.count for m in members) >= head.required
        cut = not self.lost.isdisjoint(grant.shard_hosts)  # some of its shards get no pieces
        if not cut and not grant.is_over(self._hosts, now, self._timing, enough=enough):
            return
        self._grant = None
        self._changed()
        if not cut and enough and head is not None:
            # A host refuses a contributor's second gradient, but does not know the other hosts'.
            if (found := two_with_one_contributor(members)) is not None:
                self._void_for(Conflict(found[0], (found[1].host, found[2].host)))
                return
            self.block = Opened(self.fence, self.step, members, grant.shard_hosts)
            self._opening, self._last_required = self.serial, head.required
            self._block_ticket = head.name
        else:
            self.counters.withdrawn += 1
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Make another grant after one that led to no round, without a release in between.

        If there are too few gradients now, those that the hold has refused would never come: the
        step is void. But if a forwarder has just started, nobody knows yet what its segment has:
        then a new grant waits for its first report.
        """
        if self._wants_round():
            if self._is_enough() or any(host.is_coming for host in self._hosts):
                self._make_grant(now)
            else:
                self._void("it has too few gradients after losses, and workers wait")

    def _void_for(self, conflict: Conflict) -> None:
        one, two = conflict.hosts
        self._void(f"hosts {one} and {two} have both accepted contributor {conflict.contributor}")
        head, last = self._queue.head, self._conflict
        self._conflict = conflict
        if head is not None and last is not None and last.contributor == conflict.contributor:
            # Tell the chief only once. It then ends one of the two processes, whose last gradient
            # may still cause another conflict.
            head.conflict, self._conflict = self._conflict, None

    def _void(self, why: str) -> None:
        _logger.warning("Step %d is void: %s", self.step, why)
        self.counters.voided += 1
        self._move(self.step + 1)

    def _end_block(self, *, consume: bool) -> None:
        block, self.block = self.block, None
        self._changed()
        if not consume or block is None:
            return
        self.counters.rounds += 1
        self.counters.gradients += block.count
        self._queue.consumed()
        self._conflict = None
        self._move(self.step + 1, block.members)

    def _end_round(self) -> None:
        """End whatever is open, at once; the chief in its block finds its ticket ended."""
        if self.block is not None:
            self._queue.leave(self._block_ticket, served=False)
        # Hosts that were held have refused gradients, whose workers now wait for a new step.
        self._in_doubt |= self._granted
        self.block = self._grant = None

    def _move(self, step: int, consumed: tuple[HostBatch, ...] = ()) -> None:
        """Move the step and the fence on: no gradient that was accepted before counts any more."""
        self.fence = Fence(self.fence.term, self.fence.number + 1)
        self.step = step
        self._in_doubt = self._granted = False
        self._hosts.consumed(consumed)
        self._changed()

    def _raise_term(self, term: int) -> None:
        """Change to a later term: hosts know an earlier owner, whose clock was ahead of this one.

        A round or grant that is open ends. Hosts at a fence of the old term are treated as an
        earlier owner's: they keep their gradients if they are at this owner's step.
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
            self._changed()

    def _changed(self) -> None:
        self._hosts.changed()
        self.serial += 1
