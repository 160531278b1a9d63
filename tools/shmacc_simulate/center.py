"""The owner, the shards and the chief: drivers of the library's OwnerCore and ShardCore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shmacc._multihost.messages import Ended, Opened, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.shard import ShardCore
from shmacc_simulate.events import Processor
from shmacc_simulate.scenario import ROW_BYTES, SMALL_BYTES, WIDTH, Round

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc._multihost.messages import Answer, BatchKey, Fence, Report
    from shmacc_simulate.hosts import Host
    from shmacc_simulate.job import Job

_PARKED = 1.0  # seconds that a chief's call waits at the owner


class _Call(NamedTuple):
    """A forwarder's call that waits for another order than that of `serial`."""

    host: Host
    incarnation: int
    serial: int


@dataclass
class _Ask:
    """A chief's call that waits for a round."""

    ticket: str
    answer: Callable[[Answer], None]


class Owner:
    """The owner, at the first host: a process with one thread, which no death meets here."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.at = 0
        self.core = OwnerCore(1, 0, job.scenario.timing)
        self._processor = Processor(job.clock)
        self._half = job.scenario.machine.owner_call / 2  # a call comes; it is answered
        self._calls: list[_Call] = []
        self._asks: list[_Ask] = []
        self._serial = -1
        self._fence = self.core.fence
        self._tick_at = 0.0

    def enrol(self, host: str) -> int:
        """See `OwnerCore.enrol`."""
        incarnation = self.core.enrol(host, self._job.clock.now)
        self._look()
        return incarnation

    def report(self, host: Host, report: Report, serial: int) -> None:
        """A report comes."""

        def handle() -> None:
            self.core.report(report, self._job.clock.now)
            call = _Call(host, report.incarnation, serial)
            self._calls.append(call)
            self._look()
            if serial != self.core.serial:
                self._answer(call)
            else:
                timeout = self._job.scenario.timing.heartbeat * 2
                self._job.clock.after(timeout, lambda: self._answer(call))

        self._processor.run(self._half, handle)

    def ask(self, ticket: str, required: int, answer: Callable[[Answer], None]) -> None:
        """A chief's call comes."""

        def handle() -> None:
            found = self.core.ask(ticket, required, self._job.clock.now)
            ask = _Ask(ticket, answer)
            self._asks.append(ask)
            self._look()
            if isinstance(found, Waiting):
                self._job.clock.after(_PARKED, lambda: self._answer_chief(ask))
            else:
                self._answer_chief(ask)

        self._processor.run(self._half, handle)

    def missing(self, ticket: str, keys: tuple[BatchKey, ...], then: Callable[[], None]) -> None:
        """See `OwnerCore.missing`."""

        def handle() -> None:
            self.core.missing(ticket, keys, self._job.clock.now)
            self._look()
            then()

        self._processor.run(2 * self._half, handle)

    def leave(self, ticket: str, then: Callable[[], None]) -> None:
        """The block ends in order."""

        def handle() -> None:
            opened, step = self.core.open_round, self.core.step
            if self.core.leave(ticket, self._job.clock.now, consume=True) and opened is not None:
                self._job.books.consumed(opened, step)
            self._look()
            then()

        self._processor.run(2 * self._half, handle)

    def _look(self) -> None:
        """Answer calls that wait, if there is something new; see to time."""
        core, job = self.core, self._job
        if core.serial != self._serial:
            self._serial = core.serial
            for call in [call for call in self._calls if call.serial != core.serial]:
                self._answer(call)
        for ask in list(self._asks):
            if not isinstance(core.answer(ask.ticket), Waiting):
                self._answer_chief(ask)
        if core.fence != self._fence:
            self._fence = core.fence
            for shard in job.shards:
                fence = self._fence
                job.network.small(
                    self.at,
                    shard.at,
                    SMALL_BYTES,
                    lambda shard=shard, fence=fence: shard.forget(fence),
                )
        due = core.next_time(job.clock.now)
        if not job.clock.now < self._tick_at <= due:
            self._tick_at = due
            job.clock.at(due, self._tick)

    def _tick(self) -> None:
        if self._job.clock.now >= self._tick_at:
            self.core.tick(self._job.clock.now)
            self._look()

    def _answer(self, call: _Call) -> None:
        if call not in self._calls:
            return
        self._calls.remove(call)
        host, job = call.host, self._job
        order = self.core.order(host.name, call.incarnation)

        def send() -> None:
            job.network.small(self.at, host.number, SMALL_BYTES, lambda: arrive())

        def arrive() -> None:
            if host.alive and host.incarnation == call.incarnation:
                host.receive(order)

        self._processor.run(self._half, send)

    def _answer_chief(self, ask: _Ask) -> None:
        if ask not in self._asks:
            return
        self._asks.remove(ask)
        self._processor.run(self._half, lambda: ask.answer(self.core.answer(ask.ticket)))


class Shard:
    """A shard: one call at a time, pieces are their sizes."""

    def __init__(self, job: Job, at: int) -> None:
        self._job = job
        self.at = at
        self.alive = True
        self._start()

    def _start(self) -> None:
        self._core: ShardCore[float] = ShardCore()
        self._processor = Processor(self._job.clock)

    def move(self, to: int) -> None:
        """It has died with its host; it is started elsewhere, empty."""
        self.alive = False

        def start() -> None:
            self.at, self.alive = to, True
            self._start()

        self._job.clock.after(self._job.scenario.machine.respawn, start)

    def stage(self, fence: Fence, key: BatchKey, size: float, then: Callable[[], None]) -> None:
        """See `ShardCore.stage`."""
        core = self._core

        def handle() -> None:
            if self.alive and core is self._core:
                core.stage(fence, key, size)
                then()

        self._processor.run(self._job.scenario.machine.call, handle)

    def forget(self, before: Fence) -> None:
        """See `ShardCore.forget`."""
        self._core.forget(before)

    def reduced(
        self, opened: Opened, number: int, then: Callable[[tuple[BatchKey, ...]], None]
    ) -> None:
        """Add the pieces of a round up; or say which are missing."""
        keys = opened.of_shard(number)
        machine = self._job.scenario.machine
        if not self.alive:
            self._job.clock.after(machine.retry, lambda: then(keys))
            return
        if missing := self._core.missing(opened.fence, keys):
            self._processor.run(machine.call, lambda: then(missing))
            return
        size = sum(self._core.pieces(keys))
        self._processor.run(machine.call + size / self._job.rates.reduce, lambda: then(()))


class Chief:
    """Leads, at the first host: asks, fetches the mean, or leaves it at the shards; and again."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._at = 0
        self._processor = Processor(job.clock)
        self._ticket = ""
        self._asked = 0.0
        self.rounds: list[Round] = []
        self.cancelled = 0

    def next_round(self) -> None:
        """Ask for a round."""
        self._ticket = f"ticket {self._job.new_number()}"
        self._asked = self._job.clock.now
        self._ask()

    def _ask(self) -> None:
        owner, ticket = self._job.owner, self._ticket
        owner.ask(ticket, self._job.scenario.required, self._answered)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Opened):
            self._keep_alive(self._ticket)
            self._fetch(answer)
        elif isinstance(answer, Waiting):
            self._ask()
        elif isinstance(answer, Ended):  # the owner has not got to the chief's calls for so long
            self.cancelled += 1
            self.next_round()
        else:
            raise TypeError(f"The owner's answer to the chief is {answer}")

    def _keep_alive(self, ticket: str) -> None:
        """Go on asking while it is in the block."""

        def again() -> None:
            if ticket == self._ticket:
                self._job.owner.ask(ticket, self._job.scenario.required, lambda _: None)
                self._keep_alive(ticket)

        self._job.clock.after(self._job.scenario.timing.chief_lease / 4, again)

    def _fetch(self, opened: Opened) -> None:
        job, scenario = self._job, self._job.scenario
        numbers = [n for n in range(len(job.shards)) if opened.of_shard(n)]
        waiting = set(numbers)
        lost: set[BatchKey] = set()
        mean = 0.0
        if scenario.whole:
            row = WIDTH * 4 if scenario.table.dense else ROW_BYTES
            mean = scenario.table.union(opened.count) * row

        def call(number: int) -> None:
            shard = job.shards[number]
            at = shard.at
            job.network.small(
                self._at,
                at,
                SMALL_BYTES,
                lambda: shard.reduced(opened, number, lambda missing: answer(number, at, missing)),
            )

        def answer(number: int, at: int, missing: tuple[BatchKey, ...]) -> None:
            if mean and not missing:
                size, now = mean / len(numbers), job.clock.now
                job.network.large(at, self._at, size, now, lambda: arrive(number, missing))
            else:
                job.network.small(at, self._at, SMALL_BYTES, lambda: arrive(number, missing))

        def arrive(number: int, missing: tuple[BatchKey, ...]) -> None:
            waiting.discard(number)
            lost.update(missing)
            if not waiting and lost:
                job.owner.missing(self._ticket, tuple(sorted(lost)), self._ask)
            elif not waiting:
                self._processor.run(mean / job.rates.join, begun)

        def begun() -> None:
            began = job.clock.now

            def over() -> None:
                self.rounds.append(Round(self._asked, began, job.clock.now, opened.count))
                self._ticket = ""
                job.clock.after(scenario.pause, self.next_round)

            job.owner.leave(self._ticket, over)

        for number in numbers:
            call(number)
