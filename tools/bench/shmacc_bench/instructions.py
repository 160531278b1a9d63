"""Counts the instructions of a few fixed calls, which a busy machine does not change.

Each case runs twice under valgrind's callgrind, the second time with twice the calls: the
difference is what the calls cost, and the interpreter's start is in neither. Counts are kept in a
table in the repository; `--compare` says whether the code has become heavier since.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmacc_bench.cases import is_like
from shmacc_bench.instruction_cases import CASES
from shmacc_bench.report import print_table
from shmacc_bench.tables import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

FILE_NAME = "instructions.json"
SCHEMA_VERSION = 1
TOLERANCE = 0.02
EXTENSION = re.compile(r"/shmacc/[^/]*\.so$")
TIMEOUT_SECONDS = 600
# What would differ from run to run: how dictionaries collide, how long NumPy's idle threads spin.
STEADY = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """Instructions of one call: all of them, and those inside the extension's own code."""

    total: int
    extension: int


def instructions(asked: argparse.Namespace) -> int:
    """Count instructions under valgrind and write the table, or compare with it."""
    if shutil.which("valgrind") is None:
        asked.fail("valgrind is not installed")
    chosen = [name for name in CASES if is_like(name, asked.cases)]
    path = asked.output / FILE_NAME
    kept = _load(path) if asked.compare or (asked.cases and path.exists()) else {"counts": {}}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counts = dict(zip(chosen, pool.map(count_case, chosen), strict=True))
    if not asked.compare:
        measured = {name: dataclasses.asdict(count) for name, count in counts.items()}
        _save(path, kept["counts"] | measured)
        print_table(_table(counts, {}))
        return 0
    if kept["made_with"] != made_with():
        print(f"the table was made with {kept['made_with']}, this is {made_with()}")
    earlier = {name: Count(**count) for name, count in kept["counts"].items()}
    print_table(_table(counts, earlier))
    worse = heavier(counts, earlier)
    for name in worse:
        print(f"heavier by more than {TOLERANCE:.0%}: {name}")
    return 1 if worse else 0


def heavier(now: Mapping[str, Count], before: Mapping[str, Count]) -> list[str]:
    """Return the cases that cost more than the tolerance above what they did."""
    return [
        name
        for name, count in now.items()
        if name in before
        and (
            count.total > before[name].total * (1 + TOLERANCE)
            or count.extension > before[name].extension * (1 + TOLERANCE)
        )
    ]


def count_case(name: str) -> Count:
    """Return the instructions of one call of a case."""
    calls = CASES[name].calls
    once, twice = (_by_object(name, calls * times) for times in (1, 2))
    each = {ob: (twice[ob] - once[ob]) / calls for ob in once | twice}
    extension = sum(cost for ob, cost in each.items() if EXTENSION.search(ob))
    return Count(round(sum(each.values())), round(extension))


def made_with() -> dict[str, str]:
    """Return what else the counts depend on."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "libc": "-".join(platform.libc_ver()),
    }


def _by_object(name: str, calls: int) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="shmacc-bench-") as directory:
        out = Path(directory) / "callgrind.out"
        command = [
            "valgrind",
            "--quiet",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            sys.executable,
            "-P",
            "-m",
            "shmacc_bench.instruction_child",
            name,
            str(calls),
        ]
        environment = os.environ | STEADY | {"PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run(
            command, env=environment, check=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
        with out.open(encoding="utf-8", errors="replace") as lines:
            return cost_by_object(lines)


def cost_by_object(lines: Iterable[str]) -> Counter[str]:
    """Return the self cost of each object (library) in callgrind's output format.

    Names are compressed: "ob=(3) /lib/x.so" once, then "ob=(3)". The line after "calls=" is the
    cost of the callee, which has lines of its own.
    """
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    current = ""
    skip = False
    for line in lines:
        if found := re.match(r"c?ob=(\(\d+\))(?: (.*))?$", line):
            key, name = found.groups()
            if name:
                names[key] = name
            if line.startswith("ob="):
                current = names[key]
        elif line.startswith("calls="):
            skip = True
        elif line[:1] in "+-*" or line[:1].isdigit():
            if not skip:
                costs[current] += int(line.split()[1])
            skip = False
    return costs


def _save(path: Path, counts: Mapping[str, Any]) -> None:
    table = {"schema_version": SCHEMA_VERSION, "made_with": made_with(), "counts": counts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _load(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"not a table of version {SCHEMA_VERSION}: {path}")
    return table


def _table(counts: Mapping[str, Count], before: Mapping[str, Count]) -> Table:
    rows = []
    for name, count in counts.items():
        cells = ["", ""]
        if name in before:
            earlier = before[name]
            changes = (
                count.total / earlier.total - 1,
                count.extension / max(1, earlier.extension) - 1,
            )
            cells = [
                f"{earlier.total:,} ({changes[0]:+.1%})",
                f"{earlier.extension:,} ({changes[1]:+.1%})",
            ]
        rows.append((name, f"{count.total:,}", f"{count.extension:,}", *cells))
    head = ("", "in all", "in the extension", "before, in all", "before, in the extension")
    return Table("Instructions of one call", "", head, rows)
