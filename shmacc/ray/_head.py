"""Questions to Ray's head, which may be away for a minute, for instance while it is restarted.

The rest of the cluster works meanwhile, and rounds must go on. But Ray's own calls wait for the
head, take no timeout, and block their thread. So each question has a thread of its own, and each
caller waits only as long as it can afford. If no answer has come by then, the caller gets a
DeadlineExceededError. While a question is open, it is not asked again.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import ray

from shmacc.errors import DeadlineExceededError
from shmacc.ray._waits import PATIENCE, left_until

MOMENT = 0.2  # seconds for an answer that the caller can do without, or will ask for again
_BUSY = 2.0  # seconds within which even a busy head answers

_Answer = TypeVar("_Answer")

_lock = threading.Lock()
# By head and question: the time of asking, and the answer; removed when a caller gets the answer.
_open: dict[tuple[str, str], tuple[float, Future[Any]]] = {}
_alive: tuple[str, set[str]] = "", set()  # a head, and the nodes in its last answer
_hostnames: dict[str, str] = {}  # by node, including dead nodes


def soon(seconds: float) -> float:
    """Return the time (monotonic) until which to wait for an answer that is not essential.

    The seconds count from the oldest question that is open, so that several waits do not add up.
    """
    head, now = _head(), time.monotonic()
    with _lock:
        mine = [each for (of, _), each in _open.items() if of == head]
        return min([now, *(asked for asked, answer in mine if not answer.done())]) + seconds


def answer_of_head(
    question: str, ask: Callable[[], _Answer], until: float | None = None, *, late: bool = False
) -> _Answer:
    """Return what ``ask()`` returns; if the same question is open already, share its answer.

    Args:
        question: The name of the question.
        ask: A function that asks Ray.
        until: The time (monotonic) until which to wait; None: `PATIENCE` from now.
        late: Whether to accept an answer that came too late for an earlier call. Without this, a
            caller that waits only a moment, again and again, gets no answer from a busy head.
    """
    end = time.monotonic() + PATIENCE if until is None else until
    key = _head(), question
    with _lock:
        answer = _open[key][1] if key in _open else None
        if answer is None or (answer.done() and (not late or answer.exception() is not None)):
            answer = Future()
            given = answer, ask
            threading.Thread(target=_ask, args=given, daemon=True, name="shmacc head").start()
            _open[key] = time.monotonic(), answer
    try:
        found: _Answer = answer.result(left_until(end))
    except (TimeoutError, ray.exceptions.GetTimeoutError, ray.exceptions.RpcError):
        raise DeadlineExceededError(
            "Ray's head does not answer in time: it is busy, being started again, or cut off"
        ) from None
    with _lock:
        if _open.get(key, (0.0, None))[1] is answer:
            del _open[key]
    return found


def living_nodes(chosen: Collection[str] | None, until: float | None = None) -> set[str]:
    """Return the ids of the nodes that Ray considers alive, limited to `chosen` (None: all).

    While Ray's head is away, this returns its last answer, if there was one.
    """
    head = _head()

    def ask() -> None:
        global _alive  # noqa: PLW0603  a process has one connection to Ray
        found = ray.nodes()
        _hostnames.update({node["NodeID"]: node["NodeManagerHostname"] for node in found})
        _alive = head, {node["NodeID"] for node in found if node["Alive"]}

    if _alive[0] != head:
        answer_of_head("nodes", ask, until)
    else:
        with contextlib.suppress(DeadlineExceededError):
            answer_of_head("nodes", ask, soon(_BUSY) if until is None else min(until, soon(_BUSY)))
    return _alive[1] if chosen is None else _alive[1] & set(chosen)


def shown(*nodes: str) -> str:
    """Return what messages call these nodes: the hostname, and the first digits of the id."""
    if not _hostnames.keys() >= set(nodes):
        with contextlib.suppress(DeadlineExceededError):
            living_nodes(None, soon(MOMENT))
    return ", ".join(f"{_hostnames.get(node, 'unknown')} ({node[:8]})" for node in nodes)


def kill(actor: Any) -> None:
    """Kill an actor; if Ray's head is away, the actor is killed when the head is back."""
    name = f"end of {actor._actor_id.hex()}"  # noqa: SLF001  the only name that every actor has
    with contextlib.suppress(DeadlineExceededError):
        answer_of_head(name, lambda: ray.kill(actor), soon(_BUSY))


def _head() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _ask(answer: Future[Any], ask: Callable[[], object]) -> None:
    try:
        answer.set_result(ask())
    except Exception as error:  # noqa: BLE001  the caller raises it
        answer.set_exception(error)
