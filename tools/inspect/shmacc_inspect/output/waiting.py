"""The answer of `wait`."""

from __future__ import annotations

from dataclasses import dataclass

from shmacc_inspect.output import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer of `wait`."""

    reached: bool
    waited_seconds: float
    schema_version: int = SCHEMA_VERSION
