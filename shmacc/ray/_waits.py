"""How long a chief's calls wait. Each call ends, with an answer or with an error.

A part that does not answer need not be dead: it may be stopped or swapped out. Ray cannot tell.
"""

import math
import threading
import time
from typing import Any

import ray

PATIENCE = 60.0  # seconds for the answer to a call that the owner answers at once
ANSWER = 1.0  # seconds that an answer may take after its call's waiting time
_PARKED = 1.0  # the longest time in seconds that a call waits at the owner: a chief's heartbeat


def left_until(until: float) -> float | None:
    """Return how many seconds are left until this time (monotonic); None: for ever."""
    left = max(0.0, until - time.monotonic())
    return None if math.isinf(until) else min(left, threading.TIMEOUT_MAX)


def result_of(call: Any, until: float) -> Any:
    """Return an actor's answer. An exception of a signal's handler, as at a Ctrl-C, is raised.

    Raises:
        GetTimeoutError: Ray's: there is no answer yet.
        RayError: Ray's: the actor is lost, or has raised an exception.
    """
    try:
        return ray.get(call, timeout=left_until(until))
    except SystemError as error:  # Ray went on for a moment after the handler had raised
        raise error.__cause__ or error from None


class Wait:
    """The time limit of a chief that calls the owner again and again until it gets an answer.

    Attributes:
        until: The time (monotonic) by which the last answer must have come.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.until: float = self._end + ANSWER

    def parked(self) -> float:
        """Return for how many seconds the owner may delay the answer to the next call."""
        return max(0.0, min(_PARKED, self._end - time.monotonic()))

    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self._end


def wait_for_all(calls: list[Any], until: float) -> list[Any]:
    """Wait until all calls have ended, at most `until` (monotonic); return the ended calls."""
    return list(ray.wait(calls, num_returns=len(calls), timeout=left_until(until))[0])
