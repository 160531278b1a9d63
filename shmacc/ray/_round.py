"""A chief's round over all hosts: asking for it, having the shards add up, ending it."""

import contextlib
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, TypeVar, cast

import ray

from shmacc import _core
from shmacc._accumulators.taken import GroupTaken
from shmacc._multihost.messages import (
    AtLastStep,
    Conflict,
    Died,
    Ended,
    Finished,
    Loss,
    NotReady,
    Opened,
    Share,
    Waiting,
)
from shmacc._multihost.pieces import Joining
from shmacc._values import arguments
from shmacc.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    ShmaccError,
    WorkerDiedError,
)
from shmacc.ray._head import shown
from shmacc.ray._link import OPEN, Link, OpenBlock
from shmacc.ray._parts import LOST, IncompleteError, Shard, ShardedTaken
from shmacc.ray._waits import ANSWER, PATIENCE, Wait, until_asked

_Result = TypeVar("_Result", GroupTaken, ShardedTaken)


class Round(_core.GeneratorBlock[_Result]):
    """A round over all hosts, for a ``with`` block; made by `AccumulatorGroup.round`.

    Entering waits for the gradients, and opens the round. The end of the block consumes them and
    moves the step on; after an exception, neither.

    Entering raises

    * DeadlineExceededError: The timeout passed; or the owner or a shard has not answered for a
      second after it, and the message names it.
    * WorkerDiedError: A host was lost, or a process that had applied died or failed, and
      ``on_death`` is "raise".
    * FailedPreconditionError: The owner was started again and knows no step until
      `set_global_step`; or it is gone; or this thread has a round of the group open.
    * AlreadyExistsError: The same contributor was accepted on two hosts in two consecutive steps.
      (If in one step only, a worker has moved, and the step is void.)
    * FinishedError: The group is finished.
    * CancelledError: ``cancel()`` was called; or the owner has not heard from this process for
      ``timing.chief_lease``.
    * OutOfRangeError: An integer result does not fit its dtype, or the step cannot move on.

    The end of the block raises

    * FailedPreconditionError: The round has ended before its block; or the owner died just now,
      and whether the round was consumed is not known.
    * DeadlineExceededError: The owner does not answer: then that is not known, either.
    """

    # `__enter__` and `__exit__` must not be written in Python: an exception before their first
    # instruction would leave the round open, and its heartbeats going on.

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
        self._required = arguments.required(num_required)[0]
        self._timeout = arguments.timeout(timeout)
        self._tell = arguments.on_death(on_death)
        self._sharded = sharded
        self._ticket = uuid.uuid4().hex
        self._told = 0  # how many losses the owner has told this chief
        self._left: threading.Event | None = None  # set to end the heartbeats
        block: Any = self._run()
        super().__init__(block)

    def _run(self) -> Generator[Any]:
        link, ticket, in_block = self._link, self._ticket, False
        mine = (link, threading.current_thread())
        if any((block.link, block.thread) == mine for block in OPEN.copy().values()):
            raise FailedPreconditionError(
                "This thread has a round of this group open, and would wait for the block's end"
            )
        try:
            taken = self._enter()
            in_block = True
            yield taken
            in_block = False
            ended = link.call("do", "leave", ticket, consume=True)
            self._rest()
        except BaseException:
            self._rest()
            if in_block:
                with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
                    until = time.monotonic() + ANSWER
                    link.call("do", "leave", ticket, until=until, consume=False)
            else:
                link.tell("do", "leave", ticket, consume=False, told=self._told)
            raise
        if not ended:
            raise FailedPreconditionError(
                "The round was ended before its block: by a new step, by an owner that was started "
                "again, or because this process was silent for too long"
            )

    def _enter(self) -> _Result:
        link, waiting = self._link, Wait(self._timeout)
        while True:
            asked = self._ticket, self._required
            answer = link.wait("ask", *asked, wait=waiting, host=link.here, tell=self._tell)
            match answer:
                case Opened():
                    if self._left is None:
                        self._left = threading.Event()
                        _stay_alive(link, self._ticket, self._left)
                    try:
                        result = self._fetch(answer, waiting.until)
                    except IncompleteError:
                        until = min(waiting.until, time.monotonic() + PATIENCE)
                        link.call("do", "missing", self._ticket, until=until)
                    else:
                        thread = threading.current_thread()
                        OPEN[self._ticket] = OpenBlock(link, self._ticket, thread, answer, result)
                        return cast("_Result", result)  # `sharded` determines the type
                case Waiting():
                    if waiting.is_over():
                        raise self._deadline_exceeded(answer)
                case _:
                    self._told = len(answer.losses) if isinstance(answer, Died) else 0
                    raise _error_of(answer, link)

    def _deadline_exceeded(self, answer: Waiting) -> DeadlineExceededError:
        text = (
            f"{answer.accumulated} of the {self._required} required gradients had arrived; the "
            f"global step is {answer.step}; alive are {len(answer.hosts)} hosts: "
            f"{shown(*answer.hosts)}"
        )
        if answer.late:
            text += f"; nodes {shown(*answer.late)} have not sent what they have"
        if answer.lost:
            text += f"; nodes {shown(*answer.lost)} are lost"
        if answer.late or answer.lost:
            text += f": their parts of {self._link.name!r} are slow, stopped, or cut off"
        return DeadlineExceededError(text).with_fields(
            accumulated=answer.accumulated, required=self._required, step=answer.step
        )

    def _fetch(self, opened: Opened, until: float) -> Any:
        """Have the shards add up the round; return the result."""
        shares = [Share.of(opened, number) for number in range(len(opened.shard_hosts))]
        asked = {number: share for number, share in enumerate(shares) if share.keys}
        actors = {number: self._link.host(opened.shard_hosts[number]) for number in asked}
        if None in actors.values():
            raise IncompleteError

        def ask(method: str, *args: Any) -> Iterator[tuple[int, Any]]:
            # A future fetches its result as soon as that is there, also from another node.
            calls = {n: getattr(actors[n], method).remote(n, asked[n], *args) for n in asked}
            return self._answers({n: call.future() for n, call in calls.items()}, opened, until)

        if self._sharded:
            dict(ask("run", lambda _: None, ()))  # only have them add up
            shards = [Shard(n, actors[n], opened, self._link.lost) for n in asked]
            return ShardedTaken(opened, self._link.plan.totals(opened), tuple(shards))
        rows, values = ask("rows"), ask("values")
        joining = Joining(self._link.plan, opened, dict(rows))
        for number, part in values:
            joining.add(number, part)
        return joining.taken()

    def _answers(
        self, calls: Mapping[int, Any], opened: Opened, until: float
    ) -> Iterator[tuple[int, Any]]:
        """Yield each shard and its answer, in the order in which answers come.

        The owner says which hosts are lost: this does not wait for shards there.

        Raises:
            IncompleteError: A shard is lost, or has not all of its pieces.
            DeadlineExceededError: Shards have not answered by `until`.
        """
        waiting = {call: number for number, call in calls.items()}
        while waiting:
            ended = wait(waiting, until_asked(until), FIRST_COMPLETED).done
            for call in ended:
                number = waiting.pop(call)
                try:
                    found = call.result()
                except LOST:
                    self._link.lost_host(opened.shard_hosts[number])
                    raise IncompleteError from None
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                yield number, found
            if ended:
                continue
            left = {number: opened.shard_hosts[number] for number in sorted(waiting.values())}
            if time.monotonic() >= until:
                where = ", ".join(f"{n} on node {shown(node)}" for n, node in left.items())
                raise DeadlineExceededError(
                    f"Shards {', '.join(map(str, left))} of {self._link.name!r} have not answered: "
                    f"they are stopped, or cut off: {where}"
                )
            lost = self._link.lost(max(until, time.monotonic() + ANSWER))
            if not lost.isdisjoint(left.values()):
                raise IncompleteError

    def _rest(self) -> None:
        OPEN.pop(self._ticket, None)
        if self._left is not None:
            self._left.set()


def _stay_alive(link: Link, ticket: str, left: threading.Event) -> None:
    """Tell the owner that the chief in its block is alive, until the event is set."""

    def run() -> None:
        while not left.wait(link.config.timing.chief_lease / 4):
            with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
                link.call("do", "hear", ticket)

    threading.Thread(target=run, daemon=True, name="shmacc chief").start()


def _error_of(
    answer: Died | Conflict | NotReady | Finished | AtLastStep | Ended, link: Link
) -> ShmaccError:
    """Return the error for an answer that ends the wait."""
    match answer:
        case Died(losses):
            return _worker_died(losses)
        case Conflict(contributor, hosts):
            one, two = map(shown, hosts)
            return AlreadyExistsError(
                f"Contributor {contributor} was accepted on hosts {one} and {two}, and "
                "again in the next step: processes on both apply as this contributor. End one"
            )
        case NotReady() | Finished() | AtLastStep():
            return link.error(answer)
        case Ended():
            return CancelledError(
                f"The wait for a round of {link.name!r} was ended: by cancel(), or because "
                "this process was silent for too long"
            )


def _worker_died(losses: tuple[Loss, ...]) -> WorkerDiedError:
    hosts = [loss.host for loss in losses if not loss.pids]
    workers = [
        f"pid {pid} of {shown(loss.host)}, {reason}"
        for loss in losses
        for pid, reason in zip(loss.pids, loss.reasons, strict=True)
    ]
    what = [f"hosts were lost: {shown(*hosts)}"] if hosts else []
    if workers:
        what += [f"processes that apply gradients are gone: {'; '.join(workers)}"]
    text = "; ".join(what)
    return WorkerDiedError(f"{text[0].upper()}{text[1:]}; nothing was consumed").with_fields(
        pids=tuple(pid for loss in losses for pid in loss.pids),
        reasons=tuple(reason for loss in losses for reason in loss.reasons),
        contributors=tuple(who for loss in losses for who in loss.contributors),
    )
