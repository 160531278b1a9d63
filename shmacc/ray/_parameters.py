"""Parameters with a copy on every node, which all get the same updates.

The chief passes its update to the group's owner. The owner lets all nodes first get it, then make
it (`shmacc._multihost.copies`). Only the node's actor changes a copy, even on the chief's node.
"""

import contextlib
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from shmacc import optim
from shmacc._base.array_types import ValueArray
from shmacc._multihost.messages import AtLastStep, Ended, Refused, Staging, Told
from shmacc._parameters import changes, copies
from shmacc._parameters.change_checks import Asked
from shmacc._parameters.new_arrays import Optimizers
from shmacc._parameters.parameters import Parameters as LocalParameters
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._values import arguments
from shmacc._values.specs import OVER_HOSTS, TensorSpec
from shmacc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    ShmaccError,
)
from shmacc.ray._finding import groups_of, warn_of_left
from shmacc.ray._head import living_nodes, shown
from shmacc.ray._link import LINKS, Link, replace
from shmacc.ray._parts import CopyConfig, Source, check_connected, on_nodes
from shmacc.ray._round import OPEN, Round, resume
from shmacc.ray._waits import ANSWER, PATIENCE, Wait

_LOOK = 0.02  # seconds between two checks of this node's copy
_REMOVAL = 30.0  # seconds for nodes to remove their copies' names
_NO_NAME = 1, 1  # no owner names an update like this: the terms of owners are times
_SAME_POWER = -0.5  # of FTRL: with other powers, processors differ in the last bits


class Parameters(LocalParameters):
    """Named arrays and tables that only updates change, with a copy on every node.

    Chiefs use this class. Workers attach to `shmacc.Parameters` of this name on their own node.
    The `AccumulatorGroup` that is made from `member_specs` makes the copies on its nodes.

    Everything that is not said here is as for `shmacc.Parameters`. After `update` has returned, the
    update is kept as long as a node lives that has it, and its round is never given up: if the
    chief then dies or raises, the owner ends the round.
    """

    _how: tuple[int | None, Owners, IfExists, int | None] = None, "mine", "attach", None
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
        keep: int | None = None,
        unlink_on_close: bool = False,
    ) -> None:
        """Create this node's copy, or attach to it. The group makes the copies of other nodes.

        If nodes have copies from an earlier run, the group goes on with the furthest copy, and
        `contents` are only compared with this copy, as on one host. A warning (logger ``shmacc``)
        says which copy that is, and which copies it replaces.

        Args:
            contents: As for ``shmacc.Parameters``.
            shared_name: As for ``shmacc.Parameters``, but not None: workers attach to it.
            optimizer: As for ``shmacc.Parameters``, but `Ftrl` only with the
                ``learning_rate_power`` -0.5: processors differ in the last bits of other powers.
            mode: As for ``shmacc.Parameters``.
            owners: As for ``shmacc.Parameters``.
            if_exists: As for ``shmacc.Parameters``, on every node. With "error", the group's
                constructor raises if another node has a copy. "replace" also removes an earlier
                group of parameters with this name. It removes nothing while a living process has a
                part of that group attached, or a chief waits for a round.
            keep: The most bytes of updates that each node keeps in Ray's object store for nodes
                that have missed them. A node that has missed more gets a whole copy, while rounds
                wait. None: a quarter of the copy's bytes, which is also the maximum.
            unlink_on_close: Whether `close` removes the copies of all nodes.

        Raises:
            FailedPreconditionError: Ray is not initialised, or this process has another
                ``SHMACC_NAMESPACE`` than its node.
            Everything else as for ``shmacc.Parameters``.
        """
        check_connected()
        if not shared_name:
            raise InvalidArgumentError("Parameters over hosts need a shared_name")
        kept = arguments.limit(keep, "keep", 1 << 62)
        for each in optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]:
            if isinstance(each, optim.Ftrl) and each.learning_rate_power != _SAME_POWER:
                raise InvalidArgumentError(
                    f"Over hosts the learning_rate_power of Ftrl must be {_SAME_POWER}, but is "
                    f"{each.learning_rate_power}: processors round other powers differently"
                )
        given: Any = {"mode": mode, "owners": owners, "if_exists": if_exists}
        super().__init__(contents, shared_name, optimizer=optimizer, **given)
        self._how, self._removes = (mode, owners, if_exists, kept), bool(unlink_on_close)

    def _open(
        self, members: Any, shared_name: Any, options: Options, *args: Any, **of: Any
    ) -> None:
        """Open as on one host, after the checks; "replace" first removes group and copies."""
        if options.if_exists == "replace":
            until = time.monotonic() + PATIENCE
            nodes = replace([shared_name], groups_of(shared_name, until), until)
            _unlink_on(shared_name, nodes, until)
        try:
            super()._open(members, shared_name, options, *args, **of)
        except InvalidArgumentError as error:
            if getattr(error, "what", None) is None:
                raise
            differs = str(error).partition(". If the existing one")[0]  # a node's actor may have it
            raise InvalidArgumentError(
                f'{differs}. if_exists="replace" begins anew on all nodes, and ends a group of '
                "theirs; or use another shared_name"
            ).with_fields(**error.__dict__) from None

    def member_specs(self, sparse: Any = ()) -> dict[str, TensorSpec]:
        """Return the specs as ``shmacc.Parameters`` does, for a group of ``shmacc.ray``."""
        specs = super().member_specs(sparse)
        _MADE[self._token] = self
        OVER_HOSTS.add(self._token)
        return specs

    def copy_config(self) -> CopyConfig:
        """Return all that a node's actor needs to make a copy like this one."""
        home = ray.get_runtime_context().get_node_id()
        return CopyConfig(self.shared_name, copies.recipe(self), home, *self._how)

    def _round_of(self, taken: Any) -> tuple[Any, changes.OpenRound]:
        mine, name = OPEN.copy().values(), self.shared_name
        own = [block for block in mine if block.link.config.parameters == name]
        return changes.round_of(taken, self, own)

    def _commit(
        self,
        block: Round,  # type: ignore[override]  # the round is over many hosts
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
        checked = copies.look(self, timeout).lineage
        try:  # check the update here, so that the owner need not wait for this node's actor
            copies.make(self, update, _NO_NAME, checked, timeout, only_check=True)
        except FailedPreconditionError:
            pass  # the copy has changed meanwhile: the owner accepts or refuses the update
        except (InvalidArgumentError, ResourceExhaustedError) as error:
            raise _refusal(Refused(link.here, error)) from None
        block.kept = ray.put(update)  # keep the reference: late nodes get it until the block ends
        block.updated = True
        try:
            given = block.ticket, Source(block.kept), update.size
            refused = _change(link, "update", *given, wait=wait, block=block, checked=checked)
        except DeadlineExceededError:
            block.updated = False  # the update was dropped: the round is unchanged
            raise
        if refused is not None:
            block.updated = refused.committed
            raise _refusal(refused)
        # If an owner has died meanwhile, this node may still have to get another node's copy.
        while self.step <= block.taken.step:
            if wait.is_over():
                raise FailedPreconditionError(
                    "The update was made, but this node's copy does not have it yet: the owner died"
                )
            time.sleep(_LOOK)
        return True

    def restore(self, state: Mapping[str, ValueArray], *, timeout: float | None = None) -> None:
        """Replace everything, on every node, by what `state` of these or equal parameters returned.

        This is a change between two rounds. The step goes up even if the saved state has a lower
        step: so gradients computed from the replaced parameters are stale everywhere. So a schedule
        should count in an array, and not rely on the step.

        Args:
            state: As for ``shmacc.Parameters``.
            timeout: Seconds to wait for the end of a round, and for the nodes; None: for ever.

        Raises:
            FailedPreconditionError: This process has no group of ``shmacc.ray`` for these
                parameters; or it has a round of the group open.
            InvalidArgumentError, ResourceExhaustedError: As on one host; nothing was changed.
            DeadlineExceededError: The timeout passed; nothing was changed. But if the owner or this
                node does not answer (see the message), other nodes may make the change later.
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
        replace_copies(link, state, wait, only_first=False)

    def _to_load(self, _: Mapping[str, ValueArray]) -> tuple[Any, ...]:
        raise FailedPreconditionError(
            "Parameters over hosts are restored by restore(state): shmacc.load changes segments of "
            "this host only"
        )

    def unlink(self) -> None:
        """Remove the copies' names on all nodes, even after `close`. Attached copies stay usable.

        A node that cannot be reached within 30 s keeps its name; logger ``shmacc`` warns of this.
        """
        until = time.monotonic() + _REMOVAL
        _unlink_on(self.shared_name, living_nodes(None, until), until)
        super().unlink()

    def close(self) -> None:
        """Detach. Idempotent. Removes the copies' names if ``unlink_on_close`` was set."""
        if self._removes:
            self._removes = False
            self.unlink()
        super().close()


_MADE: "weakref.WeakValueDictionary[int, Parameters]" = weakref.WeakValueDictionary()
"""This process's parameters over hosts, by the token in the specs that they gave to groups."""


def parameters_of(members: Mapping[str, TensorSpec]) -> Parameters | None:
    """Return the parameters over hosts that made these member specs; None: there are none."""
    tokens = {spec.parameters[0] for spec in members.values() if spec.parameters is not None}
    found = next((made for token in tokens if (made := _MADE.get(token)) is not None), None)
    if tokens and found is None:
        raise InvalidArgumentError(
            "These members are gradients of shmacc.Parameters, which one host has: over hosts make "
            "shmacc.ray.Parameters of the same arguments, which are open"
        )
    return found


def _refusal(refused: Refused) -> Exception:
    """Return the error of a node that refused a change, with the node's name in the message."""
    kind = type(refused.error) if isinstance(refused.error, ShmaccError) else RuntimeError
    return kind(f"Node {shown(refused.host)} cannot make the change: {refused.error}")


def replace_copies(
    link: Link, state: Mapping[str, ValueArray], wait: Wait, *, only_first: bool
) -> None:
    """Replace the copies of all nodes by a state; with `only_first`, only if no node has one."""
    arrays = {name: np.asarray(values) for name, values in state.items()}
    size = sum(values.nbytes for values in arrays.values())
    kept = ray.put(arrays)  # keep the reference until all nodes have the state
    given = link.here, Source(kept), size, int(state["step"])
    refused = _change(link, "restore", *given, wait=wait, only_first=only_first)
    if refused is not None:
        raise _refusal(refused)


def _change(
    link: Link, method: str, *given: Any, wait: Wait, block: Round | None = None, **options: Any
) -> Refused | None:
    """Have the owner change all copies; return once all living nodes have made the change.

    If the owner dies, its successor goes on with `block`, if there is one.

    Returns:
        None; or if a node cannot make the change, its refusal.

    Raises:
        DeadlineExceededError: The timeout passed; nothing was changed.
        FailedPreconditionError: The round ended, or the owner died; the change may still be made.
    """
    call = uuid.uuid4().hex
    if wait.is_over():
        raise DeadlineExceededError(
            "The timeout was too short: it passed before the change was ready to be sent. Nothing "
            "was changed"
        )
    while True:
        try:
            answer = link.wait(method, call, *given, wait=wait, **options)
        except DeadlineExceededError:
            link.send("withdraw", call)  # an owner that was stopped will get both calls
            raise
        if isinstance(answer, Staging) and wait.is_over():
            answer = _withdrawn(link, call, answer.late)
            wait = Wait(PATIENCE)  # it is committed: nodes that have got it will make it
        if isinstance(answer, Ended) and block is not None:
            answer = resume(block, wait)  # the owner that had the change may have died
        match answer:
            case Told():
                return None
            case Refused():
                return answer
            case AtLastStep():
                raise link.error(answer)
            case Ended():
                raise FailedPreconditionError(
                    "The change was dropped, or its round has ended: this process was silent for "
                    "too long, or the step was set, or the owner died and another chief has the "
                    "gradients. `step` shows whether the change was made"
                )


def _withdrawn(link: Link, call: str, late: tuple[str, ...]) -> Any:
    """Withdraw a change at its timeout; if it is committed already, return the owner's answer.

    If only the chief's own node has not made the change, return a `Refused` for this node.
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


def _unlink_on(name: str, nodes: set[str], until: float) -> None:
    ended: dict[str, None] = {}
    with contextlib.suppress(DeadlineExceededError):
        ended = on_nodes(nodes, _unlink, name, until=until)
    warn_of_left(name, sorted(nodes - ended.keys()))


def _unlink(name: str) -> None:
    with contextlib.suppress(NotFoundError), LocalParameters.attach(name, owners="any") as params:
        params.unlink()
