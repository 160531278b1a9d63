"""A chief's round over all hosts: asking for it, having the shards add up, ending it."""

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import as_completed
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import ray

from shmacc._gradients import arguments
from shmacc._multihost.messages import (
    BatchKey,
    Conflict,
    Died,
    Ended,
    Finished,
    Loss,
    NotReady,
    Opened,
    Waiting,
)
from shmacc._multihost.pieces import Joining
from shmacc._records.taken import GroupTaken
from shmacc.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ShmaccError,
    WorkerDiedError,
)
from shmacc.ray._link import ANSWER, Link, Wait, finished
from shmacc.ray._parts import LOST, Missing, Shard, ShardedTaken

_Result = TypeVar("_Result", GroupTaken, ShardedTaken)


class Round(Generic[_Result]):
    """A round over all hosts; made by `AccumulatorGroup.round`."""

    def __init__(
        self,
        link: Link,
        num_required: object,
        timeout: object,
        on_death: object,
        *,
        sharded: bool,
    ) -> None:
        self._link = link
        self._required = arguments.int64(num_required, "num_required")
        if self._required < 1:
            raise InvalidArgumentError(
                f"Argument num_required must be positive, but was {self._required}"
            )
        self._timeout = arguments.timeout(timeout)
        self._tell = arguments.on_death(on_death)
        self._sharded = sharded
        self._ticket = ""
        self._heartbeat: _Heartbeat | None = None

    def __enter__(self) -> _Result:
        """Wait for the gradients and open the round.

        Raises:
            DeadlineExceededError: The timeout passed; or the owner or a shard has not answered for
                a second after it, and which one.
            WorkerDiedError: A host was lost, or a process that had applied died or failed, and
                ``on_death`` is "raise".
            FailedPreconditionError: The owner was started again and knows no step until
                `set_global_step`; or it is gone.
            AlreadyExistsError: The same contributor was accepted on two hosts in two steps one
                after the other. (Once is a worker that moved, and costs one step.)
            FinishedError: The group is finished.
            CancelledError: ``cancel()``; or the owner has not heard of this process for
                ``timing.chief_lease``.
            OutOfRangeError: An integer result does not fit its dtype.
        """
        if self._ticket:
            raise FailedPreconditionError("This round has been entered already; make another one")
        self._ticket = uuid.uuid4().hex
        try:
            return self._enter()
        except BaseException:
            self._give_up()
            raise

    def _enter(self) -> _Result:
        link, wait = self._link, Wait(self._timeout)
        while True:
            answer = link.wait("ask", self._ticket, self._required, wait=wait, tell=self._tell)
            match answer:
                case Opened():
                    if self._heartbeat is None:
                        self._heartbeat = _Heartbeat(link, self._ticket, self._required)
                    result = self._fetch(answer, wait.until)
                    if not isinstance(result, Missing):
                        return cast("_Result", result)  # as `sharded` says
                    link.call("missing", self._ticket, result.keys)
                case Waiting():
                    if wait.is_over():
                        raise self._deadline_exceeded(answer)
                case _:
                    raise _error_of(answer, link)

    def _deadline_exceeded(self, answer: Waiting) -> DeadlineExceededError:
        hosts = f"{len(answer.hosts)} hosts: {', '.join(answer.hosts)}"
        return DeadlineExceededError(
            f"{answer.accumulated} of the {self._required} required gradients had arrived; the "
            f"global step is {answer.step}; alive are {hosts}"
        ).with_fields(accumulated=answer.accumulated, required=self._required, step=answer.step)

    def _fetch(self, opened: Opened, until: float) -> Any:
        """Have the shards add up; Missing: some have lost pieces."""
        link = self._link
        numbers = [number for number in range(link.config.shards) if opened.of_shard(number)]
        actors = link.shards()
        missing: set[BatchKey] = set()

        def arrived(results: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
            """Wait for results of shards; what came, in the order in which it came."""
            shards = {result: number for number, result in results.items()}
            for result in self._completed(shards, until):
                try:
                    found = result.result()
                except LOST:
                    link.lost_shard()
                    missing.update(opened.of_shard(shards[result]))
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                else:
                    if isinstance(found, Missing):
                        missing.update(found.keys)
                    else:
                        yield shards[result], found

        if self._sharded:
            calls = {n: actors[n].run.remote(opened, _nothing, ()) for n in numbers}
            dict(arrived({n: call.future() for n, call in calls.items()}))
            shards = tuple(Shard(n, actors[n], opened) for n in numbers)
            return Missing(tuple(missing)) if missing else ShardedTaken(opened, shards)
        # Futures fetch what there is at once, from other nodes, too.
        rows = {n: actors[n].rows.remote(opened).future() for n in numbers}
        values = {n: actors[n].values.remote(opened).future() for n in numbers}
        found = dict(arrived(rows))
        if missing:
            return Missing(tuple(missing))
        joining = Joining(link.plan, opened, found)
        for number, part in arrived(values):
            joining.add(number, part)
        return Missing(tuple(missing)) if missing else joining.taken()

    def _completed(self, shards: Mapping[Any, int], until: float) -> Iterator[Any]:
        left = None if math.isinf(until) else max(0.0, until - time.monotonic())
        try:
            yield from as_completed(shards, left)
        except TimeoutError:
            silent = sorted(number for call, number in shards.items() if not call.done())
            raise DeadlineExceededError(
                f"Shards {', '.join(map(str, silent))} of {self._link.config.name!r} have not "
                f"answered: {self._link.where(silent)}"
            ) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Consume the gradients and move the step on; after an exception, neither.

        Raises:
            FailedPreconditionError: The round has ended before its block; or the owner died just
                now, and whether the round was consumed is not known.
            DeadlineExceededError: The owner does not answer, and that is not known, either.
        """
        if kind is not None:
            self._give_up()
            return
        try:
            ended = self._link.call("leave", self._ticket, consume=True)
        finally:
            self._rest()
        if not ended:
            raise FailedPreconditionError(
                "The round was ended before its block: by a new step, by an owner that was started "
                "again, or because this process was silent for too long"
            )

    def _give_up(self) -> None:
        self._rest()
        with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
            until = time.monotonic() + ANSWER
            self._link.call("leave", self._ticket, until=until, consume=False)

    def _rest(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None


class _Heartbeat:
    """Says to the owner that the chief is alive, while it is in its block."""

    def __init__(self, link: Link, ticket: str, required: int) -> None:
        self._link, self._ticket, self._required = link, ticket, required
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="shmacc chief").start()

    def _run(self) -> None:
        pause = self._link.config.timing.chief_lease / 4
        while not self._stopped.wait(pause):
            with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
                self._link.call("ask", self._ticket, self._required, 0.0, tell=False)

    def stop(self) -> None:
        self._stopped.set()


def _error_of(answer: Died | Conflict | NotReady | Finished | Ended, link: Link) -> ShmaccError:
    """Return the error for an answer after which there is nothing to wait for."""
    match answer:
        case Died(losses):
            return _worker_died(losses)
        case Conflict(contributor, hosts):
            return AlreadyExistsError(
                f"Contributor {contributor} was accepted on hosts {hosts[0]} and {hosts[1]}, and "
                "again in the next step: processes on both apply as this contributor. End one"
            )
        case NotReady():
            return FailedPreconditionError(
                f"The owner of {link.config.name!r} was started again and does not know the step: "
                "call set_global_step with that of your parameters"
            )
        case Finished():
            return finished(link)
        case Ended():
            return CancelledError(
                f"The wait for a round of {link.config.name!r} was ended: by cancel(), or because "
                "this process was silent for too long"
            )


def _worker_died(losses: tuple[Loss, ...]) -> WorkerDiedError:
    hosts = [loss.host for loss in losses if not loss.pids]
    workers = [
        f"pid {pid} of {loss.host}, {reason}"
        for loss in losses
        for pid, reason in zip(loss.pids, loss.reasons, strict=True)
    ]
    what = [f"hosts were lost: {', '.join(hosts)}"] if hosts else []
    if workers:
        what += [f"processes that had applied gradients are gone: {'; '.join(workers)}"]
    text = "; ".join(what)
    return WorkerDiedError(f"{text[0].upper()}{text[1:]}; nothing was consumed").with_fields(
        pids=tuple(pid for loss in losses for pid in loss.pids),
        reasons=tuple(reason for loss in losses for reason in loss.reasons),
        contributors=tuple(who for loss in losses for who in loss.contributors),
    )


def _nothing(_: GroupTaken) -> None:
    """Only have the shard add up."""
