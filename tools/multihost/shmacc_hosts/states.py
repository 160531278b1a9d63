"""Copies of worlds for a search, and keys that tell their states apart.

A copy of a world has copies of all objects whose class is listed here, and shares all others, which
are immutable. A state's key has every attribute of the listed classes except those in `IGNORED`,
which only count, name or record.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from shmacc._base.lineage import Copy, Lineage
from shmacc._multihost.changes import Change
from shmacc._multihost.copies import Copies
from shmacc._multihost.counters import Counters
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.hosts import Grant, Host, Hosts
from shmacc._multihost.messages import (
    Batch,
    Fence,
    HostBatch,
    Opened,
    Order,
    Refusal,
    Report,
    Stage,
)
from shmacc._multihost.shard import ShardCore
from shmacc._multihost.wait_queue import Ticket, WaitQueue
from shmacc_hosts.chief import Chief
from shmacc_hosts.faults import Faults
from shmacc_hosts.machine import Machine, Worker
from shmacc_hosts.memory import Gradient, Ledger, Memory, Segment
from shmacc_hosts.owner import Owner
from shmacc_hosts.world import World

IGNORED: dict[type, str] = {
    World: "hosts workers leaders required shards copies contributors follows timeless timing size "
    "parks kinds failures now messages hears_zombies known_step applied_at moved_at happened "
    "ledger accepted paths steps wholes rounds _rounds_of _numbers faults",
    Machine: "world number incarnation serial polls",
    Owner: "world machine number _seen updates parked woken looked calls unheard answered counters "
    "serial _timing _shards _shown gone _last_required _block_ticket _chiefless",
    Chief: "world number machine life _boot ticket tried opened_at",
    ForwarderCore: "_host _incarnation _timing _hold_began _deaths _death_number _number "
    "_reported_at _reported _news_at _usual _moved _waits _lag",
    Hosts: "_counted _term _home",
    Host: "incarnation deaths apart order",
    Copies: "_shown _answers",
    Change: "call host heard",
    Segment: "dropped taken",
}
_COPIED = {*IGNORED, Worker, Counters, Faults, Ledger, Memory, ShardCore, Ticket, WaitQueue}
_TIMES = frozenset({"heard", "since", "out_since", "_answered_at"})
_PAST = -1e8


def _slots(kind: type) -> list[str]:
    """Return the slots of a class; the list is empty if its objects have a `__dict__`."""
    return [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]


_SLOTS = {kind: _slots(kind) for kind in _COPIED}
_LEFT_OUT = {kind: frozenset(IGNORED.get(kind, "").split()) for kind in _COPIED}
_DEEP = {*_COPIED, list, dict, OrderedDict, Counter}
_PLAIN = {int, bool, str, float, type(None), frozenset, Fence, Lineage, Copy}


def copied(one: Any, made: dict[int, Any] | None = None) -> Any:
    """Return a deep copy of a world or part; `made` has the copies so far, by the original's id."""
    made = {} if made is None else made
    kind = type(one)
    if kind in _COPIED:
        if (found := made.get(id(one))) is not None:
            return found
        made[id(one)] = new = object.__new__(kind)
        for name in _SLOTS[kind]:
            value = getattr(one, name)
            setattr(new, name, copied(value, made) if type(value) in _DEEP else value)
        if not _SLOTS[kind]:
            fields = new.__dict__
            fields.update(one.__dict__)
            for name, value in one.__dict__.items():
                if type(value) in _DEEP:
                    fields[name] = copied(value, made)
        return new
    if kind is list:
        return [copied(each, made) if type(each) in _DEEP else each for each in one]
    new = kind(one)
    for name, value in one.items():
        if type(value) in _DEEP:
            new[name] = copied(value, made)
    return new


def key(world: World) -> tuple[Any, ...]:
    """Return the key of a world's state: states with the same key behave alike."""
    return (*_Keys(world).of(world), *(_links(world, chief) for chief in world.chiefs))


def _links(world: World, chief: Chief) -> Any:
    """Return what owners know of a chief, without the names of tickets and calls."""
    found: list[Any] = [chief.machine.number, chief.alive]
    for owner in world.owners:
        left = owner._queue.served(chief.ticket)
        where = [name == chief.ticket for name in owner._queue.tickets()]
        copies = owner.copies
        change = copies.change is not None and copies.change.call == chief.made
        answer = type(copies.answered(chief.made))
        found += [left, *where, owner._block_ticket == chief.ticket, change, answer]
    return tuple(found)


class _Keys:
    """Makes the keys of a world's parts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._grants = self._changes = True

    def of(self, one: Any) -> Any:
        kind = type(one)
        if kind in _PLAIN:
            return one
        if (how := _SPECIAL.get(kind)) is not None:
            return how(self, one)
        if kind in _COPIED:
            return self._of_object(one, kind)
        if kind in {list, tuple}:
            return tuple([self.of(each) for each in one])
        if kind in {dict, OrderedDict, Counter}:
            return tuple([(name, self.of(value)) for name, value in one.items()])
        return one

    def _of_object(self, one: Any, kind: type) -> Any:
        found = []
        for name in _NAMES.get(kind) or self._names(one, kind):
            value = getattr(one, name)
            if name in _TIMES:
                value = value is not None and value < _PAST
            found.append(value if type(value) in _PLAIN else self.of(value))
        return tuple(found)

    @staticmethod
    def _names(one: Any, kind: type) -> list[str]:
        names = _SLOTS[kind] or list(one.__dict__)
        _NAMES[kind] = [name for name in names if name not in _LEFT_OUT[kind]]
        return _NAMES[kind]

    def of_machine(self, one: Machine) -> Any:
        owner = self._world.owners[-1] if self._world.owners else None
        host = None if owner is None else owner._hosts.find(one.name)
        known = host is not None and host.incarnation == one.incarnation
        return known, self._of_object(one, Machine)

    def of_owner(self, one: Owner) -> Any:
        # Reported facts about a grant or a change matter only while there is a grant or a change.
        self._grants, self._changes = one._grant is not None, one.copies.change is not None
        return one.machine.number, one._seen is not None, self._of_object(one, Owner)

    def of_chief(self, one: Chief) -> Any:
        after = one.after if one.does == "resume" else ""
        return one.owner, one.does, after, bool(one.made), one.block is not None

    def of_stage(self, one: Stage) -> Any:
        return one.update, one.parent, one.step, self._world.maker(one) is None

    def of_queue(self, one: WaitQueue) -> Any:
        found = []
        for name, ticket in one._waiting.items():
            chief = self._world.chief_with(name)
            told = ticket.conflict is not None
            found.append((chief and chief.number, ticket.heard < _PAST, told))
        return tuple(found)

    def of_report(self, one: Report) -> Any:
        return (
            one.fence, one.step, one.count, one.unreached, one.term, one.finished, one.copy,
            one.copies, one.whole, (one.held_for, one.batch is not None) if self._grants else None,
            (one.staged, self.of(one.refused)) if self._changes else None,
        )  # fmt: skip

    def of_order(self, one: Order) -> Any:
        return (
            one.term, one.ready, one.refused, one.fence, one.step, one.hold, one.finished,
            one.grant, one.consumed, one.adopt, one.lineage, self.of(one.stage), one.source,
        )  # fmt: skip


_NAMES: dict[type, list[str]] = {}
_SPECIAL: dict[type, Any] = {
    Machine: _Keys.of_machine,
    Owner: _Keys.of_owner,
    Chief: _Keys.of_chief,
    Stage: _Keys.of_stage,
    WaitQueue: _Keys.of_queue,
    Report: _Keys.of_report,
    Order: _Keys.of_order,
    Gradient: lambda _, one: (one.local_step, one.contributor, one.read),
    Batch: lambda _, one: one.count,
    HostBatch: lambda _, one: (one.key.host, one.key.grant, one.batch.count),
    Opened: lambda keys, one: (one.fence, one.step, one.count, keys.of(one.members)),
    Refusal: lambda _, one: (one.update, one.error is None),
    Grant: lambda _, one: (one.number, one.since < _PAST, one.shard_hosts),
}
