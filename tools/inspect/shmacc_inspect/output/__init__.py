"""The schema of `--json`, separate from the library's own records.

One module for each verb's answer, so that a verb loads only its own. Within a schema version fields
are only added; a field that is removed or changes its meaning raises it. The schema in docs/inspect
has each field's description from here (a test checks that none lacks one). Times are seconds since
the epoch, sizes are bytes, an unknown value is null.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, TypeVar

SCHEMA_VERSION: Final = 2

Answer = TypeVar("Answer")


def answer_of(record: Any, answer: type[Answer], **others: Any) -> Answer:
    """Return an answer that has the record's fields of the same names, and these others."""
    fields: Any = dataclasses.fields(answer)  # type: ignore[arg-type]  # a dataclass, as all are
    for field in fields:
        if field.name not in others and field.name != "schema_version":
            value = getattr(record, field.name)
            others[field.name] = list(value) if isinstance(value, tuple) else value
    return answer(**others)


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def to_json(answer: Any, *, in_one_line: bool = False) -> str:
    """Return one of these types as JSON, with the schema's version first."""
    import json  # late: a page does not need it

    fields = dataclasses.asdict(answer)
    ordered = {"schema_version": fields.pop("schema_version"), **fields}
    return json.dumps(ordered, indent=None if in_one_line else 2, allow_nan=False)
