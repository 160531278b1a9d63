"""How a chief makes a group, or finds the cluster's group of that name."""

import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from shmacc._accumulators.group import AccumulatorGroup
from shmacc._base import names
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
)
from shmacc.ray._finding import find_config, groups_of, warn_of_left
from shmacc.ray._head import living_nodes, shown
from shmacc.ray._link import Link, end_group
from shmacc.ray._parameters import Parameters, begin_line, parameters_of
from shmacc.ray._parts import Config, check_connected, counters_of
from shmacc.ray._waits import ANSWER

_logger = logging.getLogger("shmacc")

_START = 120.0  # seconds for a group to be made: for all nodes to have their segments
_LOOK = 0.05  # seconds between two looks for a change
_OWN = 20.0  # seconds until the copy of the chief's node is one of the line


def make(
    shared_name: str,
    members: Mapping[str, TensorSpec],
    reduction_type: str | None,
    options: Options,
    hosts: Iterable[str] | None,
    shards: int | None,
    timing: Timing | None,
) -> Link:
    """Make a group, or find the one of its name; return when each living node has its segment.

    With parameters each node has its copy then, too.
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
    link = _joined(config, params, until)
    try:
        if params is not None:
            begin_line(link, params, until)
        _wait_for_hosts(link, wanted, until, is_new=link.config.number == config.number)
        if params is not None:
            _wait_for_own_copy(link, params, time.monotonic() + _OWN)
    except BaseException:
        if link.config.number == number:  # this call has made the group
            warn_of_left(shared_name, link.end())
        raise
    return link


def _joined(config: Config, params: Parameters | None, until: float) -> Link:
    """Return the link to a new group, or to the one of its name."""
    if_exists = config.options["if_exists"]
    existing = find_config(config.name, until)
    if existing is not None and if_exists == "error":
        raise _exists(config.name)
    if existing is not None and if_exists == "replace":
        end_group(existing, until)
        existing = None
    if params is not None:
        _check_alone(params, config.name, until)
    link = Link(config.name)
    link.join(existing or config, None if existing else 0, until)
    if if_exists == "error" and link.config.number != config.number:
        raise _exists(config.name)  # another chief has made it since: Ray gave its owner the name
    _check_differences(link.config, config)
    return link


def _chosen_nodes(hosts: object, until: float) -> frozenset[str] | None:
    """Return the ids of the nodes that are to take part; None: all."""
    if hosts is None:
        return None
    ids = frozenset(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    if not all(isinstance(one, str) for one in ids) or not living_nodes(ids, until):
        raise InvalidArgumentError(
            "Argument hosts must be ids of Ray's nodes, of which at least one is alive, but was "
            f"{hosts!r}"
        )
    return frozenset(ids)


def _check_alone(params: Parameters, name: str, until: float) -> None:
    """Refuse parameters of another group than this one: two owners would change them."""
    for other in groups_of(params.shared_name, until):
        if other.name != name:
            raise FailedPreconditionError(
                f"The parameters {params.shared_name!r} belong to the group {other.name!r} "
                "already: remove that first (unlink)"
            )


def _exists(name: str) -> AlreadyExistsError:
    error = AlreadyExistsError(f"The cluster has a group {name!r} already")
    return error.with_fields(shared_name=name)


def _check_differences(existing: Config, asked: Config) -> None:
    """Refuse a group whose members, or lanes or capacity if given, are not those asked for."""
    pairs: list[tuple[str, object, object]] = [
        (f"member {name!r}", existing.members.get(name), asked.members.get(name))
        for name in sorted(existing.members.keys() | asked.members.keys())
    ]
    own, wanted = (each.parameters for each in (existing, asked))
    pairs.append(("parameters", own, wanted))
    for option, default in ("lanes", 1), ("capacity", None):
        if (limit := asked.options[option]) is not None:
            pairs.append((option, existing.options[option] or default, limit))
    for what, have, want in pairs:
        if repr(have) != repr(want):
            raise InvalidArgumentError(
                f"The cluster's group {existing.name!r} exists with {what} {have}, but {want} was "
                "asked for"
            ).with_fields(what=what, existing=str(have), asked=str(want))


def _wait_for_hosts(link: Link, nodes: set[str], until: float, *, is_new: bool) -> None:
    """Wait for the segments of nodes, but not of nodes that meanwhile turn out to be dead.

    An earlier group also goes on without other nodes that have a problem. Ray needs 12 to 17 s to
    see that a node is dead.
    """
    name = link.name
    while True:
        hosts = link.state(until + ANSWER)[2]
        # Without parameters a node enrols when it has its segment; with them it gets a copy first.
        known = link.config.copy is None
        ready = {n for n, host in hosts.items() if host.alive and (known or host.step is not None)}
        missing = sorted(nodes - ready)
        if not missing:
            return
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


def _wait_for_own_copy(link: Link, params: Parameters, until: float) -> None:
    """Wait until this chief's copy is in the line: it is the one that its node's actor changes.

    Raises:
        FailedPreconditionError: The actor changes an earlier copy, whose name was removed.
    """
    while not copies.look(params).lineage.term:
        if time.monotonic() > until:
            raise FailedPreconditionError(
                f"The group {link.name!r} does not change these parameters {params.shared_name!r}, "
                "but earlier ones, whose name was removed: remove the group, too (unlink)"
            )
        time.sleep(_LOOK)
