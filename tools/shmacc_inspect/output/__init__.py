"""What `--json` says: the schema, apart from the library's own records.

One module for what one verb says, so that a verb loads its own only. Fields are only ever added
within a schema version; what goes or changes its meaning raises it. docs/inspect.md describes every
field (a test sees to that). Times are seconds since the epoch, sizes are bytes, what is not known
is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Final

SCHEMA_VERSION: Final = 1


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def to_json(answer: Any, *, in_one_line: bool = False) -> str:
    """One of these types as JSON, with the schema's version in front."""
    fields = dataclasses.asdict(answer)
    ordered = {"schema_version": fields.pop("schema_version"), **fields}
    return json.dumps(ordered, indent=None if in_one_line else 2, allow_nan=False)
