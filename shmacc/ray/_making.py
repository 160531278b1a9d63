"""How a chief makes a group, or finds the cluster's group of that name."""

import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._base import names
from shmacc._base.lineage import NO_COPY, Copy
from shmacc._multihost.messages import Timing
from shmacc._multihost.pieces import Plan
from shmacc._parameters import copies
from shmacc._segment.options import Options
from shmacc._values import arguments
from shmacc._values.specs import TensorSpec
from shmacc.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ShmaccError,
)
from shmacc.ray._finding import find_config, groups_of, warn_of_left
from shmacc.ray._head import living_nodes, shown
from shmacc.ray._link import END, Link, replace
from shmacc.ray._parameters import Parameters, parameters_of, replace_copies
from shmacc.ray._parts import Config, check_connected, counters_of
from shmacc.ray._waits import ANSWER, Wait, result_of

_logger = logging.getLogger("shmacc")

_START = 120.0  # seconds for a group to be made: for all nodes to have their segments
_LOOK = 0.05  # seconds between two checks whether the hosts are ready
_OWN = 20.0  # seconds until the copy of the chief's node has the group's last change


def make(
    shared_name: str,
    members: Mapping[str, TensorSpec],
    reduction_type: str | None,
    options: Options,
    hosts: Iterable[str] | None,
    shards: int | None,
    timing: Timing | None,
) -> Link:
    """Make a group, or find the cluster's group of this name; return its link.

    By then all living nodes of a new group have their segments and, with parameters, copies.
    """
    until = time.monotonic() + _START
    check_connected(until)
    names.segment_name(shared_name)
    names.segment_name(counters_of(shared_name))  # the group's longest name on a node
    with AccumulatorGroup(members, reduction_type=reduction_type) as group:
        specs, reduction = group.members, group.reduction_type
    nodes = _chosen_nodes(hosts, until)
    wanted = living_nodes(nodes, until)
    found = arguments.limit(shards, "shards", 1 << 16) or max(1, len(wanted))
    Plan(specs, found)  # refuses shapes that are not declared
    given = Timing() if timing is None else timing
    if not isinstance(given, Timing):
        raise InvalidArgumentError(f"Argument timing must be a Timing, but was {given!r}")
    params = parameters_of(members)
    copy = None if params is None else params.copy_config()
    if copy is not None and nodes is not None and copy.home not in nodes:
        raise InvalidArgumentError(
            "The chief's own node must be one of the hosts: the chief reads its copy of the "
            f"parameters there; it is {copy.home}"
        )
    kept = asdict(options)
    del kept["unlink_on_close"], kept["inherits"]  # the chief removes the names on all nodes
    number = uuid.uuid4().int >> 65
    config = Config(shared_name, specs, reduction, kept, found, nodes, given, number, copy)
    link = _joined(config, until)
    is_new = link.config.number == number
    try:
        theirs, best = _wait_for_hosts(link, wanted, until, is_new=is_new, begun=False), ""
        if copy is not None and theirs:
            best = _best_copy(link, theirs, refuses_others=copy.if_exists == "error")
        if is_new:
            _check_alone(config, until)  # again: another chief may have made a group meanwhile
        link.call("begin")
        if params is not None:
            _begin_line(link, params, best, until)
        _wait_for_hosts(link, wanted, until, is_new=is_new, begun=True)
        if params is not None:
            _wait_for_own_copy(link, params, time.monotonic() + _OWN)
    except BaseException:
        if is_new:
            warn_of_left(shared_name, link.end(undo=True))
        raise
    return link


def _joined(config: Config, until: float) -> Link:
    """Make a group, or find the one of its name; return a link that is connected to its owner."""
    name, if_exists = config.name, config.options["if_exists"]
    taken = AlreadyExistsError(f"The cluster has a group {name!r} already")
    existing = find_config(name, until)
    if existing is not None and if_exists == "error":
        raise taken.with_fields(shared_name=name)
    _check_alone(config, until)
    if if_exists == "replace":
        replace([name], [] if existing is None else [existing], until)
        existing = None
    link = Link(name)
    try:
        link.join(existing or config, None if existing else 0, until)
    except BaseException:  # as at a Ctrl-C: the owner is there, or will be soon
        if existing is None:
            with contextlib.suppress(ShmaccError):
                link.join(config, 0, time.monotonic() + END)
                if link.config.number == config.number:
                    warn_of_left(name, link.end(undo=True))
        raise
    if if_exists == "error" and link.config.number != config.number:
        raise taken.with_fields(shared_name=name)  # another chief has made it since the look
    _check_differences(link.config, config)
    return link


def _check_alone(config: Config, until: float) -> None:
    """Refuse parameters that belong to another group: two owners would change them."""
    for other in groups_of(config.parameters, until) if config.parameters else ():
        if other.name != config.name:
            raise FailedPreconditionError(
                f"The parameters {config.parameters!r} belong to the group {other.name!r} "
                "already: remove that first (unlink)"
            )


def _chosen_nodes(hosts: object, until: float) -> frozenset[str] | None:
    """Return the ids of the nodes that may take part; None: all nodes."""
    if hosts is None:
        return None
    ids = frozenset(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    if not all(isinstance(one, str) for one in ids) or not living_nodes(ids, until):
        raise InvalidArgumentError(
            "Argument hosts must be ids of Ray's nodes, of which at least one is alive, but was "
            f"{hosts!r}"
        )
    return frozenset(ids)


def _check_differences(existing: Config, asked: Config) -> None:
    """Refuse a group whose members, parameters, or given lanes and capacity differ from `asked`."""
    pairs: list[tuple[str, object, object]] = [
        (f"member {name!r}", existing.members.get(name), asked.members.get(name))
        for name in sorted(existing.members.keys() | asked.members.keys())
    ]
    pairs.append(("parameters", existing.parameters, asked.parameters))
    for option, default in ("lanes", 1), ("capacity", None):
        if (limit := asked.options[option]) is not None:
            pairs.append((option, existing.options[option] or default, limit))
    for what, have, want in pairs:
        if repr(have) != repr(want):
            raise InvalidArgumentError(
                f"The cluster's group {existing.name!r} exists with {what} {have}, but {want} was "
                "asked for"
            ).with_fields(what=what, existing=str(have), asked=str(want))


def _wait_for_hosts(
    link: Link, nodes: set[str], until: float, *, is_new: bool, begun: bool
) -> dict[str, Copy | None]:
    """Wait for the segments of these nodes, but not of nodes that turn out to be dead.

    Before the group has `begun`, nodes change nothing: wait until they can have a segment, and
    return their copies of the parameters; return {} if another chief has begun the group.

    If the group existed before, do not wait for nodes that report a problem, except for this
    chief's node. Ray needs 12 to 17 s to see that a node is dead.
    """
    name = link.name
    while True:
        hosts = link.state(until + ANSWER)[2]
        # With parameters a node has its copy before it has a step.
        ready: dict[str, Copy | None] | None = {
            node: None for node, host in hosts.items() if host.alive and host.step is not None
        }
        if not begun:
            ready = link.call("checked", until=until + ANSWER)
        if ready is None or nodes <= ready.keys():
            return ready or {}
        missing = sorted(nodes - ready.keys())
        for node in missing:
            if node in hosts and (problem := hosts[node].problem) is not None:
                text = f"Node {shown(node)} cannot have its segment of {name!r}: {problem}"
                if is_new or node == link.here:
                    raise FailedPreconditionError(text)
                _logger.warning("%s", text)
                nodes = nodes - {node}
        if time.monotonic() > until:
            raise DeadlineExceededError(
                f"After {_START:g} seconds these nodes have no segment of {name!r}: "
                f"{shown(*missing)}"
            )
        time.sleep(_LOOK)
        nodes = nodes & living_nodes(None)


def _best_copy(link: Link, found: Mapping[str, Copy | None], *, refuses_others: bool) -> str:
    """Return the node whose copy is furthest: a new group goes on with it. Default: this node.

    Of copies with a lineage, only those with the latest lineage count: the owner will learn it.

    Args:
        link: The link to the group.
        found: Each node's copy (None: it has none).
        refuses_others: Whether to refuse a copy of another node.

    Raises:
        AlreadyExistsError: Another node has a copy, and `refuses_others` is set.
    """
    name, here = link.config.parameters, link.here
    trained = {
        node: each for node, each in found.items() if each and (each.step or each.lineage.term)
    }
    latest = max((each.lineage for each in trained.values()), default=None)
    leads = {n: each for n, each in trained.items() if each.lineage in {latest, NO_COPY.lineage}}
    best = max(leads, key=lambda n: (leads[n].step, leads[n].lineage, n == here), default=here)
    others = sorted(trained.keys() - {here})
    if refuses_others and others:
        raise AlreadyExistsError(
            f"Node {shown(others[0])} has a copy of {name!r} already, at step "
            f'{trained[others[0]].step}, and if_exists is "error"'
        ).with_fields(shared_name=name)
    lost = [n for n in trained if NO_COPY.lineage in {trained[n].lineage, leads[best].lineage}]
    if lost := sorted(set(lost) - {best}):
        what = ", ".join(f"{shown(node)} at step {trained[node].step}" for node in lost)
        replaces = f'; it replaces the one of {what}. To begin anew instead: if_exists="replace"'
    if lost or (best != here and here not in trained):
        _logger.warning(
            "%r goes on with the copy of node %s, at step %d%s",
            name,
            shown(best),
            trained[best].step,
            replaces if lost else "",
        )
    return best


def _begin_line(link: Link, params: Parameters, best: str, until: float) -> None:
    """Begin a new line of changes with the copy of the node `best` ("": with this node's copy).

    Do nothing if the owner has learned a line that this copy belongs to (_multihost/copies.py).

    Raises:
        DeadlineExceededError: Not all nodes have answered the owner.
    """
    wait = Wait(until - time.monotonic())
    has_line = link.until_known("has_line", wait=wait)
    copy, state = copies.state(params)
    if best not in {"", link.here} and (actor := link.host(best, until)) is not None:
        copy, state = result_of(actor.state_of_copy.remote(), until)
    if not has_line or (best and not copy.lineage.term):
        replace_copies(link, state, wait, only_first=not has_line)


def _wait_for_own_copy(link: Link, params: Parameters, until: float) -> None:
    """Wait for the group's first change in this chief's copy: then the node's actor uses this copy.

    Raises:
        FailedPreconditionError: The actor changes an earlier copy, whose name was removed.
    """
    while not copies.look(params).lineage.term:
        own = link.state()[2].get(link.here)
        problem = None if own is None else own.problem
        if problem or time.monotonic() > until:
            raise FailedPreconditionError(
                f"The group {link.name!r} does not change these parameters {params.shared_name!r}, "
                "but earlier ones, whose name was removed: remove the group, too (unlink)"
                f"{f'; {problem}' if problem else ''}"
            )
        time.sleep(_LOOK)
