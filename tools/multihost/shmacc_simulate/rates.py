"""How fast this machine does a round's work on rows, apart from the network: with the real code."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import shmacc
from shmacc._multihost.columns import keep_freed_memory
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import BatchKey, Fence, Member, Opened, Share
from shmacc._multihost.pieces import Joining, Plan
from shmacc._multihost.segment import LocalSegment

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc import GroupTaken
    from shmacc._multihost.columns import Columns

_TABLE, _ROWS, _WIDTH, _GRADIENTS, _SHARDS, _REPEATS = 1_000_000, 50_000, 64, 4, 2, 7


def measure() -> dict[str, dict[str, float]]:
    """Return bytes a second of each operation, for sparse and dense members: medians."""
    keep_freed_memory()  # as a host's process does
    random = np.random.default_rng(1)
    values = np.ones((_ROWS, _WIDTH), np.float32)
    sparse = [
        (np.sort(random.choice(_TABLE, _ROWS, replace=False)), values) for _ in range(_GRADIENTS)
    ]
    dense = [np.ones((4 * _ROWS, _WIDTH), np.float32)]
    return {
        "sparse": _rates(shmacc.IndexedSlicesSpec((_TABLE, _WIDTH), "float32"), sparse),
        "dense": _rates(shmacc.TensorSpec((4 * _ROWS, _WIDTH), "float32"), dense),
    }


def _rates(spec: Any, gradients: list[Any]) -> dict[str, float]:
    members = {"table": spec}
    plan = Plan(members, _SHARDS)
    watch = _Watch()
    with HostGroup(members) as group, HostGroup(plan.at_shard(0)) as shard:
        segment = LocalSegment(group, plan)
        for _ in range(_REPEATS):
            for gradient in gradients:
                group.apply({"table": gradient}, group.global_step)
            content = watch.time("seal", segment.seal)
            pieces = content.pieces
            watch.bytes("seal", sum(piece.columns.nbytes for piece in pieces.values()))
            # Two hosts with the same rows: of what comes in, half goes out.
            batch = content.batch
            hosts = tuple(Member(BatchKey(host, 1, 1), batch) for host in ("a", "b"))
            opened = Opened(Fence(1, 0), pieces[0].step, hosts)
            share = Share.of(opened, 0)
            reduced = watch.time("reduce", partial(shard.reduce, [pieces[0]] * 2, share))
            watch.bytes("reduce", 2 * pieces[0].columns.nbytes)
            watch.time("join", partial(_join, plan, opened, reduced))
            watch.bytes("join", _SHARDS * reduced.nbytes)
            segment.consume()
    return watch.rates()


def _join(plan: Plan, opened: Opened, reduced: Columns) -> GroupTaken:
    """Put a round together of as many shards that all have the same."""
    joining = Joining(plan, opened, dict.fromkeys(range(_SHARDS), reduced.rows))
    for shard in range(_SHARDS):
        joining.add(shard, reduced.values)
    return joining.taken()


class _Watch:
    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._bytes: dict[str, int] = {}

    def time(self, name: str, do: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = do()
        self._seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def bytes(self, name: str, size: int) -> None:
        self._bytes[name] = size

    def rates(self) -> dict[str, float]:
        return {
            name: self._bytes[name] / statistics.median(seconds)
            for name, seconds in self._seconds.items()
        }
