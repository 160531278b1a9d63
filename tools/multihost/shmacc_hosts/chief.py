"""Simulated chiefs: they ask for rounds, and update the parameters in their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmacc._multihost.messages import Conflict, Ended, NotReady, Opened, Refused, Staging, Told
from shmacc_hosts.memory import ids
from shmacc_hosts.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_hosts.machine import Machine
    from shmacc_hosts.owner import Owner


class Chief:
    """A chief. Its messages may be lost, so it repeats each until it has an answer.

    Attributes:
        life: How many chiefs were in its place before it.
        owner: The number of the owner that it calls; None: it must find one.
        after: What it will do once the next owner goes on with its block.
        does: The call that it makes; or "stay", "told": in its block, before or after its update.
        ticket: Its ticket at the owner.
        made: The name of the call that makes its change; "": it makes no change.
    """

    part = "chief"

    def __init__(self, world: Any, number: int, machine: Machine, life: int) -> None:
        self.world, self.number, self.machine, self.life = world, number, machine, life
        self._boot = machine.boots
        self.is_dead = False
        self.owner: int | None = None
        self.does = self.after = self.ticket = self.made = ""
        self.block: Opened | None = None
        self.opened_at: float | None = None  # when it got a round of which it still lacks parts
        self.tried: tuple[object, ...] = ()  # its last call, and the owner's serial after the call
        self.asked = False  # whether a call of it waits at the owner
        self.next_round()

    def __repr__(self) -> str:
        what = self.machine.name, self.owner, self.alive, self.does, self.ticket, self.made
        return f"<chief {self.name} {what}>"

    @property
    def alive(self) -> bool:
        return not self.is_dead and self.machine.up and self.machine.boots == self._boot

    @property
    def name(self) -> tuple[int, int]:
        return self.number, self.life

    def next_round(self) -> None:
        self.ticket, self.made, self.does = f"ticket {self.world.next_number()}", "", "ask"
        self.block = self.opened_at = None

    def begin(self, does: str) -> None:
        """Begin to make a change, by calls with a new name."""
        self.does, self.made = does, f"call {self.world.next_number()}"

    def waits_at(self, owner: Owner) -> bool:
        """Whether the owner knows this chief's call, so that the chief needs only the answer."""
        return self.does != "ask" or owner._queue.find(self.ticket) is not None

    # Steps

    def steps(self) -> Iterator[Step]:
        for what, arg in self._steps():
            yield Step("chief", self.number, what, arg)

    def _steps(self) -> Iterator[tuple[str, str | None]]:
        world, machine = self.world, self.machine
        owner = None if self.owner is None else world.owners[self.owner]
        is_over = owner and world.last_step is not None and owner.step >= world.last_step
        if not self.alive:
            yield "replaced", None
        elif machine.frozen or self.asked:
            return
        elif owner is None or (owner.known_dead and not machine.zombie):
            if world.registered is not None or not (machine.zombie or machine.cut_off):
                yield "find", None
                if world.timeless and world.registered is None and world.may("clock"):
                    yield "find", "behind"
        elif self.does in {"stay", "told"}:
            if not (world.timeless or world.parks):
                yield "hear", None
            for what in self._choices() if world.may_call(self, owner) else ():
                yield "decide", what
        elif world.may_call(self, owner):
            asks = self.does == "ask"
            is_tried = self.tried == (owner.number, owner.serial, self.does, self.ticket)
            if not (asks and is_over) and not (world.timeless and is_tried):
                yield "call", self.does
            if self.does in {"update", "restore"} and world.may("withdraw"):
                yield "decide", "withdraw"
            if asks and world.copies and world.may("restore"):
                yield "decide", "restore"

    def _choices(self) -> list[str]:
        """Return what the chief can do next in its block, before or after the update."""
        raises = self.world.may("raise")
        if self.does == "told" or not self.world.copies:
            return ["leave", "fail"] if raises else ["leave"]
        return ["update", "fail", "skip"] if raises else ["update"]

    def due(self, _: Step) -> float:
        return 0.0

    def replaced(self, _: None = None) -> None:
        """Start another chief in this one's place, perhaps on another machine."""
        world = self.world
        able = [m for m in world.machines if m.up and not m.zombie]
        if able:
            home = self.machine if self.machine in able else able[self.life % len(able)]
            world.chiefs[self.number] = Chief(world, self.number, home, self.life + 1)

    def find(self, clock: str | None = None) -> None:
        """Find the owner, or make one. End what the chief was doing, except for an open block."""
        self.world.fails += clock is not None
        self.owner = self.world.find_owner(self.machine, is_behind=clock is not None).number
        if self.world.copies and self.block is not None:
            self.after, self.does = (self.does if self.does != "resume" else self.after), "resume"
        elif self.world.copies or self.does != "stay":
            self.next_round()

    def decide(self, what: str) -> None:
        """Do `what` next: it is a choice of the chief, or a failure."""
        self.world.fails += what in {"fail", "skip", "withdraw", "restore"}
        if what in {"update", "restore"}:
            self.begin(what)
        else:
            self.does = "leave" if what == "skip" else what
        if self.world.timeless:
            self.call(self.does)

    def hear(self, _: None) -> None:
        self._send("hear", self.ticket)

    # Calls

    def call(self, _: str) -> None:
        """Send the present call; it may reach the owner twice."""
        world, ticket, made, home = self.world, self.ticket, self.made, self.machine.name
        source = self.name, made
        match self.does:
            case "ask":
                self._send("ask", ticket, world.required, host=home)
            case "restore_first":
                self._send("restore", made, home, source, 0, 0, only_first=True)
            case "restore":
                step = world.restored_step(self)
                self._send("restore", made, home, source, 0, step, only_first=False)
            case "update":
                if not world.timeless:
                    self._send("hear", ticket)
                memory = self.machine.memory
                checked = None if memory.torn or world.may("refuse") else memory.lineage
                self._send("update", made, ticket, source, world.size, checked=checked)
            case "withdraw":
                self._send("withdraw", made)
            case "leave" | "fail":
                self._send("leave", ticket, consume=self.does == "leave")
            case "resume":
                self._send("resume", ticket, self.block, host=home)
            case "set_step":
                self._send("set_global_step", world.known_step, made)

    def _send(self, method: str, *args: Any, **options: Any) -> None:
        """Call the owner. The answer counts only if the chief is still doing the same by then."""
        assert self.owner is not None
        owner, state = self.world.owners[self.owner], (self.does, self.ticket, self.made)
        call = self.name, state, method, args, options
        self.world.send("call", self.machine, owner.machine, self.owner, self.number, call)
        self.asked = method != "hear" and self.world.parks > 0
        self.tried = owner.number, owner.serial, *state[:2]

    def hear_answer(self, call: tuple[Any, Any], answer: object) -> None:
        """Receive the owner's answer to a call; ignore it if the chief does something else now."""
        self.asked = False
        if not self.alive or call != (self.name, (self.does, self.ticket, self.made)):
            return
        (self._resumed if self.does == "resume" else self._heard)(answer)

    def _heard(self, answer: object) -> None:
        """Decide by the owner's answer what to do next."""
        world = self.world
        match self.does, answer:
            case "ask", NotReady():
                self.begin("restore_first" if world.copies else "set_step")
            case "ask", Opened():
                self._open(answer)
            case "ask", Conflict():
                world.end_others(answer.contributor)
                self.next_round()
            case "ask", Ended():
                self.next_round()
            case (("update" | "withdraw" | "restore" | "restore_first"), Staging()):
                pass  # the owner has not decided yet
            case "update", Told():
                update = world.owners[self.owner or 0].updates.get(self.made)
                path = self.machine.memory.path
                assert update in ids(path), f"the chief is told of {update}, but reads {path}"
                self.does = "told"
            case "update", Refused():
                world.happened["refused"] += 1
                self.does = "fail" if answer.committed else "stay"
            case (("update" | "withdraw"), _):
                self.does = "fail"
            case (("restore" | "restore_first" | "set_step"), _):
                world.happened["restored"] += isinstance(answer, Told)
                self.does, self.made = "ask", ""
            case (("leave" | "fail"), _):
                if answer and self.block is not None:
                    world.known_step = max(world.known_step, self.block.step + 1)
                self.next_round()

    def _resumed(self, answer: object) -> None:
        """Go on as the next owner's answer to "resume" says; check that no update is lost."""
        if isinstance(answer, Opened):
            assert not self._has_made(), f"LOST the update of {self.made}"
            self.block = answer
            self.does = self.after
        elif answer is not None:
            assert self._has_made() or isinstance(answer, Ended), f"{self.made} was not made"
            self.world.happened["made by the next owner"] += isinstance(answer, Told)
            self.next_round()

    def _has_made(self) -> bool:
        """Whether this chief's update is in the owner's line of changes."""
        owners = self.world.owners
        made = {owner.updates.get(self.made) for owner in owners} - {None}
        return not made.isdisjoint(ids(owners[self.owner or 0].line))

    def _open(self, opened: Opened) -> None:
        """Get the round's pieces from the shards, or tell the owner that some are lost."""
        world, owner = self.world, self.world.owners[self.owner or 0]
        if world.copies:
            line, path = owner.opened[0], self.machine.memory.path
            assert path[: len(line)] == line, f"OWN {path} in a round of {line}"
        found = []
        for shard, place in enumerate(opened.shard_hosts):
            keys, machine = opened.of_shard(shard), world.machine(place)
            if not keys:
                continue
            if machine is None or machine.frozen or not world.reach(machine, self.machine):
                if place in owner.lost:
                    break
                self._wait_for_shards()
                return
            kept = machine.shards.get(shard)
            if kept is None or (pieces := kept.pieces(opened.fence, keys)) is None:
                break
            found += [each for piece in pieces for each in piece]
        else:
            if opened.shard_hosts:
                world.check_pieces(opened, found)
            self.does, self.block = "stay", opened
            return
        owner.missing(self.ticket, world.now)
        owner.settle()

    def _wait_for_shards(self) -> None:
        """Go on asking for the round; give it up if a shard stays out of reach for too long."""
        world = self.world
        self.opened_at = world.now if self.opened_at is None else self.opened_at
        if world.now - self.opened_at > world.timing.expiry:  # the link to the shard may be cut
            self.does = "fail"
