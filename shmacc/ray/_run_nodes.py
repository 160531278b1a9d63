"""The caller's side of a run over hosts: it controls the supervisors on all nodes.

Each node has a supervisor (`_supervisor.py`), which does the work. The caller tells the supervisors
what it wants, and gets their states (`_exchange.py`). It decides where the chief runs, which ranks
a node's workers have, and when the run is over.
"""

import logging
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from shmacc._base import names
from shmacc._run.child import result_of, was_raised
from shmacc._run.children import Interrupted, count_end, too_often
from shmacc._run.signals import CallersSignals
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, WorkerDiedError
from shmacc.ray._exchange import Found, Phase, Plan, Wanted
from shmacc.ray._finding import warn_of_left
from shmacc.ray._head import MOMENT, kill, living_nodes, shown
from shmacc.ray._parts import RUN_VARIABLE, VERSION, make_actor
from shmacc.ray._supervisor import SUPERVISORS, Life, Supervisor, end_actors
from shmacc.ray._waits import wait_for_all

_logger = logging.getLogger("shmacc")

START = 120.0  # seconds for all nodes to start their part
_LARGE = 50_000  # a plan with more bytes goes through Ray's store
_LOOK = 0.1  # seconds between two checks for signals
_ARRIVE = 5.0  # seconds for a signal to arrive at the processes of all nodes
_NODES = 1.0  # seconds between two checks for new and lost nodes
_END = 30.0  # seconds for a node to end and clean up, besides the grace of its processes


class _Node:
    """What the caller knows of a node and its supervisor."""

    def __init__(self, node: str, place: int) -> None:
        self.id, self.label = node, shown(node)
        self.place = place  # its first rank is place * workers per node; -1: it was refused
        self.phase = Phase.NEW
        self.finished: frozenset[int] = frozenset()  # the ranks of workers that have returned
        self.actor: Any = None
        self.call: Any = None  # the call without an answer yet; None: there is none
        self.turn = self.seen = self.born = 0
        self.ends: deque[float] = deque()  # when the supervisor has ended and was restarted

    def runs_nothing(self) -> bool:
        return self.phase is Phase.NEW or self.phase >= Phase.IDLE

    def is_gone(self) -> bool:
        return self.phase is Phase.GONE


class Cluster:
    """The nodes of a run; makes, directs and ends their supervisors."""

    def __init__(self, run: str, plan: Plan, signals: CallersSignals, *, named: bool) -> None:
        self._run, self._named, self._limits, self._signals = run, named, plan.limits, signals
        # Store a large plan, so that each node gets it once. (Ray loses it if this node is lost.)
        self._workers, large = plan.workers, len(plan.chief) > _LARGE
        self._plan = ray.put(plan) if large else plan
        self._here = ray.get_runtime_context().get_node_id()
        # The number tells this call from an earlier run of the same name, which may be just ending.
        self._call = f"{run}/{uuid.uuid4().hex[:8]}"
        self._nodes: dict[str, _Node] = {}
        self._wanted = Wanted()
        self._leader: _Node | None = None
        self._result: bytes | None = None
        self._started = self._ending = False
        self._looked = 0.0
        self._life = make_actor(
            *(ray.remote(Life), self._call, self._here),
            namespace=SUPERVISORS,
            lifetime="non_detached",
            max_restarts=-1,
            max_concurrency=10_000,
        )

    def result(self, until: float) -> Any:
        """Run everything and return the chief's result; leave no process, name or actor behind."""
        ended_well = False
        try:
            self._start(until)
            while self._result is None or not all(map(_Node.runs_nothing, self._nodes.values())):
                self._turn()
            ended_well = True
        finally:
            try:
                self._end(ended_well or not self._named or (False if self._started else None))
            finally:  # in a cancelled Ray task Ray's waits fail: then the nodes end by themselves
                kill(self._life)
        return result_of(self._result)

    def send_if_handled(self, number: int) -> bool:
        """Pass a signal on to all nodes; return whether a process there handles it."""
        there = [node.actor for node in self._nodes.values() if node.actor is not None]
        calls = [actor.signal.remote(number) for actor in there]
        # Wait: the signal may stop this process next, and must have reached the nodes by then.
        ended = wait_for_all(calls, time.monotonic() + _ARRIVE) if calls else []
        handled = len(ended) < len(calls)  # an unknown answer counts as yes: the run must not end
        for call in ended:
            with suppress(ray.exceptions.RayError):
                handled |= ray.get(call)
        return handled

    send = send_if_handled

    def _start(self, until: float) -> None:
        self._look_for_nodes(until)
        while missing := [node for node in self._nodes.values() if node.phase < Phase.READY]:
            if time.monotonic() > until:
                raise DeadlineExceededError(
                    f"After {START:g} seconds these nodes have not started their part of the run: "
                    f"{', '.join(node.label for node in missing)}"
                )
            self._turn()
        self._started = True
        self._lead()

    def _lead(self) -> None:
        """Choose where the chief runs: on this process's node, or if that is gone, on another."""
        ready = [node for node in self._nodes.values() if node.phase is Phase.READY]
        self._leader = min(
            ready, key=lambda node: (node.id != self._here, node.place), default=self._leader
        )
        self._want()

    def _want(self, **changed: Any) -> None:
        """Change what the caller wants; the next `_turn` tells all nodes."""
        self._wanted = self._wanted._replace(turn=self._wanted.turn + 1, **changed)

    def _turn(self) -> None:
        self._signals.act([self])
        if self._signals.over and not self._ending:
            raise Interrupted
        if self._signals.in_haste and self._wanted.ended_by != signal.SIGKILL:
            self._want(ended_by=signal.SIGKILL)
        if time.monotonic() > self._looked + _NODES:
            self._look_for_nodes(time.monotonic() + MOMENT)
        there = [node for node in self._nodes.values() if node.call is not None]
        for node in there:
            if node.turn != self._wanted.turn:
                self._ask(node)
        calls = {node.call: node for node in there}
        if not calls:
            time.sleep(_LOOK)
            return
        for call in ray.wait(list(calls), timeout=_LOOK)[0]:
            self._hear(calls[call])

    def _look_for_nodes(self, until: float) -> None:
        living = living_nodes(None, until)
        self._looked = time.monotonic()
        for node in [each for each in self._nodes.values() if each.id not in living]:
            del self._nodes[node.id]
            _logger.warning("Node %s is gone, and its processes", node.label)
        for each in sorted(living, key=lambda node: (node != self._here, node)):
            if self._result is None and not self._ending and each not in self._nodes:
                taken = {node.place for node in self._nodes.values()}
                place = next(place for place in range(len(taken) + 1) if place not in taken)
                self._nodes[each] = _Node(each, place)
        for node in self._nodes.values():
            if node.call is None and not node.is_gone():
                self._find(node, until)
        if self._started and self._result is None and self._leader not in self._nodes.values():
            self._lead()

    def _find(self, node: _Node, until: float) -> None:
        """Find a supervisor that Ray has restarted, or make one, unless Ray's head is away."""
        outer = f"${{{names.NAMESPACE_VARIABLE}}}." if names.current_namespace() else ""
        given = {names.NAMESPACE_VARIABLE: f"{outer}{self._run}", RUN_VARIABLE: self._call}
        name = f"{self._call}/{node.id}"
        with suppress(DeadlineExceededError):
            node.actor = make_actor(
                *(ray.remote(Supervisor), name, node.id, VERSION, self._named),
                until=max(until, time.monotonic() + 1.0),
                namespace=SUPERVISORS,
                max_restarts=-1,
                max_concurrency=16,
                runtime_env={"env_vars": given},
            )
            self._ask(node)

    def _ask(self, node: _Node, *plan: Any) -> None:
        wanted = self._wanted._replace(
            first=node.place * self._workers,
            finished=node.finished,
            leads=node is self._leader,
            leaves=self._wanted.leaves or node.place < 0,
        )
        node.turn = wanted.turn
        node.call = node.actor.exchange.remote(wanted, node.seen, *plan)

    def _hear(self, node: _Node) -> None:
        call, node.call = node.call, None
        try:
            found: Found = ray.get(call)
        except ray.exceptions.RayError as lost:
            node.phase = Phase.NEW
            if "creation task" in str(lost):
                reason = str(lost).strip().splitlines()[-1].strip()
                told = f"Node {node.label} cannot take part in the run, shmacc {VERSION[0]} is"
                node.phase = Phase.GONE
                self._refuse(node, FailedPreconditionError(f"{told} expected there: {reason}"))
            return
        for number, kind, text in found.lines:
            if number > node.seen:
                _show(node, kind, text.decode(errors="replace"))
        node.seen, node.phase = found.number, found.phase
        node.finished |= found.finished
        if self._result is None and found.result is not None:
            self._result = found.result
            self._want(led=True)
        if not node.is_gone():
            begins = node.phase is Phase.NEW and node.place >= 0 and not self._ending
            self._ask(node, *([self._plan] if begins else ()))
        if not self._ending:
            if found.born != node.born:
                self._note_start(node, found.born)
            if found.raised is not None and node.place >= 0:
                self._fail(node, *found.raised)

    def _fail(self, node: _Node, last: str, pickled: bytes, status: int | None) -> None:
        """Raise the error of a node; if the node has not begun, refuse the node instead."""
        error = was_raised(f"a process on node {node.label}", last, "", pickled)
        if status is not None:
            error.__cause__ = SystemExit(status)
        if node.phase is Phase.NEW:  # it could not begin
            self._refuse(node, error)
        else:
            raise error

    def _refuse(self, node: _Node, error: BaseException) -> None:
        """Go on without a node that has joined later; for one of the first nodes, raise `error`."""
        if self._ending:
            return
        if not self._started:
            raise error
        node.place = -1
        _logger.warning("A node that has joined has no part in the run: %s", error)

    def _note_start(self, node: _Node, born: int) -> None:
        """Note that a supervisor was started; end the run if this happens too often.

        A restarted supervisor counts its processes' ends from 0. So without this check, processes
        whose crash kills the supervisor, too (out of memory, say), would be restarted for ever.
        """
        first, node.born = node.born == 0, born
        if first:
            return
        count, restarts = count_end(node.ends), self._limits.restarts
        what = f"The supervisor of node {node.label} has ended, with the node's processes"
        if count > restarts:
            raise WorkerDiedError(what + too_often(count, restarts)).with_fields(reasons=(what,))
        _logger.warning("%s, and is started again (%d of %d)", what, count, restarts)

    def _end(self, remove: bool | None) -> None:
        """End all remaining processes, then kill the program's actors, then remove the names."""
        self._ending = True
        self._want(ended_by=self._signals.ended_by or signal.SIGTERM)
        self._wait(_Node.runs_nothing, 2 * self._limits.grace + _END)
        if self._started:  # else these actors belong to another run of this name
            end_actors(self._run)
        self._want(leaves=True, removes=remove)
        self._wait(_Node.is_gone, _END)
        nodes = [node for node in self._nodes.values() if node.actor is not None]
        for node in nodes:
            kill(node.actor)
        warn_of_left(self._run, [node.id for node in nodes if not node.is_gone()])

    def _wait(self, over: Callable[[_Node], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(over(node) for node in self._nodes.values() if node.actor is not None):
                return
            self._turn()


def _show(node: _Node, kind: int, text: str) -> None:
    """Write output that came from a node, or log a record that was logged there."""
    if kind > 2:  # noqa: PLR2004  standard output and error
        _logger.log(kind, "%s: %s", node.label, text)
        return
    stream = sys.stdout if kind == 1 else sys.stderr
    with suppress(OSError):
        stream.write(text)
        stream.flush()
