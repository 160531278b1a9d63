#!/usr/bin/env python3
"""Runs spin over the models of the protocol and reports the results.

``check.py`` makes every search of ``searches.md`` and writes the results into that table.
``--only commit`` searches one model, ``--only commit/two`` one case. ``--quick`` makes only the
short searches that the tests make, and writes nothing. ``--show lock/BROKEN_PERMIT_ALONE`` prints
the run that leads to the error. The exit status is 1 if spin finds an error in a sound model, or
finds no error in a variant that is broken on purpose.

This needs only spin and a C compiler (Debian: ``apt-get install spin gcc``).
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEARCHES = HERE / "searches.md"
MEGABYTES = 2800  # memory for one search; two run at a time
STEPS = 1_000_000  # the most steps of a run that a search follows
COMPILER = os.environ.get("CC", "cc")


@dataclass(frozen=True, slots=True)
class Case:
    """One search: a row of ``searches.md``."""

    model: str  # the file, without its suffix
    name: str  # unique within the model; a broken variant has the name of its flag
    kind: str  # "quick": the tests run it, too; "safety": no search for cycles (livelocks)
    flags: str  # names that spin's preprocessor defines
    says: str  # the property that is checked; for a broken variant, what is broken
    found: tuple[str, ...]  # the row's last cells, which this program writes

    @property
    def broken(self) -> bool:
        """Whether the model is broken on purpose, so that spin must find an error."""
        return self.name.startswith("BROKEN_")

    @property
    def quick(self) -> bool:
        """Whether the tests run this search, too."""
        return "quick" in self.kind


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a search."""

    case: Case
    states: int  # how many distinct states were stored
    depth: int  # steps of the longest run
    error: str  # the error that was found; empty: none
    complete: bool  # whether memory and depth sufficed for the whole search
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether spin found an error in a broken model, or completed a sound one without error."""
        return bool(self.error) if self.case.broken else self.complete and not self.error

    @property
    def verdict(self) -> str:
        """The verdict in a word or two, for the table."""
        if self.case.broken:
            return f"found: {self.error}" if self.error else "NOT FOUND"
        if self.error:
            return f"ERROR: {self.error}"
        return "holds" if self.complete else "SEARCH NOT COMPLETE"


def read(case: Case, output: str, seconds: float) -> Finding:
    """Return the finding that a verifier's output contains."""
    error = re.search(r"pan:1: (assertion violated|non-progress cycle|.*)", output)
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"([\d.e+]+) states, stored", output)
    depth = re.search(r"depth reached (\d+)", output)
    if not (errors and states and depth):
        raise RuntimeError(f"{case.model}/{case.name}: the verifier said\n{output}")
    limited = re.search(r"Search not completed|max search depth too small|limit", output)
    return Finding(
        case=case,
        states=int(float(states[1])),
        depth=int(depth[1]),
        error=error[1].strip() if error and int(errors[1]) else "",
        complete=not limited,
        seconds=seconds,
    )


def search(case: Case, directory: Path) -> Finding:
    """Build the verifier of a case in an empty directory and run it."""
    began = time.monotonic()
    run(["spin", *defines(case), "-a", str(HERE / f"{case.model}.pml")], directory)
    # README.md gives reasons for these options ("How spin is run").
    safety = "safety" in case.kind
    options = ["-w", "-DNOREDUCE", "-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}"]
    options.append("-DSAFETY" if safety else "-DNP")
    options.append("-O0" if case.broken or case.quick else "-O2")  # a short search needs no more
    run([COMPILER, *options, "-o", "pan", "pan.c"], directory)
    command = ["./pan", "-E", f"-m{STEPS}", *([] if safety else ["-l"])]
    return read(case, run(command, directory), time.monotonic() - began)


def run(command: Sequence[str], directory: Path) -> str:
    """Return what a command printed; raise RuntimeError if it failed."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def search_all(cases: Iterable[Case], jobs: int) -> list[Finding]:
    """Make several searches at a time; print each result as it comes, return them in order."""

    def one(case: Case) -> Finding:
        with tempfile.TemporaryDirectory(prefix="shmacc-model-") as directory:
            finding = search(case, Path(directory))
        print(
            f"{case.model:8} {case.name:20} {finding.states:>11,} {finding.depth:>6} "
            f"{finding.seconds:6.1f} s  {finding.verdict}",
            flush=True,
        )
        return finding

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, cases))


def code(model: str) -> str:
    """Return a model's code: its text without comments, but with its header's default flags."""
    text = "".join((HERE / f"{file}.pml").read_text() for file in (model, "processes", "fate"))
    text = re.sub(r"^ \* Unless a case says otherwise: (.*)$", r"*/\1/*", text, flags=re.MULTILINE)
    return " ".join(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).split())


def defines(case: Case) -> list[str]:
    """Return preprocessor options for a case's flags, and for its model's other default flags."""
    said = case.flags.split()
    own = {flag.partition("=")[0] for flag in said}
    others = re.findall(r"\b(([A-Z_]+)=\d+)", code(case.model))
    return [f"-D{flag}" for flag in (*said, *(flag for flag, name in others if name not in own))]


def digest(model: str) -> str:
    """Return a hash of a model's code."""
    return hashlib.sha256(code(model).encode()).hexdigest()[:12]


def read_cases() -> list[Case]:
    """Return the rows of ``searches.md``."""
    rows = [line for line in SEARCHES.read_text().splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]
    return [Case(*row[:5], tuple(row[5:])) for row in cells]


def write(findings: Iterable[Finding]) -> None:
    """Write findings into the table; clear the results of other cases whose model has changed."""
    new = {
        finding.case: (f"{finding.states:,}", str(finding.depth), finding.verdict)
        for finding in findings
    }
    head = SEARCHES.read_text().partition("| ---")
    lines = [head[0] + head[1] + head[2].partition("\n")[0]]
    total = 0
    for case in read_cases():
        file = digest(case.model)
        states, depth, verdict = new.get(
            case, case.found[1:] if case.found[0] == file else ("", "", "")
        )
        cells = case.model, case.name, case.kind, case.flags, case.says, file
        lines.append(f"| {' | '.join((*cells, states, depth, verdict))} |")
        total += int(states.replace(",", "") or 0) if not case.broken else 0
    lines.append(f"\nStates of the sound models together: {total:,}.\n")
    SEARCHES.write_text("\n".join(lines))


def show(wanted: str) -> None:
    """Print the run that leads to a case's error: the lines of the model, as they are executed."""
    (case,) = [case for case in read_cases() if f"{case.model}/{case.name}" == wanted]
    with tempfile.TemporaryDirectory(prefix="shmacc-model-") as name:
        directory = Path(name)
        print(search(case, directory).verdict)
        trail = directory / f"{case.model}.pml.trail"
        if not trail.exists():
            return
        model = str(HERE / f"{case.model}.pml")
        replay = run(["spin", *defines(case), "-t", "-p", "-k", str(trail), model], directory)
    last = ""
    for step in re.finditer(r"proc +(\d+) \((\S+):1\) \S*/(\w+\.pml):(\d+)", replay):
        number, kind, file, line = step.groups()
        source = (HERE / file).read_text().splitlines()[int(line) - 1].strip()
        shown = f"{kind:>11} {number}  {file}:{line}: {source}"
        if shown != last and kind != ":init:":
            print(shown)
        last = shown


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="only the slice that the tests run")
    parser.add_argument("--only", metavar="MODEL[/CASE]", help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time (default: 2)")
    parser.add_argument("--show", metavar="MODEL/CASE", help="print the run that leads to an error")
    arguments = parser.parse_args()
    for needed in ("spin", COMPILER):
        if shutil.which(needed) is None:
            print(f"{needed} is not installed (Debian: apt-get install spin gcc)", file=sys.stderr)
            return 2
    if arguments.show:
        show(arguments.show)
        return 0
    cases = [
        case
        for case in read_cases()
        if (case.quick or not arguments.quick)
        and arguments.only in {None, case.model, f"{case.model}/{case.name}"}
    ]
    began = time.monotonic()
    findings = search_all(cases, arguments.jobs)
    if not arguments.quick:
        write(findings)
    unexpected = [finding for finding in findings if not finding.as_expected]
    states = sum(finding.states for finding in findings)
    print(
        f"{len(findings)} searches, {states:,} states, {time.monotonic() - began:.0f} s: "
        + (f"{len(unexpected)} NOT as expected" if unexpected else "all as expected")
    )
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
