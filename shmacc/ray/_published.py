"""Shared arrays whose contents one process, the chief, hands on to all nodes.

Each node has ordinary `shmacc.SharedArrays` of the same name; workers attach to those of their own
node, and do not import Ray. The chief's are written by the chief, those of another node by a
keeper, an actor there. `publish` sends rows through Ray's object store, and returns when the arrays
of every living node have them.

Why a worker that sees a new step sees its parameters

    `publish` is called in the block of a round. The owner moves the step on after the block, and no
    segment's step moves before the owner's. So all writes of a step are made before any worker of
    any node can see the step; and a worker gets there through its segment's lock (`wait_step`,
    `global_step`), which orders memory. As on one host, workers of the step that the block closes
    may read while it is written; what they compute then is of a step that is over, unless the block
    raises. Keep each step's parameters in a copy of their own (step % 2) where that may happen, or
    where a chief may die in its block.

What dies, and what that costs

    keeper  Ray starts it again, and `publish` waits. What it had acknowledged is in the arrays,
            which outlive it; it does not know its chief any more, so it asks for everything, and
            has it before `publish` returns. Half of its writes may be there meanwhile: of a step
            that has not begun.
    node    `publish` goes on without it as soon as Ray knows that it is dead. A node that joins
            gets everything within seconds, whether or not there is a round: a thread of the
            chief's process looks for such nodes (`_feed`). Rounds may wait for workers there, and
            these for the arrays. What the chief has written and not published yet may be in that
            copy, and is of a step that no worker has seen; `publish` comes after it, in the order
            of calls to the keeper. (If Ray alone was started again on a machine, and its workers
            have survived, they have those from before till then: end them with their Ray.)
    chief   The next one makes the arrays again, on any node: where there are some already it finds
            what was published last, and the keepers obey only the last chief. One that was merely
            silent for longer than the lease gets an error from `publish`; its own node's arrays it
            has written itself, and so the next chief belongs on another node or waits for its end.
"""

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmacc._accumulators.shared_arrays import SharedArrays
from shmacc._gradients import arguments
from shmacc._opening.options import IfExists, Owners
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
)
from shmacc.ray._keeper import KeeperActor, Rows
from shmacc.ray._link import PATIENCE, Wait, end_parts
from shmacc.ray._parts import LOST, NAMESPACE, check_connected, living_nodes

_logger = logging.getLogger("shmacc")

_LOOK_FOR_NODES = 1.0
_AGAIN = 0.2  # until a call that failed is tried again
_REMOVED = 5.0  # a keeper that Ray does not start again for so long, on a living node, was removed


class PublishedArrays(Mapping[str, npt.NDArray[Any]]):
    """The chief's shared arrays, and what makes those of the other nodes follow them.

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
            if_exists: As there; of this node. Existing arrays of other nodes are written.
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
        self._hosts = None if hosts is None else frozenset(hosts)
        self._here = ray.get_runtime_context().get_node_id()
        self._name, self._chief = shared_name, uuid.uuid4().hex
        self._unlink_on_close, self._closed = unlink_on_close, False
        self._options: dict[str, Any] = {"mode": mode, "owners": owners}
        with contextlib.suppress(ValueError, *LOST):  # of a time when the chief was elsewhere
            ray.kill(ray.get_actor(self._actor(self._here), namespace=NAMESPACE), no_restart=True)
        self._arrays = SharedArrays(contents, shared_name, if_exists=if_exists, **self._options)
        self._keepers: dict[str, Any] = {}
        self._lock = threading.Lock()  # of the keepers, and of the order of calls to them
        self._stop = threading.Event()
        try:
            self.publish({})
        except BaseException:
            self._arrays.close()
            raise
        threading.Thread(
            target=_feed, args=(weakref.ref(self), self._stop), daemon=True, name="shmacc feeder"
        ).start()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

        Args:
            changed: From array to the numbers of the rows that have changed (the first dimension;
                an index may occur twice), or to None for all of it. None: all arrays.
            timeout: Seconds; None: for ever.

        Raises:
            DeadlineExceededError: A node has not answered; which one. It may be called again.
            FailedPreconditionError: Another chief publishes these arrays now; or this is closed.
            InvalidArgumentError: No array of this name.
            IndexError: No such row.
        """
        if self._closed:
            raise FailedPreconditionError("The published arrays are closed")
        wait = Wait(arguments.timeout(timeout))
        pieces = self._pieces(dict.fromkeys(self._arrays) if changed is None else changed)
        with self._lock:
            self._publish(pieces, wait)

    def _publish(self, pieces: Rows, wait: Wait) -> None:
        alive = self._alive()
        self._forget_dead(alive)
        old = dict(self._keepers)
        if pieces:
            rows = ray.put(pieces)
            calls = {node: keeper.write.remote(self._chief, rows) for node, keeper in old.items()}
            # Those that have been here before come first: so a chief that another one has
            # replaced fails before it writes anything to those that are new.
            answers = {n: self._get(n, "write", rows, call, wait) for n, call in calls.items()}
        else:
            answers = {}
        if "another chief" in answers.values():
            raise FailedPreconditionError(f"Another chief publishes {self._name!r} now")
        asking = [node for node, answer in answers.items() if answer == "everything, please"]
        if new := [*asking, *sorted(alive - old.keys())]:
            everything = self._everything()
            for node, call in self._give(new, everything).items():
                self._get(node, "obey", everything, call, wait)

    def _everything(self) -> Any:
        return ray.put({name: np.asarray(array) for name, array in self.items()})

    def _give(self, nodes: Iterable[str], everything: Any) -> dict[str, Any]:
        """Have keepers write everything, which new nodes get; return the calls."""
        calls = {}
        for node in nodes:
            if node not in self._keepers:
                self._keepers[node] = self._keeper(node)
            calls[node] = self._keepers[node].obey.remote(self._chief, everything)
        return calls

    def _forget_dead(self, alive: set[str]) -> None:
        for node in self._keepers.keys() - alive:
            del self._keepers[node]

    def _feed(self) -> None:
        """Give nodes that have joined everything; errors are those of the next `publish`."""
        with self._lock:
            alive = self._alive()
            self._forget_dead(alive)
            if new := alive - self._keepers.keys():
                self._give(new, self._everything())

    def _pieces(self, changed: Mapping[str, npt.ArrayLike | None]) -> Rows:
        pieces: dict[str, tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]] = {}
        for name, rows in changed.items():
            if name not in self._arrays:
                raise InvalidArgumentError(f"There is no array {name!r} in {self._name!r}")
            if rows is None:
                pieces[name] = None, self._arrays[name]
            elif len(numbers := np.unique(np.asarray(rows, np.int64))):
                pieces[name] = numbers, self._arrays[name][numbers]
        return pieces

    def _get(self, node: str, method: str, value: Any, call: Any, wait: Wait) -> Any:
        """Return the answer of a keeper, "dead" if its node is; a restarted one is asked again.

        Raises:
            DeadlineExceededError: It has not answered.
            FailedPreconditionError: Ray does not start it again: another chief has removed it.
        """
        end: float | None = None
        while True:
            try:
                return ray.get(call, timeout=wait.left())
            except ray.exceptions.GetTimeoutError:
                raise DeadlineExceededError(
                    f"The keeper of {self._name!r} on node {node} has not answered: it is stopped, "
                    "or cut off"
                ) from None
            except LOST as error:
                if node not in self._alive():
                    return "dead"
                if isinstance(error, ray.exceptions.ActorDiedError):
                    end = end or time.monotonic() + _REMOVED
                    if time.monotonic() > end:
                        raise FailedPreconditionError(
                            f"Another chief publishes {self._name!r} now: the keeper of {node} is "
                            "gone"
                        ) from error
                time.sleep(_AGAIN)
                call = getattr(self._keepers[node], method).remote(self._chief, value)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

    def _alive(self) -> set[str]:
        """Return the other nodes that take part."""
        return living_nodes(self._hosts) - {self._here}

    def _actor(self, node: str) -> str:
        return f"{self._name}/keeper {node}"

    def _keeper(self, node: str) -> Any:
        made = ray.remote(KeeperActor).options(
            name=self._actor(node),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return made.remote(self._name, self._options)

    def close(self) -> None:
        """Let go of the arrays. They stay on all nodes, unless `unlink_on_close`."""
        if not self._closed:
            self._stop.set()
            if self._unlink_on_close:
                self.unlink()
            self._closed = True
            self._arrays.close()

    def unlink(self) -> None:
        """Remove the arrays' names on all nodes; attached processes go on using them.

        A node that cannot be reached keeps its names: a warning (logger ``shmacc``) says so.
        """
        self._stop.set()
        self._arrays.unlink()
        with self._lock:
            keepers, self._keepers = self._keepers, {}
        left = end_parts({node: keepers[node] for node in self._alive() & keepers.keys()})
        if left:
            _logger.warning(
                "Nodes that did not answer may have names of %r left in /dev/shm: %s",
                self._name,
                ", ".join(left),
            )


def _feed(published: "weakref.ref[PublishedArrays]", stop: threading.Event) -> None:
    while not stop.wait(_LOOK_FOR_NODES):
        known = published()
        if known is None or not ray.is_initialized():
            return
        try:
            known._feed()  # noqa: SLF001  its thread
        except Exception:
            _logger.exception("Nodes that have joined did not get %r", known.shared_name)
        del known
