"""What is to be reached, as numbers, and whether it was."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shmacc_bench.cases import IDS, SORTED_IDS
from shmacc_bench.operations import Operation
from shmacc_bench.peers import RELEASED
from shmacc_bench.samples import paired_ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

IDS_MS = 3.0  # 50,000 unsorted ids with repeats, as real ones are
IDS_OVER_SORTED = 1.6
GROUP_US, GROUP_KIB = 25.0, 400.0  # of 16 tensors
LANES_GAIN: Mapping[int, float] = {1_000: 1.7, 10_000: 1.5}  # of two processes with two lanes
LISTING = 0.5  # times version 1.0.0
IMPORT_MS = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One target: what was measured, in the unit that the limit has."""

    what: str
    against: str
    limit: float
    measured: float
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the figure is within the limit."""
        return self.measured <= self.limit


def verdicts(results: dict[str, Any]) -> list[Verdict]:
    """Return a verdict on each target that the results have figures for, the missed ones first."""
    scenarios = results["scenarios"]
    found = [
        *_speed(results["cases"]),
        *_ids(results["cases"]),
        *_arrays_in(scenarios),
        *_realistic(scenarios),
        *_wakeup(scenarios),
        *_listing(scenarios),
        *_groups(scenarios),
        *_lanes(scenarios),
        *_import(scenarios),
        *_memory(scenarios),
    ]
    return sorted(found, key=lambda verdict: verdict.met)


def _speed(cases: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    for case in cases:
        for limit, peers in case["limits"]:
            against = fastest(case, peers)
            if against is not None and against in case["ratios"]:
                what = f"{case['operation']}, {case['workload']}"
                yield Verdict(what, against, limit, case["ratios"][against]["median"])


def _ids(cases: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """Judge the apply of ids with repeats by the clock, and by the same ids sorted."""
    medians = {
        case["workload"]: case["peers"]["shmacc"]["median"]
        for case in cases
        if case["operation"] == Operation.APPLY.value
        and "median" in case["peers"].get("shmacc", {})
    }
    if IDS.label not in medians:
        return
    what = f"{Operation.APPLY.value}, {IDS.label}"
    yield Verdict(what, "", IDS_MS, medians[IDS.label] / 1000, "ms")
    if SORTED_IDS.label in medians:
        ratio = medians[IDS.label] / medians[SORTED_IDS.label]
        yield Verdict(what, "the same sorted", IDS_OVER_SORTED, ratio)


def _arrays_in(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    for line in _of(scenarios, "arrays_in").get("measured", ()):
        yield Verdict(
            f"apply of {line['what']}", line["against"], line["limit"], line["ratio"]["median"]
        )


def _realistic(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    for line in _of(scenarios, "realistic").get("measured", ()):
        what = f"realistic round, {line['what']}"
        yield Verdict(what, "torch, by hand", line["limit"], line["ratio"]["median"])


def _wakeup(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    found = _of(scenarios, "wakeup")
    for key, how in (("from_return", ""), ("with_steps", ", with steps()")):
        if key in found:
            what = f"wake-up after the last apply's return{how}"
            pipe, woken = (found[of]["median"] for of in ("pipe", key))
            yield Verdict(what, "a pipe message", pipe, woken, "us")


def _listing(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    mine, theirs = _of(scenarios, "listing"), _of(scenarios, "listing", RELEASED)
    if "steps" in mine and "steps" in theirs:
        ratio = _paired(mine["steps"], theirs["steps"])
        yield Verdict("shmacc-inspect list, 500 segments", RELEASED, LISTING, ratio)


def _groups(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    found = _of(scenarios, "many_tensors")
    if "group" in found:
        what = f"{found['tensors']} tensors, {found['bytes'] / 1024:.0f} KiB, as a group"
        yield Verdict(f"{what}: an apply", "", GROUP_US, found["group"]["median"], "us")
        yield Verdict(f"{what}: shared memory", "", GROUP_KIB, found["group_bytes"] / 1024, "KiB")


def _lanes(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    """Judge the time of an apply: the inverse of the gain."""
    for line in _of(scenarios, "lanes").get("measured", ()):
        if line["how"] == "2 processes, 2 lanes" and line["rows"] in LANES_GAIN:
            what = f"time an apply, {line['how']}, {line['rows']:,} x 64"
            limit, gain = 1 / LANES_GAIN[line["rows"]], line["times_alone"]["median"]
            yield Verdict(what, "1 process, 1 lane", limit, 1 / gain)


def _import(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    imported = _of(scenarios, "startup").get("import_ms")
    if imported:
        yield Verdict("import and first use, over NumPy's", "", IMPORT_MS, imported["median"], "ms")


def _memory(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    for line in _of(scenarios, "memory").get("measured", ()):
        what = f"memory of {line['rows']:,} x {line['width']}"
        allowed, allocated = line["allowed"] / 2**20, line["allocated"] / 2**20
        yield Verdict(what, "", allowed, allocated, "MiB")


def _of(scenarios: dict[str, Any], name: str, peer: str = "shmacc") -> dict[str, Any]:
    found: dict[str, Any] = scenarios.get(name, {}).get(peer, {})
    return found


def _paired(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return paired_ratio([[one] for one in mine], [[one] for one in theirs]).median


def fastest(case: dict[str, Any], peers: Sequence[str]) -> str | None:
    """Return the peer with the smallest median; None if none of them has one."""
    medians = {p: case["peers"][p]["median"] for p in peers if "median" in case["peers"].get(p, {})}
    return min(medians, key=lambda name: medians[name], default=None)


def limit_of(case: dict[str, Any]) -> float | None:
    """Return the microseconds that the strictest of the case's targets allows."""
    allowed = [
        limit * case["peers"][against]["median"]
        for limit, peers in case["limits"]
        if (against := fastest(case, peers)) is not None
    ]
    return min(allowed, default=None)
