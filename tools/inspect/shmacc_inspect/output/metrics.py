"""The answer of `metrics`."""

from __future__ import annotations

from dataclasses import dataclass

from shmacc_inspect.output import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of a metric."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its samples."""

    name: str
    type: str
    help: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The answer of `metrics`."""

    metrics: list[Metric]
    schema_version: int = SCHEMA_VERSION
