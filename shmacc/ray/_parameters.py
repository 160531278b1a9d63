"""Parameters with a copy on every node, which all get the same updates.

The chief's `update` goes to the group's owner, which has all nodes get it, and then make it
(`shmacc._multihost.copies`). No process writes the chief's copy but the actor of its node.
"""

import contextlib
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmacc import optim
from shmacc._base.array_types import ValueArray
from shmacc._multihost.messages import AtLastStep, Refused, Staging, Told
from shmacc._parameters import changes, copies
from shmacc._parameters.change_checks import Asked
from shmacc._parameters.new_arrays import Optimizers
from shmacc._parameters.parameters import Parameters as LocalParameters
from shmacc._segment.options import IfExists, Owners
from shmacc._values import arguments
from shmacc._values.specs import TensorSpec
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ShmaccError,
)
from shmacc.ray._finding import groups_of, warn_of_left
from shmacc.ray._head import answer_of_head, living_nodes, shown
from shmacc.ray._link import LINKS, OPEN, Link, OpenBlock, end_group
from shmacc.ray._parts import CopyConfig, Source, check_connected
from shmacc.ray._waits import ANSWER, PATIENCE, Wait, wait_for_all

_REMOVAL = 30.0  # seconds for nodes to remove their copies' names
_SAME_POWER = -0.5  # of FTRL: other powers differ in last bits from processor to processor


class Parameters(LocalParameters):
    """Named arrays and tables that only updates change, with a copy on every node.

    For the chief; workers attach to `shmacc.Parameters` of this name on their own node. They belong
    to the `AccumulatorGroup` that is made of their `member_specs`, and reach all nodes of it::

        params = shmacc.ray.Parameters(table, "table", optimizer=shmacc.optim.Adagrad(0.05))
        group = shmacc.ray.AccumulatorGroup(params.member_specs(sparse=["table"]), "model")
        with group.round(96) as taken:
            params.update(taken)

    Everything is as for `shmacc.Parameters`, except for what is said here. An update that has been
    told to the chief is kept as long as one node lives that has it. Its round is never given up: if
    the chief dies afterwards, or raises, the owner ends the round.
    """

    _mode: int | None = None
    _allowed: Owners = "mine"
    _replaces = False
    _removes = False

    def __init__(
        self,
        contents: Mapping[str, Any],
        shared_name: str,
        *,
        optimizer: Optimizers = None,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
    ) -> None:
        """Create this node's copy, or attach to it. The group makes those of the other nodes.

        If a node has a copy from earlier, the one with the most updates leads, and `contents` are
        what there is to agree with, as on one host.

        Args:
            contents: As for ``shmacc.Parameters``.
            shared_name: As there, but not None: workers attach to it.
            optimizer: As there; of `Ftrl` only with the ``learning_rate_power`` -0.5, since other
                powers differ in last bits from processor to processor.
            mode: As there.
            owners: As there.
            if_exists: As there, on every node. "replace" also removes an earlier group that belongs
                to parameters of this name.
            unlink_on_close: Whether `close` removes the copies of all nodes.

        Raises:
            FailedPreconditionError: Ray is not initialised, or this process has another
                ``SHMACC_NAMESPACE`` than its node.
            Everything else as for ``shmacc.Parameters``.
        """
        check_connected()
        if not shared_name:
            raise InvalidArgumentError("Parameters over hosts need a shared_name")
        given = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
        for each in given:
            if isinstance(each, optim.Ftrl) and each.learning_rate_power != _SAME_POWER:
                raise InvalidArgumentError(
                    f"Over hosts the learning_rate_power of Ftrl must be {_SAME_POWER}, but is "
                    f"{each.learning_rate_power}: processors round other powers differently"
                )
        if if_exists == "replace":  # its actors have what is there
            until = time.monotonic() + PATIENCE
            for config in groups_of(shared_name, until):
                end_group(config, until)
        super().__init__(
            contents,
            shared_name,
            optimizer=optimizer,
            mode=mode,
            owners=owners,
            if_exists=if_exists,
        )
        self._mode, self._allowed = mode, owners
        self._replaces, self._removes = if_exists == "replace", bool(unlink_on_close)

    def member_specs(self, sparse: Any = ()) -> dict[str, TensorSpec]:
        """As for ``shmacc.Parameters``; a group of ``shmacc.ray`` then belongs to these."""
        specs = super().member_specs(sparse)
        _MADE[self._token] = self
        return specs

    def copy_config(self) -> CopyConfig:
        """Return what every node's copy is like."""
        home = ray.get_runtime_context().get_node_id()
        own = self.shared_name, copies.recipe(self), self._mode, self._allowed
        return CopyConfig(*own, home, self._replaces)

    def _round_of(self, taken: Any) -> tuple[Any, changes.OpenRound]:
        mine, name = OPEN.copy().values(), self.shared_name
        own = [block for block in mine if block.link.config.parameters == name]
        return changes.round_of(taken, self, own)

    def _commit(
        self,
        block: OpenBlock,  # type: ignore[override]  # the round is over many hosts
        found: changes.OpenRound,
        asked: Asked,
        rates: Mapping[str, float],
        timeout: float | None,
    ) -> bool:
        if block.updated:
            raise FailedPreconditionError("The block has made its update already")
        wait, link = Wait(timeout), block.link
        update = copies.prepare(
            self, found.means, found.step, asked, rates, timeout, members=found.members
        )
        block.kept = ray.put(update)  # nodes that are late get it until the end of the block
        block.updated = True
        try:
            given = block.ticket, Source(block.kept), update.size
            refused = _change(link, "update", *given, wait=wait)
        except DeadlineExceededError:
            block.updated = False  # it was dropped: the round is as it was
            raise
        if refused is not None:
            block.updated = refused.committed
            raise _refusal(refused)
        return True

    def restore(self, state: Mapping[str, ValueArray], *, timeout: float | None = None) -> None:
        """Replace everything, on every node, by a result of `state` of these or equal parameters.

        A change of its own, between two rounds. The step goes up, also if the state's is lower: so
        gradients that are computed from what was there are stale everywhere. What a schedule needs
        belongs in an array.

        Args:
            state: As for ``shmacc.Parameters``.
            timeout: Seconds to wait for the end of a round, and for the nodes; None: for ever.

        Raises:
            FailedPreconditionError: This process has no group of ``shmacc.ray`` of these
                parameters; or it has a round of it open.
            InvalidArgumentError, ResourceExhaustedError: As there; nothing was changed.
            DeadlineExceededError: The timeout passed; nothing was changed. But if the owner or this
                node does not answer (see the message), others may make the change, now or later.
            OutOfRangeError: The step is 2**63 - 1 and cannot go up.
        """
        wait = Wait(arguments.timeout(timeout))
        copies.check(self, state)
        own = (each for each in list(LINKS) if each.config.parameters == self.shared_name)
        link = next((each for each in own if not each.closed), None)
        if link is None:
            raise FailedPreconditionError(
                f"Make the group of {self.shared_name!r} first, or attach to it: its owner changes "
                "the copies of all nodes"
            )
        if any(block.link is link for block in OPEN.copy().values()):
            raise FailedPreconditionError("Restore outside of a round: this process has one open")
        _restore(link, state, wait, only_first=False)

    def _to_load(self, _: Mapping[str, ValueArray]) -> tuple[Any, ...]:
        raise FailedPreconditionError(
            "Parameters over hosts are restored by restore(state): shmacc.load changes segments of "
            "this host only"
        )

    def unlink(self) -> None:
        """Remove the copies' names on all nodes; also after `close`. The copies stay in use.

        A node that cannot be reached within 30 s keeps its name: a warning (logger ``shmacc``) says
        so.
        """
        name, until = self.shared_name, time.monotonic() + _REMOVAL
        nodes = living_nodes(None, until)

        def ask() -> dict[Any, str]:
            """Start a task on each node: Ray asks its head about a function that is new to it."""
            kind = ray.remote(num_cpus=0)(_unlink)
            on = {n: NodeAffinitySchedulingStrategy(n, soft=False) for n in nodes}
            return {kind.options(scheduling_strategy=on[n]).remote(name): n for n in nodes}

        calls: dict[Any, str] = {}
        with contextlib.suppress(DeadlineExceededError):
            calls = answer_of_head(f"end of {name}", ask, until - _REMOVAL / 2)
        ended = wait_for_all(list(calls), until)
        warn_of_left(name, sorted(nodes - {calls[call] for call in ended}))
        super().unlink()

    def close(self) -> None:
        """Detach. Idempotent. Removes the copies' names if ``unlink_on_close`` was set."""
        if self._removes:
            self._removes = False
            self.unlink()
        super().close()


_MADE: "weakref.WeakValueDictionary[int, Parameters]" = weakref.WeakValueDictionary()
"""The parameters of this process from which groups may be made, by token."""


def parameters_of(members: Mapping[str, TensorSpec]) -> Parameters | None:
    """Return the parameters over hosts that these specs are of."""
    tokens = {spec.parameters[0] for spec in members.values() if spec.parameters is not None}
    found = [made for token in tokens if (made := _MADE.get(token)) is not None]
    return found[0] if found else None


def begin_line(link: Link, params: Parameters, until: float) -> None:
    """Make this node's copy the first of a new line, unless some node has one.

    Raises:
        DeadlineExceededError: Not all nodes have answered the owner.
    """
    while True:
        wait = Wait(until - time.monotonic())
        match link.wait("has_line", wait=wait):
            case True:
                return
            case False:
                _restore(link, copies.state(params)[1], wait, only_first=True)
                return
        if wait.is_over():
            raise DeadlineExceededError(
                f"Not all nodes have answered the owner of {link.config.name!r}, which must know "
                "what copies of the parameters they have"
            )


def _refusal(refused: Refused) -> Exception:
    """Return a node's error, with its name."""
    kind = type(refused.error) if isinstance(refused.error, ShmaccError) else RuntimeError
    return kind(f"Node {shown(refused.host)} cannot make the change: {refused.error}")


def _restore(link: Link, state: Mapping[str, ValueArray], wait: Wait, *, only_first: bool) -> None:
    arrays = {name: np.asarray(values) for name, values in state.items()}
    size = sum(values.nbytes for values in arrays.values())
    kept = ray.put(arrays)  # here until all nodes have it
    given = link.here, Source(kept), size, int(state["step"])
    refused = _change(link, "restore", *given, wait=wait, only_first=only_first)
    if refused is not None:
        raise _refusal(refused)


def _change(link: Link, method: str, *given: Any, wait: Wait, **options: Any) -> Refused | None:
    """Have the owner change all copies; return once all living nodes have the change.

    Returns:
        Why a node cannot make it.

    Raises:
        DeadlineExceededError: The timeout passed; nothing was changed.
        FailedPreconditionError: The round has ended, or the owner has died: the change may be made.
    """
    call = uuid.uuid4().hex
    while True:
        try:
            answer = link.wait(method, call, *given, wait=wait, **options)
        except DeadlineExceededError:
            link.tell("do", "withdraw", call)  # an owner that was stopped will read both
            raise
        if isinstance(answer, Staging) and wait.is_over():
            answer = _withdrawn(link, call, answer.late)
            wait = Wait(PATIENCE)  # it is made now, and only nodes that have it are late
        match answer:
            case Staging():
                pass
            case Told():
                return None
            case Refused():
                return answer
            case AtLastStep():
                raise link.error(answer)
            case _:
                raise FailedPreconditionError(
                    "The round has ended before its update, since this process was silent for too "
                    "long or the step was set, or the owner was started again: look at `step` to "
                    "see whether the change was made"
                )


def _withdrawn(link: Link, call: str, late: tuple[str, ...]) -> Any:
    """Withdraw a change at the end of the timeout; return the answer to its call if it is made.

    If the chief's own node is none that makes it now, the answer is a refusal.
    """
    answer = link.call("do", "withdraw", call, until=time.monotonic() + ANSWER)
    if not isinstance(answer, Staging | Told):
        raise DeadlineExceededError(
            "The parameters were not changed within the timeout: not all nodes have got the "
            f"change{': ' if late else ''}{shown(*late)}"
        )
    if isinstance(answer, Staging) and not answer.late:
        error = DeadlineExceededError(
            "its actor was stopped, or cut off, until the end of the timeout; other nodes make it"
        )
        return Refused(link.here, error, committed=True)
    return answer


def _unlink(name: str) -> None:
    try:
        with LocalParameters.attach(name, owners="any") as params:
            params.unlink()
    except NotFoundError:
        pass
