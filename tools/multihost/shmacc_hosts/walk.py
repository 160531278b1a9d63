"""Random walks: steps take random times, messages are lost, doubled or late, and faults strike."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import TYPE_CHECKING, Any

from shmacc_hosts.costs import Gate
from shmacc_hosts.faults import CHOICES, EVENTS
from shmacc_hosts.steps import Message, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shmacc_hosts.costs import Work
    from shmacc_hosts.machine import Machine
    from shmacc_hosts.owner import Owner
    from shmacc_hosts.world import World

# The least and the most seconds that a step takes; steps that are not listed take up to 5 ms.
_TAKES = {
    "start": (0.02, 0.3), "report": (0.0, 0.01), "act": (0.0, 0.02), "stage": (0.0, 0.03),
    "unstage": (0.0, 0.2), "refuse": (0.0, 0.06), "make": (0.0, 0.03), "made": (0.0, 0.03),
    "replace": (0.0, 0.06), "catch_up": (0.0, 0.06), "cannot_replace": (0.2, 1.0),
    "read": (0.0, 0.01), "apply": (0.005, 0.06), "wake": (0.0, 0.05), "look_around": (0.1, 0.3),
    "found_dead": (0.0, 0.3), "find": (0.0, 0.1), "call": (0.01, 0.05), "hear": (0.1, 0.3),
    "decide": (0.0, 0.04), "replaced": (0.1, 0.6), "thaw": (0.2, 4.0), "join": (0.2, 4.0),
    "mend": (0.2, 5.0), "end_zombie": (2.0, 5.0), "unlist": (4.0, 5.0), "back": (0.3, 5.0),
    "back_empty": (0.5, 15.0),
}  # fmt: skip
_CHOICE_OF = {
    "fail": "raise", "skip": "raise", "restore": "restore", "withdraw": "withdraw",
    "refuse": "refuse", "cannot_make": "refuse", "made_otherwise": "differs",
}  # fmt: skip
_SLOW = {"stage", "make", "made", "replace", "catch_up"}  # sometimes take longer than a lease


class Clocked:
    """A walk with time: each step is taken some time after it has become possible."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._planned: dict[tuple[str, int], dict[Step, tuple[float, float]]] = {}

    def all_of(self, works: Iterable[Work]) -> Work:
        """Do several pieces of work at the same time."""
        each = list(works)
        gate = Gate(len(each))
        for work in each:
            self.start(work, gate.done)
        if gate.closed:
            yield gate

    def touched(self, what: Step | Message) -> list[Any]:
        """Return the parts whose possible steps an event may have changed."""
        world = self.world
        seen = world.registered, world.happened["conflicts"], world.happened["actors ended"]
        if seen != self._touched:
            self._touched = seen
            return world.parts
        if isinstance(what, Message):
            return [world.machines[what.receiver], *world.owners[-2:], *world.chiefs]
        return [world.part(what)]

    _touched: tuple[Owner | None, int, int] | None = None

    def seconds(self, step: Step) -> float | Work:
        """Return how long a step takes once it is possible, or the work that comes before it."""
        raise NotImplementedError

    def send(self, message: Message) -> None:
        """Plan when a message arrives."""
        raise NotImplementedError

    def at(self, time: float, what: Step | Message | Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def start(self, work: Work, done: Callable[[], None] = lambda: None) -> None:
        """Do work that takes time; call `done` afterwards."""
        waits = next(work, None)
        if waits is None:
            done()
        elif isinstance(waits, Gate):
            waits.then = lambda: self.start(work, done)
        else:
            self.at(waits, lambda: self.start(work, done))

    def plan(self, parts: Iterable[Any]) -> None:
        """Plan the steps that are possible now; drop planned steps that no longer are."""
        now = self.world.now
        for part in parts:
            where = part.part, part.number
            before, self._planned[where] = self._planned.get(where, {}), (plans := {})
            for step in part.steps():
                due, planned = max(now, part.due(step)), before.get(step)
                if planned is None or due < planned[0]:
                    planned = self._planned_for(step, due)
                plans[step] = planned

    def _planned_for(self, step: Step, due: float) -> tuple[float, float]:
        """Plan a step; return when it becomes possible, and when it will be taken."""
        seconds = self.seconds(step)
        if isinstance(seconds, float):
            self.at(due + seconds, step)
            return due, due + seconds

        def done() -> None:
            now, where = self.world.now, (step.part, step.number)
            if step in self._planned[where]:
                self._planned[where][step] = due, now
                self.at(now, step)

        self.at(due, lambda: self.start(seconds, done))
        return due, math.inf

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let this many seconds pass; stop after an event once `until()` is true."""
        world, end = self.world, self.world.now + seconds
        self.plan(world.parts)
        while self._events and not until():
            if self._events[0][0] > end:
                world.now = end
                return
            time, _, what = heapq.heappop(self._events)
            world.now = time
            if isinstance(what, Message):
                self.arrive(what)
            elif isinstance(what, Step):
                self._come(what, time)
            else:
                what()
            self.look()
            messages, world.messages = world.messages, []
            for message in messages:
                self.send(message)
            if isinstance(what, Step | Message):
                self.plan(self.touched(what))

    def _come(self, step: Step, time: float) -> None:
        """Take a planned step, if it is still planned for this time."""
        part, plans = self.world.part(step), self._planned[step[:2]]
        if plans.get(step, (0.0, 0.0))[1] == time:
            del plans[step]
            if part.due(step) <= time:
                self.world.do(step)

    def look(self) -> None:
        """Check the world after an event."""
        self.world.check()

    def arrive(self, message: Message) -> None:
        """Let a message arrive."""
        self.world.deliver(message)


class AtRandom(Clocked):
    """A walk whose next steps, delays and faults are random.

    Args:
        rates: How often each kind of fault strikes. For `EVENTS`: times a second. For the others: a
            probability, of "drop", "double" and "late" for each message, of "slow" for each change
            of a copy, of `CHOICES` each time there is a choice. "strikes" is the probability that
            events strike right after the owner has changed something, when much is unfinished.
    """

    def __init__(self, world: World, seed: int, rates: Mapping[str, float]) -> None:
        self.random = random.Random(seed)
        self.rates = {"slow": 0.02, "strikes": 0.05, **rates}
        world.hears_zombies = "zombie" in rates
        world.kinds = frozenset({*rates, "restore", "withdraw"} & {*EVENTS, *CHOICES})
        super().__init__(world)
        for kind in sorted(world.kinds & {*EVENTS}):
            self._strike_later(kind)

    def _strike_later(self, kind: str) -> None:
        self.at(self.world.now + self.random.expovariate(self.rates[kind]), Step("rate", 0, kind))

    def touched(self, what: Step | Message) -> list[Any]:
        if what[0] in {"faults", "rate", "strike"}:
            return self.world.parts
        machines = self.world.machines
        waiting = [m for m in machines if m.doing is not None or m.memory.segment.held]
        return [*super().touched(what), *waiting]

    def strike(self, kind: str) -> None:
        """Let a fault of this kind strike, if it can."""
        able = [step for step in self.world.faults.strikes() if step.what == kind]
        if able:
            self.world.do(self.random.choice(able))

    def _come(self, step: Step, time: float) -> None:
        if step.part in {"rate", "strike"}:
            if step.what in self.world.kinds:
                self.strike(step.what)
                if step.part == "rate":
                    self._strike_later(step.what)
        else:
            super()._come(step, time)
        self._strike_at_changes()

    def _strike_at_changes(self) -> None:
        owner, random = self.world.registered, self.random
        seen = owner and (owner.number, owner.serial)
        kinds = sorted(self.world.kinds & {*EVENTS})
        if seen != self._seen and kinds and random.random() < self.rates["strikes"]:
            for _ in range(random.choice([1, 1, 2, 3])):
                step = Step("strike", 0, random.choice(kinds))
                self.at(self.world.now + random.uniform(0.0, 0.1), step)
        self._seen = seen

    _seen: object = None

    def seconds(self, step: Step) -> float:
        low, high = _TAKES.get(step.what, (0.0, 0.005))
        kind = _CHOICE_OF.get(step.arg if step.what == "decide" else step.what)
        if kind is not None and self.random.random() >= self.rates.get(kind, 0.02):
            return math.inf
        if step.what in _SLOW and self.random.random() < self.rates["slow"]:
            low, high = 0.3, 2.5
        return self.random.uniform(low, high)

    def send(self, message: Message) -> None:
        random, rates = self.random, self.rates
        for _ in range(2 if random.random() < rates.get("double", 0.0) else 1):
            if random.random() >= rates.get("drop", 0.0):
                is_late = random.random() < rates.get("late", 0.0)
                low, high = (0.3, 3.0) if is_late else (0.0005, 0.01)
                self.at(self.world.now + random.uniform(low, high), message)

    def arrive(self, message: Message) -> None:
        if self.world.machines[message.receiver].frozen:
            self.at(self.world.now + 0.05, message)
        else:
            super().arrive(message)

    def heal(self) -> None:
        """End all faults, and let no more strike."""
        self.rates = {"slow": 0.0, "strikes": 0.0, "withdraw": 0.0}
        self.world.faults.heal()

    def break_one(self) -> None:
        """Freeze a machine for good, or cut it off from a chief's machine.

        The others must be able to go on: so the machine has no owner and no chief, and the workers
        of the other machines are enough for a round.
        """
        world = self.world
        if not world.owners:
            return

        def are_enough(machines: list[Machine]) -> bool:
            workers = [worker for machine in machines if machine.up for worker in machine.workers]
            who = {id(w) if w.contributor is None else w.contributor for w in workers}
            return world.required <= len(who)

        home = world.owners[-1].machine
        chiefs = [chief.machine for chief in world.chiefs if chief.machine is not home]
        others = [m for m in world.machines if m is not home and m not in chiefs]
        others = [m for m in others if are_enough([o for o in world.machines if o is not m])]
        if not others:
            return
        one = self.random.choice(others)
        if chiefs and self.random.random() < 0.7:  # noqa: PLR2004
            pair = sorted([one.number, self.random.choice(chiefs).number])
            world.cuts |= {(pair[0], pair[1])}
        else:
            one.frozen = True
        world.faults.last = True
