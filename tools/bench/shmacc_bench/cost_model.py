"""Applies a second on machines of more cores, from the parts that were measured on this one.

`p` is an apply's part before the lock, `s` the part under it. N writers, each with a core of its
own, do min(N / (p + s), 1 / s) applies. A dropped gradient is `p` and the least that a lock takes;
that least, Python's part included, is taken from a dropped gradient of one row, so that `s` is
rather too large. Where two processes fill the lock here, their measured rate stands for 1 / s: it
has what the model has not, the rows that go from one core's cache to the other's. With lanes,
each lane is such a lock.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CORES = (16, 64)
LANES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Of one workload; seconds and applies a second."""

    what: str
    before: float
    locked: float
    bytes_moved: int
    measured_by_two: float | None

    @property
    def most(self) -> float:
        """The applies a second that one lock lets through."""
        if self.measured_by_two and 2 / (self.before + self.locked) > 1 / self.locked:
            return self.measured_by_two
        return 1 / self.locked

    def rate(self, writers: int, lanes: int = 1) -> float:
        """Return the applies a second of so many writers."""
        return min(writers / (self.before + self.locked), lanes * self.most)

    def gigabytes(self, rate: float) -> float:
        """Return what memory must move in a second for that rate, in GB."""
        return rate * self.bytes_moved / 1e9


def models(scenarios: Mapping[str, Any]) -> Iterator[Model]:
    """Yield the models that there are parts for."""
    by_two = {
        f"{line['rows']:,} x 64": line["applies_per_second"]
        for line in scenarios.get("lanes", {}).get("shmacc", {}).get("measured", ())
        if line["how"] == "2 processes, 1 lane"
    }
    for line in scenarios.get("parts", {}).get("shmacc", {}).get("measured", ()):
        whole, dropped, least = (line[key] / 1e6 for key in ("whole", "dropped", "least"))
        before = max(0.0, dropped - least)
        yield Model(
            line["what"],
            before,
            max(least, whole - before),  # on a busy machine the dropped one may be the slower one
            line["bytes"],
            by_two.get(line["what"]),
        )
