"""The search: visits all states that a timeless world can reach with a given number of failures.

Messages arrive at once. But each part may send its message at any later time, so late and lost
messages are covered. The end of a wait is a step, which is possible whenever the awaited part
cannot act. Each state is checked (world.py), and finally two properties of the whole search:

    STUCK  From each state the living parts can finish without another failure.
    WAITS  No round waits for the end of a failure, if an owner, and a chief on a machine with the
           owner's copy, can go on.

Only 64-bit hashes of states are kept: the probability that two of a million states have the same
hash is one in thirty million.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from shmacc_hosts.states import copied, key
from shmacc_hosts.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_hosts.steps import Step

_ENDS = {"thaw", "join", "mend", "back", "back_empty"}  # ends of failures, which may never come


class Found(NamedTuple):
    """The result of a search."""

    states: int
    fault: str = ""
    path: str = ""  # the steps that lead to it
    limited: bool = False  # not all states were visited


def nexts(world: World) -> Iterator[Step]:
    """Yield each step that can come next in this world, including failures."""
    for part in world.parts:
        yield from part.steps()
    yield from world.faults.strikes()


def _stuck(edges: list[tuple[int, int]], goals: list[bool]) -> list[int]:
    """Return the states from which no sequence of steps leads to a goal."""
    before: list[list[int]] = [[] for _ in goals]
    for one, other in edges:
        before[other].append(one)
    good, new = list(goals), [number for number, goal in enumerate(goals) if goal]
    while new:
        for one in before[new.pop()]:
            if not good[one]:
                good[one] = True
                new.append(one)
    return [number for number, is_good in enumerate(good) if not is_good]


def search(start: World, limit: int) -> Found:
    """Visit the states, breadth first, until a fault is found."""
    gc.disable()  # for speed: few of the discarded objects have cycles
    numbers = {hash(key(start)): 0}
    why: list[tuple[int, str]] = [(-1, "")]
    waiting = deque([start])
    steps: list[tuple[int, int]] = []
    own: list[tuple[int, int]] = []  # the steps other than ends of failures
    done: list[bool] = []
    goes_on: list[bool] = []

    def path(number: int) -> str:
        words = []
        while number > 0:
            number, what = why[number]
            words.append(what)
        return "; ".join(reversed(words))

    at = 0
    while waiting:
        world = waiting.popleft()
        done.append(is_done(world))
        goes_on.append(may_stand_still(world))
        for step in list(nexts(world)):
            after = copied(world)
            try:
                after.do(step)
                after.settle()
                after.check()
            except AssertionError as fault:
                return Found(len(why), str(fault), "; ".join(filter(None, [path(at), str(step)])))
            number = numbers.setdefault(hash(key(after)), len(why))
            if number == len(why):
                why.append((at, str(step)))
                waiting.append(after)
            if after.fails == world.fails:
                steps.append((at, number))
                if step.what not in _ENDS:
                    own.append((at, number))
        at += 1
        if at % 1000 == 0:
            gc.collect()
        if len(why) > limit:
            return Found(len(why), limited=True)
    for what, edges, goals in [("STUCK", steps, done), ("WAITS", own, goes_on)]:
        if bad := _stuck(edges, goals):
            return Found(at, f"{what} in {len(bad)} states", path(bad[0]))
    return Found(at)


def is_done(world: World) -> bool:
    """Whether the last step is reached, and all living machines have the owner's copy and step."""
    owner, last = world.registered, world.last_step
    return owner is not None and last is not None and owner.step >= last and world.are_in_line()


def may_stand_still(world: World) -> bool:
    """Whether rounds may stand still: the last step is reached, or something blocks them.

    They are blocked if no owner leads, or if no chief on a machine with its copy reaches it.
    """
    owner, last = world.registered, world.last_step
    if owner is None or not owner.leads or not owner.line or last is None or owner.step >= last:
        return True
    home = owner.machine
    if not home.up or home.cut_off or home.zombie:
        return True
    return not any(
        chief.alive
        and not (chief.machine.cut_off or chief.machine.zombie)
        and world.reach(chief.machine, home)
        and chief.machine.memory.path == owner.line
        for chief in world.chiefs
    )


def begun(machines: int = 2) -> World:
    """Return a timeless world at step 0 in which all machines have the same copy."""
    world = World(timeless=True, last_step=0, hosts=machines, workers=1, required=1, shards=0)
    for _ in range(1000):
        if world.are_in_line() and all(chief.does == "ask" for chief in world.chiefs):
            break
        step = next(iter(nexts(world)))
        world.do(step)
        world.settle()
    else:
        raise AssertionError(f"no beginning: {world}")
    return world


def moved_on(world: World, what: str) -> None:
    """Take the steps whose names begin with the parts of `what`; skip "...?" if impossible."""
    for wanted in filter(None, (each.strip() for each in what.split(";"))):
        steps = {str(step): step for step in nexts(world)}
        name = wanted.rstrip("?")
        found = next((each for each in steps if each.startswith(name)), None)
        if found is not None:
            world.do(steps[found])
            world.settle()
            world.check()
        elif name == wanted:
            raise LookupError(f"no step {wanted!r} among {sorted(steps)}\n{world}")
