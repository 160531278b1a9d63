"""Shared arrays whose contents one process, the chief, hands on to all nodes.

Each node has ordinary `shmacc.SharedArrays` of the same name; workers attach to those of their own
node, and do not import Ray. The chief writes those of its node; on every other node an actor, the
keeper, writes them. `publish` sends rows through Ray's object store, and returns when the arrays of
every living node have them.

Why a worker that sees a new step sees its parameters

    `publish` is called in the block of a round. The owner moves the step on after the block, and no
    segment's step moves before the owner's. So all writes of a step are made before any worker of
    any node can see the step; and `wait_step` and `global_step`, by which a worker sees it, order
    memory. As on one host, workers of the step that the block closes may read arrays while they are
    written; their gradients are of a step that is over, unless the block raises. Keep each step's
    parameters in a copy of their own (step % 2) where that may happen, or where a chief may die in
    its block.

What dies, or does not answer, and what that costs

    keeper  The chief makes another one, which gets everything before `publish` returns. Meanwhile
            the arrays may have half of the dead one's writes: they are of a step that has not
            begun.
    node    `publish` does not wait for a host that the round's owner considers lost, after
            `timing.lease`: long before Ray sees that its node is dead. The host may be alive. So
            before `publish` goes on without it, the owner closes the host's gate: the segment there
            learns of no step until a keeper there has everything again, and so no worker there sees
            a step before the parameters. If that owner dies, the chief's process tells the next one
            of the gates; so set the step in the chief's process. Outside of a block, `publish`
            waits for as long as Ray considers the node alive.
    joins   A node that joins, or is back, gets everything within seconds, whether or not there is a
            round (`_start_feeding`), and its gate is closed until then: its memory may have arrays
            from before (`_gates.py`). What it gets may include what the chief has written and not
            published yet: that is of a step that no worker has seen.
    chief   The next one, on any node, makes the arrays again; if its node has some, they have what
            was published last. Keepers obey only the last chief. A chief that was merely silent for
            longer than the lease gets an error from `publish`; but it has written the arrays of its
            own node, so the next chief belongs on another node or waits for its end.
"""

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import ray

from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._segment.options import IfExists, Owners
from shmacc._values import arguments
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from shmacc.ray._finding import END, end_parts, warn_of_left
from shmacc.ray._gates import Gates
from shmacc.ray._head import kill, living_nodes
from shmacc.ray._keeper import KeeperActor, refusal, rows_of
from shmacc.ray._link import open_links
from shmacc.ray._parts import LOST, check_connected, chosen_nodes, find_actor, make_actor
from shmacc.ray._waits import ANSWER, PATIENCE, Wait, holding, until_asked, wait_for_all

_logger = logging.getLogger("shmacc")

_REMOVED = 10.0  # seconds for Ray to forget a keeper that was killed
_LOOK_FOR_NODES = 1.0
_AGAIN = 0.2  # seconds before a node gets a new keeper, or a killed one is looked for again


class PublishedArrays(Mapping[str, npt.NDArray[Any]]):
    """The chief's shared arrays, which the arrays of the other nodes follow.

    ``published["emb"]`` is the array of this node, as of `shmacc.SharedArrays`. Write into it in
    the block of a round, and call `publish` before the block ends.
    """

    def __init__(
        self,
        contents: Mapping[str, Any],
        shared_name: str,
        *,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
        hosts: Iterable[str] | None = None,
    ) -> None:
        """Create the arrays on this node, or attach to existing ones, and publish all of them.

        Args:
            contents: As for ``shmacc.SharedArrays``.
            shared_name: As there, but not None: workers attach to it.
            mode: As there.
            owners: As there.
            if_exists: As there; "replace" replaces other nodes' arrays only if they disagree.
            unlink_on_close: Whether `close` removes the arrays of all nodes.
            hosts: The ids of Ray's nodes, as for the group; None: all.

        Raises:
            FailedPreconditionError: Ray is not initialised, or this process has another
                ``SHMACC_NAMESPACE`` than its node.
            InvalidArgumentError: As for ``shmacc.SharedArrays``, on this node or another.
        """
        check_connected()
        if not shared_name:
            raise InvalidArgumentError("Published arrays need a shared_name")
        self._hosts = chosen_nodes(hosts)
        self._here = ray.get_runtime_context().get_node_id()
        self._name, self._chief = shared_name, uuid.uuid4().hex
        self._unlink_on_close, self._closed = unlink_on_close, False
        self._options: dict[str, Any] = {"mode": mode, "owners": owners, "if_exists": if_exists}
        self._keepers: dict[str, Any] = {}  # by node; each was sent all arrays first
        self._slow: dict[str, Any] = {}  # keepers of nodes that were not waited for
        self._given: dict[str, Any] = {}  # by node: the last call, until it is answered
        self._patience: dict[str, float] = {}  # seconds that slow nodes have for the next answer
        self._refused: set[str] = set()  # nodes whose keepers have raised
        self._gates = Gates(shared_name, self._hosts)
        self._fed = frozenset({self._here})  # nodes that have got everything
        self._lock = threading.Lock()  # guards these, and the order of calls to keepers
        self._stop = threading.Event()
        self._end_keeper_here()  # a chief on another node may have left it
        self._arrays = SharedArrays(contents, shared_name, **self._options)
        try:
            self.publish({})
        except BaseException:
            if unlink_on_close:
                self.unlink()
            self._arrays.close()
            raise
        self._end_keeper_here()  # an earlier chief may have restarted it
        _start_feeding(self._feed, shared_name, self._stop)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} over Ray>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shared_name(self) -> str:
        """The name that workers attach to."""
        return self._name

    def publish(
        self,
        changed: Mapping[str, npt.ArrayLike | None] | None = None,
        *,
        timeout: float | None = PATIENCE,
    ) -> None:
        """Have the arrays of all other nodes follow; nodes that are new get everything.

        In the block of a round, this does not wait for a host that the owner considers lost: such a
        host takes no part until it has everything again.

        Args:
            changed: From array to the numbers of the rows that have changed (the first dimension;
                an index may occur twice), or to None for all of it. None: all arrays.
            timeout: Seconds; None: for ever.

        Raises:
            DeadlineExceededError: A node has not answered; the message names it. Call this again.
            FailedPreconditionError: Another chief publishes now; or these are closed or removed.
            InvalidArgumentError: No array of this name; or rows are not given by their numbers.
            IndexError: No such row.
        """
        self._check_goes_on()
        wait = Wait(arguments.timeout(timeout))
        pieces = rows_of(self._arrays, dict.fromkeys(self._arrays) if changed is None else changed)
        with holding(self._lock, wait.until):
            self._check_goes_on()  # again: the copy of the rows may have taken long
            # New nodes last: so a chief that another one has replaced fails before it writes there.
            new = self._new() - (self._gates.nodes - self._refused)  # the feeder serves the others
            rows = ray.put(pieces)
            calls = {n: k.write.remote(self._chief, rows) for n, k in self._keepers.items()}
            self._send_to(calls, wait)
            self._send_to({node: self._give(node, wait.until) for node in new}, wait)
            self._are_fed(new)
            self._open_gates(wait.until)
            self._gates.close(self._gates.nodes, wait.until)
            self._gates.tell_new_owners(self._fed, wait.until)

    def _check_goes_on(self) -> None:
        if self._stop.is_set():
            raise FailedPreconditionError("The published arrays are closed, or were removed")

    def _send_to(self, calls: Mapping[str, Any], wait: Wait) -> None:
        """Wait until each node has answered, is dead, or is lost to an open round."""
        waiting = {call: node for node, call in calls.items()}
        refusals: list[Exception] = []  # raised once all nodes have answered
        while waiting:
            ended = ray.wait(list(waiting), timeout=until_asked(wait.until))[0]
            for call in ended:
                node = waiting.pop(call)
                try:
                    has_answered = self._has_answered(node, call)
                except Exception as error:  # noqa: BLE001  raised below
                    refusals.append(error)
                    continue
                if not has_answered and node in self._new():
                    time.sleep(_AGAIN)
                    waiting[self._give(node, wait.until)] = node
            if not ended:
                self._give_up(waiting, wait)
            if waiting and wait.left() == 0:
                raise DeadlineExceededError(
                    f"The keeper of {self._name!r} on node {', '.join(sorted(waiting.values()))} "
                    "has not answered: it is stopped, or cut off"
                )
        if refusals:
            raise refusals[0]

    def _has_answered(self, node: str, call: Any) -> bool:
        """Handle a keeper's answer; False: it has died, or could not be given the arrays."""
        try:
            obeys = ray.get(call)
        except LOST:
            self._keepers.pop(node, None)
            return False
        except ray.exceptions.RayTaskError as error:
            self._keepers.pop(node, None)
            raise refusal(self._name, node, error.cause) from error.cause
        if obeys is None:  # it has no arrays: a call that was not waited for has failed
            self._keepers.pop(node, None)
            return False
        if not obeys:
            raise self._replaced()
        self._given.pop(node, None)
        self._refused.discard(node)
        self._are_fed({node})  # by this call, or by an earlier one that was not waited for
        return True

    def _open_gates(self, until: float) -> None:
        """Open the gates of the nodes that have everything again."""
        for node in self._gates.nodes & self._keepers.keys():
            self._gates.open(node, until)

    def _are_fed(self, nodes: set[str]) -> None:
        """Note that these nodes have everything; forget fed nodes whose keepers are gone."""
        fed = (self._fed | nodes) & self._keepers.keys()
        self._fed = frozenset({self._here, *fed})

    def _give_up(self, waiting: dict[Any, str], wait: Wait) -> None:
        """Close the gates of the nodes that the owner of an open round considers lost."""
        until = max(wait.until, time.monotonic() + ANSWER)
        said = [link.lost(until) for link in open_links()]
        lost = set().union(*said).intersection(waiting.values())
        self._gates.close(lost, until)
        for call in [call for call, node in waiting.items() if node in lost]:
            node = waiting.pop(call)
            self._given[node] = call
            if (keeper := self._keepers.pop(node, None)) is not None:
                self._slow[node] = keeper

    def _new(self) -> set[str]:
        """Forget keepers of nodes that are dead; return living nodes without one."""
        alive = living_nodes(self._hosts) - {self._here}
        self._keepers = {node: each for node, each in self._keepers.items() if node in alive}
        return alive - self._keepers.keys()

    def _give(self, node: str, until: float) -> Any:
        """Have a new keeper write everything; return the call."""
        end = max(until, time.monotonic() + ANSWER)
        if find_actor(self._keeper(self._here), end) is not None:
            raise self._replaced()  # a chief on another node feeds this one
        given = ray.remote(KeeperActor), self._keeper(node), node, self._name
        keeper = make_actor(*given, until=end)
        everything = ray.put({name: np.asarray(array) for name, array in self.items()})
        call = keeper.obey.remote(self._chief, self._options, everything)
        self._keepers[node] = keeper  # not before: `put` fails if Ray's object store is full
        return call

    def _feed(self) -> None:
        """Send all arrays to nodes that have joined or answer again; tell owners which are fed.

        `publish` waits meanwhile: so a node whose gate opens has the newest arrays.
        """
        mine = self._lock.acquire(timeout=ANSWER)
        try:
            if mine and not self._stop.is_set():
                self._feed_new()
        finally:
            if mine:
                self._lock.release()
            self._gates.tell_again(self._fed)

    def _feed_new(self) -> None:
        for node in self._new() - self._refused:
            if (last := self._given.get(node)) and not ray.wait([last], timeout=0)[0]:
                continue
            self._given[node] = call = self._give(node, time.monotonic())
            if not self._answers_in_time(node, call):
                self._slow[node] = self._keepers.pop(node)
                continue
            try:
                self._has_answered(node, call)
            except Exception:
                self._refused.add(node)  # not fed again until `publish` raises this
                raise
        self._open_gates(time.monotonic() + ANSWER)

    def _answers_in_time(self, node: str, call: Any) -> bool:
        """Whether a node answers the call that has sent it everything in time.

        `publish` waits until then. After a late answer the node may lack rows published since, so
        it is sent everything again, and has twice as long: large arrays take their time.
        """
        seconds = self._patience.pop(node, until_asked())
        end = time.monotonic() + seconds
        while not ray.wait([call], timeout=until_asked(end))[0]:
            lost: set[str] = set()
            with contextlib.suppress(DeadlineExceededError, FailedPreconditionError):
                until = time.monotonic() + ANSWER
                lost = lost.union(*(link.lost(until) for link in open_links()))
            self._gates.tell_again(self._fed)  # often: owners forget silent publishers
            if time.monotonic() >= end or node in lost or self._stop.is_set():
                self._patience[node] = min(2 * seconds, PATIENCE)
                return False
        return True

    def _keeper(self, node: str) -> str:
        return f"{self._name}/keeper {node}"

    def _replaced(self) -> FailedPreconditionError:
        return FailedPreconditionError(f"Another chief publishes {self._name!r} now")

    def _end_keeper_here(self) -> None:
        end = time.monotonic() + _REMOVED
        while (keeper := find_actor(self._keeper(self._here))) is not None:
            kill(keeper)
            if time.monotonic() > end:
                raise self._replaced()
            time.sleep(_AGAIN)

    def close(self) -> None:
        """Let go of the arrays. They stay on all nodes, unless `unlink_on_close`."""
        if not self._closed:
            self._stop.set()
            if self._unlink_on_close:
                self.unlink()
            for node in self._gates.nodes:  # else owners would keep them closed
                with contextlib.suppress(DeadlineExceededError):
                    self._gates.open(node, time.monotonic() + ANSWER)
            self._closed = True
            self._arrays.close()

    def unlink(self) -> None:
        """Remove the arrays' names on all nodes; attached processes go on using them.

        Arrays that another chief publishes now are not removed: they are its own. A warning (logger
        ``shmacc``) says so, or that a node which cannot be reached keeps its names.
        """
        self._stop.set()
        with self._lock:
            new = self._new()  # forgets the keepers of dead nodes
            slow = {node: each for node, each in self._slow.items() if node in new}
            keepers = slow | self._keepers
        if self._is_replaced(keepers):
            _logger.warning("%s: it is not removed", self._replaced())
            return
        self._arrays.unlink()
        left = end_parts(keepers, time.monotonic() + END)
        self._keepers = {}  # only now: a call that failed before can be made again
        warn_of_left(self._name, left)

    def _is_replaced(self, keepers: Mapping[str, Any]) -> bool:
        if find_actor(self._keeper(self._here)) is not None:
            return True
        calls = [keeper.write.remote(self._chief, {}) for keeper in keepers.values()]
        answers = []
        for call in wait_for_all(calls, time.monotonic() + ANSWER):
            with contextlib.suppress(*LOST, ray.exceptions.RayTaskError):
                answers.append(ray.get(call))
        return any(answer is False for answer in answers)


def _start_feeding(feed: Callable[[], None], name: str, stop: threading.Event) -> None:
    """Send the arrays to nodes that have joined or answer again, in a thread of its own.

    A round may wait for workers on such a node, and they for the arrays. So this does not wait for
    the chief's next `publish`. It goes on until it is stopped, replaced, or its object is gone.

    Args:
        feed: The method to call every second.
        name: What is fed, for messages.
        stop: Set at the end.
    """
    what = weakref.WeakMethod(feed)
    threading.Thread(
        target=_keep_feeding, args=(what, name, stop), daemon=True, name="shmacc feeder"
    ).start()


def _keep_feeding(
    what: "weakref.WeakMethod[Callable[[], None]]", name: str, stop: threading.Event
) -> None:
    while not stop.wait(_LOOK_FOR_NODES):
        feed = what()
        if feed is None or not ray.is_initialized():
            return
        try:
            feed()
        except Exception as error:
            if isinstance(error, FailedPreconditionError) and error.__cause__ is None:  # final
                _logger.warning("%s: nodes that join get nothing of this process", error)
                return
            said = "Nodes that have joined did not get %r: %s", name, error
            _logger.log(logging.ERROR, *said, exc_info=not isinstance(error, DeadlineExceededError))
        del feed
