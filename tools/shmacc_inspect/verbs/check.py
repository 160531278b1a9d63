"""`check`: is it sound?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from shmacc_inspect import failures, formatting, options, page
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmacc_inspect.output.findings import Findings

EPILOG: Final = """\b
Examples:
  shmacc-inspect check
  shmacc-inspect check embeddings || page-somebody
  shmacc-inspect check --quiet 'job7-*'
  shmacc-inspect check --json | jq -r '.findings[].remedy'"""

_GLOB_CHARACTERS: Final = frozenset("*?[")


def run(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A segment, or a glob; without it, all of them, and what is left of others.",
            autocompletion=options.complete_name,
            show_default=False,
        ),
    ] = None,
    *,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only what is wrong, no notes.")
    ] = False,
    everywhere: options.AllNamespaces = False,
    json: options.Json = False,
) -> None:
    """Verify every invariant of segments; exit status 1 if one is broken.

    Compares records, counters, sizes, rows and index, semaphores and names, and looks for
    leftovers, stopped holders of locks, and names that were removed while in use. Changes nothing,
    and waits for no lock. WRONG means that somebody has to act; a note is worth knowing, and needs
    no action.
    """
    from shmacc import inspection  # late: see the package
    from shmacc_inspect.output import to_json
    from shmacc_inspect.output.findings import Finding, Findings

    if name is not None and not _GLOB_CHARACTERS & set(name):
        found, checked = inspection.check(name), 1
    else:
        pattern, namespace = name or "*", options.namespace(everywhere=everywhere)
        found = inspection.check_all(pattern, namespace=namespace)
        checked = len(inspection.list_names(pattern, namespace=namespace))
    findings = [Finding.of(finding) for finding in found]
    wrong = sum(finding.severity == inspection.Severity.WRONG for finding in findings)
    not_compared = sum(finding.kind == "not_compared" for finding in findings)
    answer = Findings(checked, not_compared, wrong, len(findings) - wrong, findings)
    if json:
        print(to_json(answer))
    else:
        page.show(_elements(answer, quiet=quiet))
        verdict = f"{wrong} wrong" if wrong else "nothing wrong"
        notes = f", {formatting.count_of(answer.notes, 'note')}" if answer.notes else ""
        if not_compared:
            verdict += f", {not_compared} could not be compared"
        page.write_line(f"{formatting.count_of(checked, 'segment')} checked: {verdict}{notes}")
    if wrong or not_compared:
        failures.end(failures.WRONG_OR_FAILED)


def _elements(answer: Findings, *, quiet: bool) -> Iterator[Cell]:
    for finding in sorted(answer.findings, key=lambda found: found.severity == "note"):
        is_note = finding.severity == "note"
        if is_note and quiet:
            continue
        word, style = ("note ", "cyan") if is_note else ("WRONG", "bold red")
        problem = formatting.printable(finding.problem)
        yield Cell(f"{word}  {finding.subject}: {problem}", style)
        command = f": {finding.command}" if finding.command else ""
        yield Cell(f"       do: {finding.remedy}{command}")
