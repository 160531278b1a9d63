"""The step of a group over hosts, as its owner knows it: read, and waited for."""

from shmacc._multihost.messages import Finished, NotReady
from shmacc.errors import DeadlineExceededError
from shmacc.ray._link import Link, finished, not_ready
from shmacc.ray._parts import State
from shmacc.ray._waits import Wait


def state_of(link: Link, until: float | None = None) -> State:
    """Return what the owner knows: the step, how many gradients there are, hosts, counters."""
    state: State = link.call("state", until=until)
    return state


def step_of(link: Link, until: float | None = None) -> int:
    """Return the owner's step.

    Raises:
        FailedPreconditionError: It was started again and knows none yet.
    """
    if (step := state_of(link, until)[0]) is None:
        raise not_ready(link)
    return step


def wait_step(link: Link, after: int, seconds: float | None) -> int:
    """Wait until the owner's step is past `after`, and return it.

    Raises:
        As `AccumulatorGroup.wait_step`.
    """
    wait = Wait(seconds)
    while True:
        match link.wait("wait_step", after, wait=wait):
            case int(step):
                return step
            case Finished():
                raise finished(link)
            case NotReady():
                raise not_ready(link)
        if wait.is_over():
            known, accumulated, *_ = state_of(link)
            if known is None:
                raise not_ready(link)
            raise DeadlineExceededError(
                f"The global step is {known}, not past {after}, after {seconds:g} seconds"
            ).with_fields(step=known, accumulated=accumulated)
