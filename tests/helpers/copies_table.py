"""A `multihost_table` whose hosts have copies of parameters; a copy only records its changes."""

from __future__ import annotations

from helpers.multihost_table import Table

from shmacc._base.lineage import NO_COPY, Copy, Lineage
from shmacc._multihost.changes import BEGINNING_BITS, MARK_BITS
from shmacc._multihost.forwarder import ForwarderCore, Get
from shmacc._multihost.messages import Staging, Told
from shmacc._multihost.owner import OwnerCore
from shmacc_hosts.memory import Segment
from shmacc_hosts.world import TIMING


class CopiesTable(Table):
    """An owner, and hosts with copies that act only when the test says so.

    Attributes:
        memory: Each host's copy and promise. Both outlive the host's forwarder.
        errors: For each host that cannot make changes, the reason.
        digests: For each host whose changes give a wrong result, that result's digest.
        busy: Hosts that do not touch their copies for now.
    """

    def __init__(self, *hosts: str, term: int = 1, restored: bool = True) -> None:
        super().__init__()
        self.memory: dict[str, tuple[Copy, int]] = {}
        self.errors: dict[str, Exception] = {}
        self.digests: dict[str, int] = {}
        self.busy: set[str] = set()
        self.owner = self.new_owner(term)
        for host in hosts:
            self.add(host, Segment(step=-1))
        self.owner.list_hosts(frozenset(hosts), self.now)
        self.settle()
        if restored:
            self.settled_restore("first", 0)

    def new_owner(self, term: int) -> OwnerCore:
        return OwnerCore(term, None, TIMING, copies=True)

    def add(self, host: str, segment: Segment, copies: int = 0) -> None:
        copy, promise = self.memory.setdefault(host, (NO_COPY, 0))
        incarnation = self.owner.enrol(host, self.now)
        core = ForwarderCore(host, incarnation, TIMING, copy, promise, copies)
        self.hosts[host] = core, segment

    def take_over(self, term: int, *listed: str) -> None:
        """Let a new owner take over. The hosts do not know it yet."""
        self.owner = self.new_owner(term)
        self.owner.list_hosts(frozenset(listed), self.now)

    def act(self, host: str) -> list[object]:
        done = super().act(host)
        core = self.hosts[host][0]
        self.memory[host] = self.memory[host][0], core._promise
        while host not in self.busy and (change := core.next_change()) is not None:
            get, order = change
            done.append(get)
            if get is Get.STAGE:
                assert order.stage is not None
                if host in self.errors:
                    core.refused(order.stage.update, self.errors[host])
                else:
                    core.staged(order.stage)
                continue
            stage, copy = core.stage, self.copy(host)
            if get is Get.REPLACE:
                assert order.source is not None
                lineage = self.copy(order.source).lineage
                self.set_copy(host, Copy(lineage, max(copy.begun, order.step), order.step))
            else:
                assert stage is not None
                is_whole = stage.parent is None
                step = order.step if is_whole else stage.step
                digest = 0 if is_whole else self.digests.get(host, 1)
                lineage = Lineage(*stage.update, digest)
                self.set_copy(host, Copy(lineage, max(copy.begun, step), step))
            core.changed(self.copy(host))
        return [*done, *(super().act(host) if done else [])]

    def copy(self, host: str) -> Copy:
        return self.memory[host][0]

    def set_copy(self, host: str, copy: Copy) -> None:
        self.memory[host] = copy, self.memory[host][1]

    @property
    def numbers(self) -> list[int]:
        """The number of each host's last change."""
        return [
            copy.lineage.number >> MARK_BITS + BEGINNING_BITS for copy, _ in self.memory.values()
        ]

    # Calls of chiefs

    def ask_from(self, host: str, required: int = 1, ticket: str = "t") -> object:
        return self.owner.ask(ticket, required, self.now, host=host)

    def open_block(self, host: str, required: int = 1, ticket: str = "t") -> object:
        """Let a chief of this host get a round."""
        self.ask_from(host, required, ticket)
        self.settle()
        return self.ask_from(host, required, ticket)

    def update(self, call: str = "u", ticket: str = "t") -> object:
        return self.owner.update(call, ticket, "source", 0, self.now)

    def settled_update(self, call: str = "u", ticket: str = "t") -> object:
        self.update(call, ticket)
        self.settle()
        return self.update(call, ticket)

    def restore(self, call: str, step: int, host: str = "a", *, only_first: bool = False) -> object:
        return self.owner.restore(call, host, "source", 0, step, self.now, only_first=only_first)

    def settled_restore(self, call: str, step: int, host: str = "a") -> None:
        assert isinstance(self.restore(call, step, host), Staging)
        self.settle()
        assert isinstance(self.restore(call, step, host), Told)

    def round(self, host: str = "a", *, required: int = 1, ticket: str = "t") -> None:
        """Let a chief of this host open a round, update the parameters and consume the round."""
        self.open_block(host, required, ticket)
        assert isinstance(self.settled_update(f"call of {ticket}", ticket), Told)
        assert self.owner.leave(ticket, self.now, consume=True)
        self.settle()
