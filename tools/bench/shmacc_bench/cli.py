"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shmacc_bench import machine, results
from shmacc_bench.cases import all_cases, is_like, quick_cases
from shmacc_bench.fleet import Fleet, known_peers
from shmacc_bench.instructions import instructions
from shmacc_bench.report import print_report, write_markdown
from shmacc_bench.runner import FULL, QUICK, run_cases
from shmacc_bench.scenarios import PLANS
from shmacc_bench.scenarios.running import run_scenarios

if TYPE_CHECKING:
    from collections.abc import Callable

OUTPUT = Path("docs/benchmarks")


def main(arguments: list[str] | None = None) -> int:
    """Measure shmacc beside its peers, and show what was measured."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    def verb(does: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        summary = does.__doc__
        made = verbs.add_parser(does.__name__, help=summary, description=summary)
        made.set_defaults(does=does, fail=made.error)
        made.add_argument(
            "--output", type=Path, default=OUTPUT, help="the results' folder (default: %(default)s)"
        )
        return made

    only = "only what has this in its name, or matches it as a glob; see list"
    add = verb(run).add_argument
    add("--quick", action="store_true", help="the targets' rows only, and fewer repeats")
    add("--cases", default="", help=only)
    add("--peers", type=_peers, default="", help="only these peers, with commas between")
    verb(report)
    add = verb(instructions).add_argument
    add("--compare", action="store_true", help="status 1 if anything is heavier than in the table")
    add("--cases", default="", help=only)
    listing = "List the cases, the scenarios and the peers."
    verbs.add_parser("list", help=listing, description=listing).set_defaults(does=_list)
    asked = parser.parse_args(arguments)
    status: int = asked.does(asked)
    return status


def run(asked: argparse.Namespace) -> int:
    """Measure, print the tables, and write results.json, results.md and the plots."""
    effort = QUICK if asked.quick else FULL
    cases = quick_cases() if asked.quick else all_cases()
    chosen = [case for case in cases if is_like(case.name, asked.cases)]
    plans = {
        name: plan
        for name, plan in PLANS.items()
        if is_like(f"scenario/{name}", asked.cases) and (plan.quick_steps or not asked.quick)
    }
    load_before = machine.load()
    wanted = {name for case in chosen for name in case.peers}
    wanted |= {name for plan in plans.values() for name in plan.peers}
    clock = Clock()
    with Fleet.of([name for name in asked.peers if name in wanted]) as fleet:
        clock.lap("start of the peers")
        records, measured_scenarios = [], {}
        for case, measured in run_cases(fleet, chosen, effort, _tell):
            records.append(results.case_record(case, measured))
            clock.lap(f"cases: {case.family}")
        for name, found in run_scenarios(fleet, plans, quick=asked.quick, tell=_tell):
            measured_scenarios[name] = found
            clock.lap(f"scenario: {name}")
        about = fleet.about
    clock.lap("end of the peers")
    _tell("")
    everything = {
        "schema_version": results.SCHEMA_VERSION,
        "machine": machine.describe() | {"load_before": load_before, "load_after": machine.load()},
        "quick": asked.quick,
        "peers": about,
        "cases": records,
        "scenarios": measured_scenarios,
        "seconds": clock.seconds,
    }
    results.save(everything, asked.output)
    return report(asked)


def report(asked: argparse.Namespace) -> int:
    """Print the tables of an earlier run, and make its results.md and plots again."""
    try:
        everything = results.load(asked.output)
    except FileNotFoundError:
        asked.fail(f"there is no {results.FILE_NAME} in {asked.output} yet: `run` writes it")
    from shmacc_bench.plots import draw  # matplotlib is slow to import, and large

    print_report(everything)
    write_markdown(everything, asked.output)
    draw(everything, asked.output)
    return 0


class Clock:
    """What each part of a run took, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = time.monotonic()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as this part's."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.begun
        self.begun = now


def _list(_: argparse.Namespace) -> int:
    for case in all_cases():
        print(case.name)
    for name in PLANS:
        print(f"scenario/{name}")
    print("peers: " + ",".join(known_peers([])))
    return 0


def _peers(names: str) -> list[str]:
    try:
        return known_peers([name for name in names.split(",") if name])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _tell(what: str) -> None:
    """Show what is being measured, on a terminal in a line that changes."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
