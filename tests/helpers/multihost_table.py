"""An owner, forwarders and shards; the test delivers their messages, one at a time."""

from __future__ import annotations

from shmacc._multihost.forwarder import Do, ForwarderCore
from shmacc._multihost.messages import Opened
from shmacc._multihost.owner import OwnerCore
from shmacc_hosts.memory import Gradient, Segment
from shmacc_hosts.world import TIMING


class Table:
    """An owner, and hosts that have reported once, and then act only when the test says so."""

    def __init__(self, *hosts: str, step: int | None = 0, term: int = 1, shards: int = 1) -> None:
        self.owner = OwnerCore(term, step, TIMING, shards)
        self.now = 0.0
        self.hosts: dict[str, tuple[ForwarderCore, Segment]] = {}
        for host in hosts:
            self.add(host, Segment())
        self.settle()

    def add(self, host: str, segment: Segment) -> None:
        incarnation = self.owner.enrol(host, self.now)
        core = ForwarderCore(host, incarnation, TIMING)
        self.hosts[host] = core, segment

    def hear(self, *hosts: str) -> None:
        """Let each host report and receive its order, but not follow it yet."""
        for host in hosts or self.hosts:
            core, segment = self.hosts[host]
            core.observe(segment.step, len(segment.content), finished=segment.finished)
            report = core.report(self.now)
            self.owner.report(report, self.now)
            core.receive(self.owner.order(host, report.incarnation))

    def act(self, host: str) -> list[object]:
        """Let a host follow its order. What it sends (`Do.SHIP`) arrives at once."""
        core, segment = self.hosts[host]
        done: list[object] = []
        while (action := segment.next_action(core)) is not None:
            done.append(action)
            match action:
                case Do.HOLD, _:
                    core.held(segment.hold(), self.now)
                case Do.SHIP, grant:
                    core.shipped(grant)
                case Do.STOP, _:
                    return done
                case _:
                    segment.follow(core, action)
        return done

    def follow(self) -> None:
        """Let all hosts report and then follow their orders; the results are not reported yet."""
        self.hear()
        for host in self.hosts:
            self.act(host)

    def settle(self, *hosts: str) -> None:
        """Let hosts report and act until nothing changes."""
        for _ in range(4):
            self.hear(*hosts)
            for host in hosts or list(self.hosts):
                self.act(host)

    def pass_time(self, seconds: float, *hosts: str) -> None:
        """Let time pass. Only these hosts report meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for host in hosts:
                self.hear(host)
            self.owner.tick(self.now)

    def apply(self, host: str, contributor: int, local_step: int | None = None) -> bool | None:
        segment = self.hosts[host][1]
        step = segment.step if local_step is None else local_step
        return segment.apply(Gradient(contributor * 1000 + step, step, contributor, 1))

    def ask(self, required: int, ticket: str = "t") -> object:
        return self.owner.ask(ticket, required, self.now)

    def opened(self, required: int, ticket: str = "t", *hosts: str) -> Opened:
        """Ask for a round, let hosts send their gradients, and return the round."""
        self.ask(required, ticket)
        self.settle(*hosts)
        opened = self.ask(required, ticket)
        assert isinstance(opened, Opened)
        return opened

    @property
    def segments(self) -> list[Segment]:
        return [segment for _, segment in self.hosts.values()]

    @property
    def steps(self) -> list[int]:
        return [segment.step for segment in self.segments]


def with_a_gradient_each(*hosts: str, shards: int = 1) -> Table:
    """Return a table whose hosts have each reported a gradient, of contributors 1, 2 and so on."""
    table = Table(*hosts, shards=shards)
    for contributor, host in enumerate(hosts, 1):
        assert table.apply(host, contributor)
    table.settle()
    return table
