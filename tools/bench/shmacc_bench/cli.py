"""The command line of the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shmacc_bench import machine, results
from shmacc_bench.cases import all_cases, is_like, quick_cases
from shmacc_bench.fleet import Fleet, known_peers
from shmacc_bench.instructions import instructions
from shmacc_bench.report import print_report, write_markdown
from shmacc_bench.runner import FULL, QUICK, run_cases
from shmacc_bench.scenarios import PLANS
from shmacc_bench.scenarios.running import run_scenarios

FILE_COLUMNS = 170  # a file has no width; this one keeps the widest table's cells on one line
DEFAULT_OUTPUT = Path("docs/benchmarks")

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.command()(instructions)

Output = Annotated[Path, typer.Option(help="The directory of results.json and the plots.")]


@app.command()
def run(
    output: Output = DEFAULT_OUTPUT,
    quick: Annotated[bool, typer.Option(help="The targets' rows only, and fewer repeats.")] = False,
    cases: Annotated[
        str, typer.Option(help="Only what has this in its name, or matches it as a glob; see list.")
    ] = "",
    peers: Annotated[str, typer.Option(help="Only these peers, with commas between.")] = "",
) -> None:
    """Measure, print the tables, and write results.json, results.md and the plots."""
    console = Console(stderr=True)
    effort = QUICK if quick else FULL
    chosen = [c for c in (quick_cases() if quick else all_cases()) if is_like(c.name, cases)]
    plans = {name: plan for name, plan in PLANS.items() if is_like(f"scenario/{name}", cases)}
    try:
        names = known_peers([name for name in peers.split(",") if name])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from error
    load_before = machine.load()
    with console.status("starting the peers") as status, Fleet.of(names) as fleet:

        def tell(what: str) -> None:
            status.update(what)

        records = [
            results.case_record(case, measured)
            for case, measured in run_cases(fleet, chosen, effort, tell)
        ]
        measured_scenarios = run_scenarios(fleet, plans, quick=quick, tell=tell)
        about = fleet.about
    everything = {
        "schema_version": results.SCHEMA_VERSION,
        "machine": machine.describe() | {"load_before": load_before, "load_after": machine.load()},
        "quick": quick,
        "peers": about,
        "cases": records,
        "scenarios": measured_scenarios,
    }
    results.save(everything, output)
    report(output)


@app.command()
def report(output: Output = DEFAULT_OUTPUT) -> None:
    """Print the tables of an earlier run, and make its results.md and plots again."""
    try:
        everything = results.load(output)
    except FileNotFoundError as error:
        raise typer.BadParameter(
            f"there is no {results.FILE_NAME} yet: `run` writes it", param_hint="--output"
        ) from error
    from shmacc_bench.plots import draw  # matplotlib is slow to import, and large

    wide = None if sys.stdout.isatty() else FILE_COLUMNS
    print_report(everything, Console(width=wide))
    write_markdown(everything, output)
    draw(everything, output)


@app.command("list")
def list_cases() -> None:
    """List the cases, the scenarios and the peers."""
    console = Console()
    for case in all_cases():
        console.print(case.name, highlight=False)
    for name in PLANS:
        console.print(f"scenario/{name}", highlight=False)
    console.print("peers: " + ",".join(known_peers([])), highlight=False)
