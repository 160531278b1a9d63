"""A chief's round over all hosts: ask the owner for it, have the shards add it up, end it."""

import contextlib
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import ray

from shmacc import _core
from shmacc._accumulators.taken import GroupTaken
from shmacc._multihost.messages import Died, Ended, Opened, Share, Told, Waiting
from shmacc._multihost.pieces import Joining
from shmacc._values import arguments
from shmacc.errors import DeadlineExceededError, FailedPreconditionError
from shmacc.ray._head import shown
from shmacc.ray._link import Link
from shmacc.ray._parts import LOST, IncompleteError
from shmacc.ray._waits import ANSWER, PATIENCE, Wait

_UNANSWERED = 0.5  # seconds without an answer until the owner is asked which hosts are lost


class Round(_core.GeneratorBlock[GroupTaken]):
    """A round over all hosts, for a ``with`` block; made by `AccumulatorGroup.round`.

    Entering waits for the gradients, and opens the round. The end of the block consumes them and
    moves the step on. If the block raises, neither happens.

    Entering raises

    * DeadlineExceededError: The timeout passed; or the owner or a shard, which the message names,
      did not answer within a second after the timeout.
    * WorkerDiedError: A host was lost, or a process that had applied died or failed, and
      ``on_death`` is "raise".
    * FailedPreconditionError: The owner was restarted and does not know the step until
      `set_global_step`; or it is gone; or this thread has a round of the group open.
    * AlreadyExistsError: In two steps without a round in between, two hosts accepted the same
      contributor. (In the first of these steps, a worker may have moved: the step is void.)
    * FinishedError: The group is finished.
    * CancelledError: ``cancel()`` was called; or the owner has not heard from this process for
      ``timing.chief_lease``.
    * OutOfRangeError: An integer result does not fit its dtype, or the step cannot move on.

    The end of the block raises

    * FailedPreconditionError: The round has ended before its block; or the owner died, and another
      chief has got the gradients. Without parameters, or without an update, nobody knows in this
      case whether the round was consumed.
    * DeadlineExceededError: The owner does not answer. Nobody knows whether it consumed the round.
    """

    # `__enter__` and `__exit__` must not be written in Python: an exception (Ctrl-C) before their
    # first instruction would leave the round open, and its heartbeats would go on.

    def __init__(
        self, link: Link, required: object, at_least: object, timeout: object, on_death: object
    ) -> None:
        self.link = link
        self.ticket: str = uuid.uuid4().hex
        self._required, self._least = arguments.required(required, at_least)
        self._timeout = arguments.timeout(timeout)
        self._raises = arguments.on_death(on_death)
        self._told = 0  # how many losses the owner has reported to this chief
        self._left: threading.Event | None = None  # set to end the heartbeats
        self.thread: threading.Thread | None = None  # the thread that entered the block
        self.taken: Opened  # the round, as the owner opened it
        self.given: GroupTaken | None = None  # the block's result; None: the block is over
        self.updated = False  # whether the block's update was made, or may have been
        self.kept: Any = None  # Ray's reference to the update, so that late nodes can still get it
        block: Any = self._run()
        super().__init__(block)

    def _run(self) -> Generator[Any]:
        link, ticket, in_block = self.link, self.ticket, False
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
            ended = self._end()
            self._close()
        except BaseException:
            self._close()
            if in_block:
                with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
                    until = time.monotonic() + ANSWER
                    link.call("do", "leave", ticket, until=until, consume=False)
            else:
                link.send("leave", ticket, consume=False, told=self._told)
            raise
        if not ended:
            raise FailedPreconditionError(
                "The round was ended before its block: by a new step, by an owner that was started "
                "again, or because this process was silent for too long"
            )

    def _end(self) -> bool:
        """End the block, consuming its round; if the owner has died, its successor does this."""
        while not self.link.call("do", "leave", self.ticket, consume=True):
            if not isinstance(found := resume(self, Wait(PATIENCE)), Opened):
                return isinstance(found, Told)
        return True

    def _close(self) -> None:
        """Forget the block, and end its heartbeats."""
        OPEN.pop(self.ticket, None)
        self.given = self.kept = None
        if self._left is not None:
            self._left.set()

    def _enter(self) -> GroupTaken:
        link, waiting = self.link, Wait(self._timeout)
        while True:
            asked = self.ticket, self._required
            answer = link.wait("ask", *asked, wait=waiting, host=link.here, tell=self._raises)
            match answer:
                case Opened():
                    if self._left is None:
                        self._left = threading.Event()
                        _stay_alive(self, self._left)
                    try:
                        given = self._fetch(answer, waiting.until)
                    except IncompleteError:
                        until = min(waiting.until, time.monotonic() + PATIENCE)
                        link.call("do", "missing", self.ticket, until=until)
                    else:
                        self.thread, self.taken = threading.current_thread(), answer
                        self.given = given
                        OPEN[self.ticket] = self
                        return given
                case Waiting():
                    if waiting.is_over():
                        if not self._least <= answer.accumulated < self._required:
                            raise self._deadline_exceeded(answer)
                        self._required = self._least
                        waiting = Wait(link.config.timing.grace + ANSWER)
                case _:
                    self._told = len(answer.losses) if isinstance(answer, Died) else 0
                    raise link.error(answer)

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
            text += f": their parts of {self.link.name!r} are slow, stopped, or cut off"
        return DeadlineExceededError(text).with_fields(
            accumulated=answer.accumulated, required=self._required, step=answer.step
        )

    def _fetch(self, opened: Opened, until: float) -> GroupTaken:
        """Have the shards add up the pieces of the round; return the joined result."""
        shares = [Share.of(opened, number) for number in range(len(opened.shard_hosts))]
        asked = {number: share for number, share in enumerate(shares) if share.keys}
        actors = {number: self.link.host(opened.shard_hosts[number]) for number in asked}
        if None in actors.values():
            raise IncompleteError

        def ask(method: str) -> Iterator[tuple[int, Any]]:
            # A future fetches its result as soon as it exists, even from another node.
            calls = {n: getattr(actors[n], method).remote(n, asked[n]) for n in asked}
            return self._answers({n: call.future() for n, call in calls.items()}, opened, until)

        rows, values = ask("rows"), ask("values")
        joining = Joining(self.link.plan, opened, dict(rows))
        for number, part in values:
            joining.add(number, part)
        return joining.taken()

    def _answers(
        self, calls: Mapping[int, Any], opened: Opened, until: float
    ) -> Iterator[tuple[int, Any]]:
        """Yield each shard's number and answer, in the order in which answers come.

        If answers are late, ask the owner which hosts are lost, and do not wait for their shards.

        Raises:
            IncompleteError: A shard is lost, or lacks some of its pieces.
            DeadlineExceededError: Shards have not answered by `until`.
        """
        waiting = {call: number for number, call in calls.items()}
        while waiting:
            seconds = max(0.0, min(_UNANSWERED, until - time.monotonic()))
            ended = wait(waiting, seconds, FIRST_COMPLETED).done
            for call in ended:
                number = waiting.pop(call)
                try:
                    found = call.result()
                except LOST:
                    self.link.lost_host(opened.shard_hosts[number])
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
                    f"Shards {', '.join(map(str, left))} of {self.link.name!r} have not answered: "
                    f"they are stopped, or cut off: {where}"
                )
            lost = self.link.call("lost", until=max(until, time.monotonic() + ANSWER))
            if not lost.isdisjoint(left.values()):
                raise IncompleteError


OPEN: dict[str, Round] = {}
"""The rounds that this process has open, by ticket."""


def resume(block: Round, wait: Wait) -> Opened | Told | Ended:
    """Have the owner go on with a block that an earlier owner opened (`OwnerCore.resume`)."""
    link, given = block.link, (block.ticket, block.taken)
    found: Opened | Told | Ended = link.until_known("resume", *given, wait=wait, host=link.here)
    if isinstance(found, Opened):
        block.taken = found  # it is this owner's: the next one knows its update by its term
    return found


def _stay_alive(block: Round, left: threading.Event) -> None:
    """Send heartbeats to the owner, in a thread, until the event is set."""
    link, ticket = block.link, block.ticket

    def run() -> None:
        while not left.wait(link.config.timing.chief_lease / 4):
            with contextlib.suppress(FailedPreconditionError, DeadlineExceededError):
                if not link.call("do", "hear", ticket) and ticket in OPEN:
                    resume(block, Wait(ANSWER))

    threading.Thread(target=run, daemon=True, name="shmacc chief").start()
