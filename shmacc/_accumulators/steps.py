"""Reads, sets and follows an accumulator's step, and ends its run."""

import logging
from typing import TYPE_CHECKING

from shmacc import _core
from shmacc._segment.opened import Opened
from shmacc._values import arguments

if TYPE_CHECKING:
    from shmacc._accumulators.coroutines import AsyncSteps

_logger = logging.getLogger("shmacc")


class Steps(_core.FollowedSteps):
    """The steps of a run, for a worker's ``for`` loop; made by ``steps()``.

    Yields the current step at once. Then it yields the newest step whenever the step has changed,
    until the accumulator is finished. A slow worker skips steps. A step that is set back is
    yielded, and so is the step after every restore. After an error in a wait (a timeout, a signal
    handler's exception) the same object can go on waiting.
    """

    __slots__ = ()

    # `__next__` must not be written in Python: see shmacc/native/python/statements.hpp.


class Stepped(Opened):
    """The methods of every accumulator that read, set or follow its step."""

    @property
    def global_step(self) -> int:
        """The accumulator's step; gradients of older steps are dropped. Uses no lock."""
        return self._handle.read_step()

    def set_global_step(
        self,
        new_global_step: int,
        name: str | None = None,  # noqa: ARG002
        *,
        timeout: float | None = None,
    ) -> None:
        """Set the step. Accumulated gradients stay (TF: AccumulatorSetGlobalStep).

        A step lower than the current one is set, too, with a warning to logger "shmacc".

        Args:
            new_global_step: The step; from now on gradients of earlier steps are dropped.
            name: Ignored.
            timeout: Seconds to wait for the lock, which a stopped process may hold; None: for ever.

        Raises:
            InvalidArgumentError: The step is no integer of 64 bits.
            DeadlineExceededError: The timeout passed. Nothing was changed.
            FailedPreconditionError: An update with the round's gradients has begun.
        """
        new = arguments.int64(new_global_step, "new_global_step")
        old = self._handle.set_step(new, arguments.timeout(timeout))
        if new < old:
            _logger.warning(
                "Attempt to set current_global_step_ to smaller value: "
                "current_global_step_ = %d >= %d = new_global_step.",
                old,
                new,
            )

    def advance_step(self, step: int, *, timeout: float | None = None) -> int:
        """Move the step forward: drop the gradients of older steps, and unseal.

        A step that is not past the current step changes nothing. So late or repeated calls are
        harmless.

        Args:
            step: The new step.
            timeout: The same as for `set_global_step`.

        Returns:
            How many accumulated gradients were dropped.

        Raises:
            The errors of `set_global_step`.
        """
        number = arguments.int64(step, "step")
        return self._handle.advance_step(number, arguments.timeout(timeout))

    def finish(self) -> None:
        """End the run for all processes. Any process may call this. Idempotent; waits for nobody.

        From now on `running` is False and applies return False. Takes, rounds and waits for a step
        raise FinishedError, even if they are waiting already. An open block of a round goes on to
        its end. Pending gradients can still be read: by `snapshot`, `state` and `take_partial`.
        `restore` starts the run again.
        """
        self._handle.finish()

    @property
    def running(self) -> bool:
        """Whether the run goes on: False from `finish` until a `restore`. Uses no lock.

        Raises:
            FailedPreconditionError: The run is finished, and has trained other parameters: the new
                parameters of this process would stay untrained.
        """
        return self._handle.running

    def steps(self, *, timeout: float | None = None, on_death: arguments.OnDeath = "wait") -> Steps:
        """Follow the run: yield the current step at once, then the newest step after each change.

        For the loop of a worker, which ends when the accumulator is finished::

            for step in group.steps(timeout=60):
                group.apply(gradient(params), step, contributor=rank)

        A slow worker skips steps. After the step is set back or restored, it is yielded again.

        Args:
            timeout: Seconds to wait, each time; None: for ever.
            on_death: "raise": end the wait if no process is left that moves the step.

        Returns:
            An iterator of steps; its ``__next__`` documents the errors.

        Raises:
            InvalidArgumentError: A bad argument.
        """
        return Steps(self._handle, arguments.timeout(timeout), arguments.on_death(on_death))

    def steps_async(
        self, *, timeout: float | None = None, on_death: arguments.OnDeath = "wait"
    ) -> "AsyncSteps":
        """Follow the run as `steps` does, for ``async for``, without blocking the event loop."""
        from shmacc._accumulators.coroutines import AsyncSteps  # it imports asyncio

        return AsyncSteps(self._handle, timeout, on_death)

    def wait_step(
        self, after: int, *, timeout: float | None = None, on_death: arguments.OnDeath = "wait"
    ) -> int:
        """Wait until the global step is past `after`, and return it. See `steps`.

        A step past `after` is returned even if the accumulator is finished.

        Args:
            after: The last step that the caller knows.
            timeout: Seconds to wait; None: for ever.
            on_death: "raise": end the wait if no process is left that moves the step.

        Returns:
            The global step.

        Raises:
            FinishedError: The accumulator is finished.
            ChiefDiedError: ``on_death`` is "raise"; a process that took is dead or failed (leaving
                in order is neither); and no process is left that has taken or waits to take.
            DeadlineExceededError: The timeout passed.
            CancelledError: The handle was closed.
            InvalidArgumentError: A bad argument.
        """
        past, seconds = arguments.int64(after, "after"), arguments.timeout(timeout)
        return self._handle.wait_step(past, seconds, arguments.on_death(on_death), None)[0]

    async def wait_step_async(
        self, after: int, *, timeout: float | None = None, on_death: arguments.OnDeath = "wait"
    ) -> int:
        """Wait as `wait_step` does, without blocking the event loop of asyncio.

        Raises:
            asyncio.CancelledError: The task was cancelled.
            ShmaccError: The errors of `wait_step`; also ResourceExhaustedError if no thread could
                be started for the wait.
        """
        from shmacc._accumulators import coroutines  # it imports asyncio

        past, seconds = arguments.int64(after, "after"), arguments.timeout(timeout)
        raises = arguments.on_death(on_death)
        return await coroutines.wait_step(self._handle, past, seconds, raises=raises)
