"""The JSON of a run: what was measured, on what, with what. Everything else is made from it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from shmacc_bench.runner import Measured, ratios

if TYPE_CHECKING:
    from pathlib import Path

    from shmacc_bench.cases import Case

SCHEMA_VERSION = 2
FILE_NAME = "results.json"


def case_record(case: Case, results: dict[str, Measured]) -> dict[str, Any]:
    """Return one case: microseconds of each peer, and shmacc's time over theirs."""
    peers: dict[str, Any] = {}
    for name, measured in results.items():
        if measured.turns:
            peers[name] = dataclasses.asdict(measured.summary()) | {"answer": measured.answer}
        else:
            peers[name] = {"problem": measured.problem}
    return {
        "name": case.name,
        "family": case.family,
        "operation": case.operation.value,
        "workload": case.workload.label,
        "parameters": dataclasses.asdict(case.workload),
        "limits": case.limits,
        "unit": "us",
        "peers": peers,
        "ratios": {name: dataclasses.asdict(r) for name, r in ratios(results).items()},
    }


def save(results: dict[str, Any], directory: Path) -> Path:
    """Write the results; floats to six digits, which is more than any of them is worth."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    text = json.dumps(plain(results), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def load(directory: Path) -> dict[str, Any]:
    """Read the results; ValueError if they are of another version."""
    results: dict[str, Any] = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    if results.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"not results of version {SCHEMA_VERSION}: {directory / FILE_NAME}")
    return results


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: records as objects, numbers rounded."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
