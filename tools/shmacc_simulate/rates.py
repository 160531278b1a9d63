"""How fast this machine does a round's work on rows, apart from the network: with the real code."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import shmacc
from shmacc._group import AccumulatorGroup
from shmacc._multihost.messages import Batch, BatchKey, Fence, Member, Opened
from shmacc._multihost.pieces import Plan, reduce
from shmacc._multihost.segment import LocalSegment, describe

if TYPE_CHECKING:
    from collections.abc import Callable

_TABLE, _ROWS, _WIDTH, _GRADIENTS, _SHARDS, _REPEATS = 1_000_000, 50_000, 64, 4, 2, 7


def measure() -> dict[str, dict[str, float]]:
    """Return bytes a second of each operation, for sparse and dense members: medians."""
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
    found: dict[str, list[float]] = {"seal": [], "split": [], "reduce": [], "join": []}
    with AccumulatorGroup(members) as group, AccumulatorGroup(plan.at_shard(0)) as shard:
        segment = LocalSegment(group)
        for _ in range(_REPEATS):
            for gradient in gradients:
                group.apply({"table": gradient}, group.global_step)
            size = 0.0

            def timed(name: str, do: Callable[[], Any], part: float = 1.0) -> Any:
                began = time.perf_counter()
                result = do()
                found[name].append((time.perf_counter() - began) / part)
                return result

            partial = timed("seal", segment.seal)
            pieces = timed("split", lambda partial=partial: plan.split(partial))
            size = sum(_size(sums) for piece in pieces.values() for sums in piece.values())
            batch = Batch(1, describe(partial), frozenset(pieces))
            # Two hosts with the same rows: half of what comes in goes out.
            members_ = tuple(Member(BatchKey(host, 1, 1), batch) for host in ("a", "b"))
            opened = Opened(Fence(1, 0), partial.step, members_)
            one = timed(
                "reduce",
                lambda pieces=pieces, opened=opened: reduce(shard, [pieces[0]] * 2, opened),
                part=2 * _size(pieces[0]["table"]) / size,
            )
            timed(
                "join",
                lambda one=one, opened=opened: plan.join([one] * _SHARDS, opened),
            )
            segment.consume()
    return {name: size / statistics.median(times) for name, times in found.items()}


def _size(sums: Any) -> int:
    arrays = (
        (sums.indices, sums.values, sums.row_counts) if hasattr(sums, "indices") else (sums.value,)
    )
    return sum(array.nbytes for array in arrays)
