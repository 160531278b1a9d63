"""What is to be reached, as numbers, and whether it was."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shmacc_bench.cases import IDS, SORTED_IDS
from shmacc_bench.operations import Operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TORCH = ("torch", "torch-1")  # whichever is faster

APPLY_LIMITS: Mapping[tuple[int, int], tuple[float, tuple[str, ...]]] = {
    (10, 64): (1.2, TORCH),
    (1_000, 64): (1.0, TORCH),
    (10_000, 64): (2.2, ("np.add",)),
    (50_000, 64): (2.5, ("np.add",)),
    (50_000, 8): (0.4, TORCH),
    (100_000, 1): (1.3, TORCH),
}
ROUND_LIMITS: Sequence[tuple[float, tuple[str, ...]]] = (
    (1 / 3, ("tf-local",)),
    (1 / 10, ("tf-server",)),
    (1.0, TORCH),
)
IDS_MS = 3.0  # 50,000 unsorted ids with repeats, as real ones are
IDS_OVER_SORTED = 1.6
GROUP_US, GROUP_KIB = 25.0, 400.0  # of 16 tensors
LANES_GAIN: Mapping[int, float] = {1_000: 1.7, 10_000: 1.5}  # of two processes with two lanes
WAKE_UP_US = 100.0
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
    """Return a verdict on each target that these results have the figures for."""
    found = [*_speed(results["cases"]), *_ids(results["cases"])]
    scenarios = results["scenarios"]
    woken = scenarios.get("wakeup", {}).get("shmacc", {}).get("from_return")
    if woken:
        found.append(
            Verdict("wake-up after the last apply's return", "", WAKE_UP_US, woken["median"], "us")
        )
    imported = scenarios.get("startup", {}).get("shmacc", {}).get("import_ms")
    if imported:
        found.append(
            Verdict("import and first use, over NumPy's", "", IMPORT_MS, imported["median"], "ms")
        )
    found += [*_groups(scenarios), *_lanes(scenarios)]
    found += [
        Verdict(f"an apply of {line['what']}", "", line["limit"], line["ratio"]["median"])
        for line in scenarios.get("arrays_in", {}).get("shmacc", {}).get("measured", ())
    ]
    for line in scenarios.get("memory", {}).get("shmacc", {}).get("measured", ()):
        what = f"memory of {line['rows']:,} x {line['width']}"
        allowed, allocated = line["allowed"] / 2**20, line["allocated"] / 2**20
        found.append(Verdict(what, "", allowed, allocated, "MiB"))
    return found


def _speed(cases: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    for case in cases:
        for limit, peers in _targets_of(case):
            against = _fastest(case, peers)
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


def _groups(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    found = scenarios.get("many_tensors", {}).get("shmacc", {})
    if "group" in found:
        what = f"{found['tensors']} tensors, {found['bytes'] / 1024:.0f} KiB, as a group"
        yield Verdict(f"{what}: an apply", "", GROUP_US, found["group"]["median"], "us")
        yield Verdict(f"{what}: shared memory", "", GROUP_KIB, found["group_bytes"] / 1024, "KiB")


def _lanes(scenarios: dict[str, Any]) -> Iterator[Verdict]:
    """Judge the time of an apply: the inverse of the gain."""
    for line in scenarios.get("lanes", {}).get("shmacc", {}).get("measured", ()):
        if (line["lanes"], line["processes"]) == (2, 2):
            what = f"time an apply, 2 processes with 2 lanes, {line['rows']:,} x 64"
            limit, gain = 1 / LANES_GAIN[line["rows"]], line["times_alone"]["median"]
            yield Verdict(what, "1 process with 1 lane", limit, 1 / gain)


def _targets_of(case: dict[str, Any]) -> Sequence[tuple[float, tuple[str, ...]]]:
    if case["family"] != "rows":
        return ()
    if case["operation"] == Operation.ROUND.value:
        return ROUND_LIMITS
    if case["operation"] == Operation.APPLY.value:
        return (APPLY_LIMITS[case["parameters"]["rows"], case["parameters"]["width"]],)
    return ()


def _fastest(case: dict[str, Any], peers: tuple[str, ...]) -> str | None:
    medians = {p: case["peers"][p]["median"] for p in peers if "median" in case["peers"].get(p, {})}
    return min(medians, key=lambda name: medians[name], default=None)


def limit_of(case: dict[str, Any]) -> float | None:
    """Return the microseconds that the strictest of the case's targets allows."""
    allowed = [
        limit * case["peers"][against]["median"]
        for limit, peers in _targets_of(case)
        if (against := _fastest(case, peers)) is not None
    ]
    return min(allowed, default=None)
