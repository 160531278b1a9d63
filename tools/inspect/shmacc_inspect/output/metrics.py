"""The answer of `metrics`."""

from __future__ import annotations

from dataclasses import dataclass

from shmacc_inspect.output import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of a metric.

    Attributes:
        name: Of the metric, with its suffix.
        labels: By name.
        value: The number.
    """

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its samples.

    Attributes:
        name: Without suffix.
        type: As Prometheus names it.
        help: What it is.
        samples: One for each set of labels.
    """

    name: str
    type: str
    help: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The answer of `metrics`.

    Attributes:
        metrics: All of them.
    """

    metrics: list[Metric]
    schema_version: int = SCHEMA_VERSION
