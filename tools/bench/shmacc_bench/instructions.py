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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shmacc_bench.cases import is_like
from shmacc_bench.instruction_cases import CASES

if TYPE_CHECKING:
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


def instructions(
    output: Annotated[Path, typer.Option(help="The directory of the table.")] = Path(
        "docs/benchmarks"
    ),
    compare: Annotated[
        bool, typer.Option(help="Compare with the table; exit 1 if anything is heavier by > 2 %.")
    ] = False,
    cases: Annotated[str, typer.Option(help="Only cases with this in their name.")] = "",
) -> None:
    """Count instructions under valgrind and write the table, or compare with it."""
    if shutil.which("valgrind") is None:
        raise typer.BadParameter("valgrind is not installed", param_hint="instructions")
    console = Console()
    chosen = [name for name in CASES if is_like(name, cases)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counts = dict(zip(chosen, pool.map(count_case, chosen), strict=True))
    path = output / FILE_NAME
    if not compare:
        kept = _load(path)["counts"] if cases and path.exists() else {}
        _save(path, kept | {name: dataclasses.asdict(count) for name, count in counts.items()})
        console.print(_table(counts, {}))
        return
    before = _load(path)
    if before["made_with"] != made_with():
        console.print(f"the table was made with {before['made_with']}, this is {made_with()}")
    earlier = {name: Count(**count) for name, count in before["counts"].items()}
    console.print(_table(counts, earlier))
    worse = heavier(counts, earlier)
    for name in worse:
        console.print(f"heavier by more than {TOLERANCE:.0%}: {name}", style="bold red")
    raise typer.Exit(1 if worse else 0)


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
        raise typer.BadParameter(f"not a table of version {SCHEMA_VERSION}: {path}")
    return table


def _table(counts: Mapping[str, Count], before: Mapping[str, Count]) -> Table:
    shown = Table(title="Instructions of one call")
    for name in ("", "in all", "in the extension", "before, in all", "before, in the extension"):
        shown.add_column(name, justify="right" if name else "left")
    for name, count in counts.items():
        cells = [f"{count.total:,}", f"{count.extension:,}"]
        if name in before:
            earlier = before[name]
            cells.append(f"{earlier.total:,} ({count.total / earlier.total - 1:+.1%})")
            change = count.extension / max(1, earlier.extension) - 1
            cells.append(f"{earlier.extension:,} ({change:+.1%})")
        shown.add_row(name, *cells)
    return shown
