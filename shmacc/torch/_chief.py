"""The chief's side of training: it makes rounds that update shared parameters, and ends the run."""

import os
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NoReturn, Self

import numpy as np
from torch import nn

from shmacc import _core
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.taken import GroupTaken
from shmacc._base import names
from shmacc._parameters.patterns import LearningRate
from shmacc._segment.options import IfExists, Owners
from shmacc._values import arguments
from shmacc._values.arguments import OnDeath
from shmacc._values.specs import TensorSpec
from shmacc.errors import FailedPreconditionError, InvalidArgumentError, ShmaccError
from shmacc.torch import _clipping as clipping
from shmacc.torch import _model as on_model
from shmacc.torch import _optimizers as optimizers
from shmacc.torch import _run as run
from shmacc.torch._block import BlockChanges, Update
from shmacc.torch._buffers import Buffers
from shmacc.torch._chief_state import ModelInMemory
from shmacc.torch._memory import check_attributes
from shmacc.torch._optimizers import OfModel, Schedule
from shmacc.torch._other_chiefs import OtherChiefs
from shmacc.torch._place import OneHost
from shmacc.torch._tables import rows_of
from shmacc.torch._turn import Turn


class Chief(ModelInMemory):
    """The common base of synchronous and asynchronous training."""

    _place = OneHost()

    def __init__(
        self,
        model: nn.Module,
        shared_name: str,
        total_num_replicas: int,
        capacity: int | None,
        *,
        optimizer: OfModel,
        schedule: Schedule | None,
        initial: Any,
        mode: int | None,
        owners: Owners,
        if_exists: IfExists,
    ) -> None:
        total = arguments.int64(total_num_replicas, "total_num_replicas")
        if not 1 <= total <= run.MOST_REPLICAS:
            raise InvalidArgumentError(
                f"total_num_replicas must be 1 to {run.MOST_REPLICAS}, but was {total}"
            )
        names.segment_name(shared_name)  # refuses None: a training always has a name
        own = on_model.tensors(model)
        check_attributes(model, own)
        members = on_model.member_specs(model)
        chosen = optimizers.by_name(optimizer, model)
        if schedule is not None:
            optimizers.check_schedule(schedule, chosen)
        on_model.unexpand(own)
        if initial is not None:
            on_model.load(
                model, initial.state_dict() if isinstance(initial, nn.Module) else initial
            )
        self._model, self._schedule, self._total = model, schedule, total
        self._parameters, self._tables = on_model.parameters(model), on_model.tables(model)
        self._maker = os.getpid()
        numbers = np.zeros(4, np.int64)
        numbers[run.ASYNCHRONOUS] = self._asynchronous
        contents: dict[str, Any] = {name: value.detach() for name, value in own.items()}
        contents |= {
            **{name: rows_of(table).spec for name, table in self._tables.items()},
            run.RUN: numbers,
            run.LEFT: np.zeros(total, np.bool_),
        }
        options: dict[str, Any] = {"mode": mode, "owners": owners, "if_exists": if_exists}
        # Make the group last: replicas attach to it first, and must then find the rest.
        params = run.of_params(shared_name)
        try:
            self._updates = self._place.updates(chosen, contents, params, **options)
        except InvalidArgumentError as error:
            if error.what is not None:  # the existing training has another model or optimizer
                error.add_note(
                    f"This training has two names, {shared_name!r} and {params!r}, that belong "
                    "together: remove both, when no process uses them. ('.left' has an element "
                    "for each of total_num_replicas.) To train on with another optimizer, give the "
                    "new training initial=replicas.state_dict()['model'] of this one."
                )
            raise
        self._shared = self._updates.arrays
        on_failure = ExitStack()  # close at once: if collected later, it would end a later training
        try:
            on_failure.callback(self._shared.close)
            self._run, self._left = self._shared[run.RUN], self._shared[run.LEFT]
            self._check_run(shared_name)
            self._updates.begin_with(self._tables)
            self._group = self._new_group(members, shared_name, capacity, options)
            on_failure.callback(self._group.close)
            self._place.catch_up(self._updates, self._group)
            self._own = own
            placed = self._updates.places_buffers
            on_failure.callback(self._shared._release, at_once=False)  # noqa: SLF001
            self._places = on_model.place(own if placed else self._parameters, self._shared)
            self._buffers = Buffers(model, self._shared, placed=placed)
            self._turn = Turn((0.0, "wait"), threading.get_ident())
            self._buffers.follow()
            self._begin_to_lead(on_failure)
        except BaseException:
            on_failure.close()
            raise

    def _new_group(
        self,
        members: dict[str, TensorSpec],
        shared_name: str,
        capacity: int | None,
        options: dict[str, Any],
    ) -> AccumulatorGroup:
        options = {"reduction_type": "CMEAN", "capacity": capacity, **options}
        make = partial(self._place.group, self._updates, members, shared_name, **options)
        group = make()
        if group.running:
            return group
        group.unlink()  # a chief has died in its `close`
        group.close()
        return make()

    def _begin_to_lead(self, on_failure: ExitStack) -> None:
        shared_name = self._group.shared_name
        self._others = OtherChiefs(shared_name, partial(self._place.living_chiefs, shared_name))
        for name, table in self._tables.items():
            on_failure.callback(rows_of(table).put, rows_of(table).source)
            rows_of(table).share(self._shared, name, trains=False)
        if self._tables:
            clipping.watch(self._model)

    def _check_run(self, shared_name: str) -> None:
        if self._run[run.ASYNCHRONOUS] != self._asynchronous:
            raise InvalidArgumentError(
                f"The replicas of {shared_name!r} exist, and are "
                f"{'asynchronous' if self._run[run.ASYNCHRONOUS] else 'synchronous'}"
            )
        self._scheduled(self.global_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is this process's, and is neither copied nor pickled: "
            "copy the model (copy.deepcopy), or take its state_dict()"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._group.shared_name!r} of {self._total}, "
            f"at step {self.global_step}>"
        )

    @property
    def shared_name(self) -> str:
        """The name that replicas attach to."""
        return self._group.shared_name

    @property
    def active(self) -> int:
        """How many replicas have not left. Replicas that have not come yet count.

        Between two rounds this waits, with the last round's timeout, until the next round has
        gradients or all replicas have left: `while replicas.active` ends without an empty round.
        If this wait fails, the next round raises its error.
        """
        turn = self._turn
        if self._maker == os.getpid() and turn.thread == threading.get_ident() and not turn.error:
            if turn.state == "over":
                turn = self._turn = self._next(turn.waits, ahead=True)
            if turn.run is not None and turn.state == "new":
                try:
                    next(turn.run)
                except ShmaccError as error:
                    turn.error = error if turn.waits[0] != 0 else None
                except BaseException:
                    turn.run.close()  # it may have entered the round before the exception
                    raise
        return self._present

    @property
    def _present(self) -> int:
        return self._total - int(np.count_nonzero(self._left))

    def round(
        self,
        *,
        timeout: float | None = None,
        on_death: OnDeath = "wait",
        learning_rate: LearningRate = None,
    ) -> AbstractContextManager[Update]:
        """Wait for gradients, and let the block update the parameters with their mean.

        When the block begins, each parameter's ``.grad`` is the mean of the round's gradients,
        weighted by samples if replicas pass their number; None if no replica had a gradient. The
        block calls ``optimizer.step()``. After the block, replicas use the new parameters.

        With an optimizer of torch, an exception or a death in the block may leave the parameters
        half updated: then rounds raise FailedPreconditionError until `load_state_dict` is called.

        With an optimizer of `shmacc.optim` the end of the block makes the update, from the values
        that ``.grad`` has then. An exception or a death before that changes nothing. After a
        chief's death, the next round has the same gradients, unless their update was complete. So
        parameters become the same as without deaths. `Update.skip` drops bad gradients.

        Args:
            timeout: Seconds to wait for the gradients; None: for ever.
            on_death: "raise": WorkerDiedError if a replica's process died, or an exception left its
                ``with`` block, even before its first gradient. Each such event ends one wait.
            learning_rate: Replaces, for this update, the rates of optimizers and schedule: a
                number, or a mapping from patterns of names to numbers.

        Returns:
            A context manager whose value is the `Update`.

        Raises:
            DeadlineExceededError: The timeout passed; nothing was consumed.
            WorkerDiedError: A replica died or failed (``reasons``), and ``on_death`` is "raise";
                nothing was consumed.
            FinishedError: Another chief has ended the training.
            CancelledError: This object was closed by another thread.
            FailedPreconditionError: All replicas have left; the parameters may be half updated; or
                the model is not in shared memory any more.
            InvalidArgumentError: A learning rate was given without an optimizer of `shmacc.optim`;
                or, with such an optimizer, the block changed the shape or rows of a ``.grad``, or
                removed it. The round is open again.
        """
        self._updates.check_rate(learning_rate)
        return _core.GeneratorBlock(self._block((timeout, on_death), learning_rate))

    def _next(self, waits: tuple[float | None, OnDeath], *, ahead: bool) -> Turn:
        turn = Turn(waits, threading.get_ident(), ahead)
        turn.run = self._round(turn)
        return turn

    def _block(
        self, waits: tuple[float | None, OnDeath], rate: LearningRate
    ) -> Generator[Update, None, None]:
        turn = self._turn
        if turn.error is not None:
            self._turn = Turn(waits, threading.get_ident())
            raise turn.error
        if turn.state == "open":
            turn.waits = waits
        else:
            inside = turn.state in {"blocked", "running"}  # in a call of this or another thread
            turn = self._next(waits, ahead=False)
            if not inside:
                self._turn = turn
        assert turn.run is not None  # noqa: S101
        try:
            if turn.state == "new":
                next(turn.run)
            turn.rate = rate
            yield from turn.run
        finally:
            turn.run.close()

    def _round(self, turn: Turn) -> Generator[Update, None, None]:
        """Yield the update when its round is open, and yield it again to the block."""
        timeout, on_death = turn.waits
        seconds = arguments.timeout(timeout)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            if not self._present:
                raise FailedPreconditionError("All replicas have left")
            left = None if end is None else max(0.0, end - time.monotonic())
            with self._group.round(self._required(), timeout=left, on_death=on_death) as taken:
                self._others.begins(self.global_step)
                # While this chief waited, another chief may have died between its update and the
                # commit. Then its update already has these gradients.
                done = taken.step < self._updates.done
                empty = not (taken.contributors < run.LEAVING).any()
                if done:
                    self._updates.pass_over(taken)
                elif empty and (turn.ahead or len(taken.contributors) < self._present):
                    self._updates.check(self._group)
                    self._updates.begin(taken.step)
                    self._end(taken, None)
                    done = True
                else:
                    self._check_model()
                    on_model.check_trained(self._parameters, self._group.members)
                    update = self._begin(taken)
                    yield update
                    yield from self._in_block(turn, taken, update)
                # Call this before the commit: if an exception follows the commit, this round must
                # not look like another chief's.
                self._others.ends(self.global_step)
            self._buffers.follow()
            if not done:
                return

    def _in_block(
        self, turn: Turn, taken: GroupTaken, update: Update
    ) -> Generator[Update, None, None]:
        """Yield the update to the block. When the block has ended, make the update."""
        self._updates.check(self._group)
        self._buffers.check()
        block = update._block  # noqa: SLF001
        begins = self._updates.begins(self._group, taken.step)
        try:
            if begins:
                self._updates.begin(taken.step)
            turn.blocked = self._buffers.changing = True
            yield update
        finally:
            block.ended = True
            if begins and not turn.blocked:
                self._updates.give_up()
        block.rate = self._scheduled(update.step) if turn.rate is None else turn.rate
        self._end(taken, block)

    def _required(self) -> int:
        raise NotImplementedError

    def _begin(self, taken: GroupTaken) -> Update:
        # An asynchronous replica's contributors are rank + total * serial.
        ranks = [int(who) % self._total for who in taken.contributors if who < run.LEAVING]
        leaving = len(taken.contributors) - len(ranks)
        # A replica that leaves applies an empty gradient of weight 1.
        weight = taken.weight - leaving
        for name, trained in self._trained.items():
            trained.grad = None
            if name in taken:
                gradient = on_model.given(trained, taken[name])
                if leaving:  # the divisor also counted replicas that leave
                    gradient.mul_(taken.weight / weight)
                trained.grad = gradient
        ids = {name: taken[name].indices for name in self._tables if name in taken}
        block = BlockChanges(self._tables, ids)
        return Update(self.global_step, tuple(sorted(ranks)), weight, taken.step, block)

    def _scheduled(self, step: int) -> LearningRate:
        if self._schedule is None:
            return None
        rate = optimizers.scheduled(self._schedule, step)
        self._updates.check_rate(rate)
        return rate

    def _end(self, taken: GroupTaken, block: BlockChanges | None) -> None:
        """Make the update. It also writes buffers, the run's numbers, and which replicas have left.

        `block` has the changes that the round's block asked for; None: skip the round.
        """
        ranks = taken.contributors[taken.contributors < run.LEAVING] % self._total
        leaving = taken.contributors[taken.contributors >= run.LEAVING] - run.LEAVING
        buffers: dict[str, Any] = {
            name: taken[name].value for name in self._buffers.own if name in taken
        }
        # Use copies: the arrays themselves change only with the whole update.
        numbers, left = self._run.copy(), self._left.copy()
        left[ranks] = False  # a replica that gives a gradient has come back
        left[leaving] = True  # after `ranks`: the round may also have their last gradients
        numbers[run.STEP] += bool(len(ranks))
        values = {run.RUN: numbers, run.LEFT: left}
        if block is None or block.skipped:
            if block is not None:
                self._buffers.put_back()
            self._updates.skip(taken, values)
        else:
            buffers |= {name: self._buffers.own[name] for name in self._buffers.written()}
            self._updates.end(taken, self._trained, buffers | values, block)
        for trained in self._trained.values():
            trained.grad = None

    def close(self) -> None:
        """End the training: replicas that wait return, and the names are removed. Idempotent.

        The model keeps its parameters, and this process may train it further. A killed chief leaves
        the names, so that its replacement finds replicas and parameters. In a forked child of the
        chief, this does not end the training.
        """
        try:
            if self._maker == os.getpid():
                self._give_up()
                self._group.finish()  # ends the training for another chief, too
                self._group.unlink()
                self._shared.unlink()
                for table in self._tables.values():
                    rows_of(table).leave(keep=True)
                self._shared._release(at_once=True)  # noqa: SLF001
        except ShmaccError:
            self._maker = 0
            self._group.close()
            self._shared.close()
            raise
        self._maker = 0
        self._group.close()
        self._shared.close()
