"""The answer of `wait`."""

from __future__ import annotations

from dataclasses import dataclass

from shmacc_inspect.output import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer of `wait`.

    Attributes:
        reached: False: it timed out.
        waited_seconds: How long it has waited.
    """

    reached: bool
    waited_seconds: float
    schema_version: int = SCHEMA_VERSION
