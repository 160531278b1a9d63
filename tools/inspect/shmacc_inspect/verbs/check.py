"""`check`: verify segments and shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shmacc import inspection
from shmacc.errors import NotFoundError
from shmacc_inspect import failures, formatting, naming, page
from shmacc_inspect.output import Findings, to_json
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shmacc.inspection import Finding, SegmentName

_NAMED: Final = 5  # at most this many segments with the same finding are named


def run(*, names: list[str], quiet: bool, everywhere: bool, json: bool) -> None:
    """Run the verb."""
    checked: set[inspection.SegmentName] = set()
    found: dict[Finding, None] = {}  # each once, in order
    namespace = naming.scope(everywhere=everywhere)
    for name in names or ["*"]:
        if naming.one(name) is None:
            found_here = inspection.check_all(name, namespace=namespace)
            # The glob may match only leftovers of removed segments; that is no error.
            if names and not found_here:
                naming.select([name], everywhere=everywhere)
            checked.update(inspection.list_names(name, namespace=namespace))
        else:
            try:
                found_here = inspection.check(name)
            except NotFoundError:
                naming.select([name], everywhere=everywhere)  # its error names similar segments
                raise
            checked.update(naming.select([name], everywhere=everywhere, missing_ok=True))
        found.update(dict.fromkeys(found_here))
    findings = list(found)
    wrong = sum(finding.severity == inspection.Severity.WRONG for finding in findings)
    not_compared = sum(finding.kind == "not_compared" for finding in findings)
    unread = {finding.subject for finding in findings if finding.kind == "unreadable"}
    read = sum(name.system_name not in unread for name in checked)  # runs' records do not count
    answer = Findings(read, len(unread), not_compared, wrong, len(findings) - wrong, findings)
    if json:
        print(to_json(answer))
    else:
        page.show(_elements(answer, quiet=quiet))
        verdict = f"{wrong} wrong" if wrong else "nothing wrong" if checked else "nothing to check"
        notes = f", {formatting.count_of(answer.notes, 'note')}" if answer.notes else ""
        if not_compared:
            verdict += f", {not_compared} could not be compared"
        segments = formatting.count_of(answer.checked, "segment")
        missed = f", {len(unread)} could not be read: NOT checked" if unread else ""
        missed += "" if names else _aside(namespace, checked)
        page.write_line(f"{segments} checked: {verdict}{notes}{missed}")
    if wrong:
        failures.end(failures.WRONG_OR_FAILED)
    if unread or not_compared:  # no fault was found, but there may be one
        failures.end(failures.NOT_READ)


def _aside(namespace: str | None, checked: Collection[SegmentName]) -> str:
    """Say how many segments were left out: their namespace looks like a run's, but has no run."""
    if not namespace:
        return ""
    aside = set(inspection.list_names(namespace=f"{namespace}.*")).difference(checked)
    where = f"in namespaces {namespace}.*, not in its runs"
    return f"; NOT checked: {len(aside)} {where}" if aside else ""


def _elements(answer: Findings, *, quiet: bool) -> Iterator[Cell]:
    kept = [found for found in answer.findings if not (quiet and found.severity == "note")]
    kept.sort(key=lambda found: found.severity == "note")
    shown = _gathered(kept)
    for finding, after in zip(shown, [*shown, None][1:], strict=True):
        is_note = finding.severity == "note"
        word, style = ("note ", "cyan") if is_note else ("WRONG", "bold red")
        problem = formatting.printable(finding.problem)
        yield Cell(f"{word}  {finding.subject}: {problem}", style)
        # If successive findings share a remedy, print it once, below the last of them.
        if after is None or _advice(after) != _advice(finding):
            command = f": {finding.command}" if finding.command else ""
            yield Cell(f"       do: {finding.remedy}{command}")


def _gathered(found: list[Finding]) -> list[Finding]:
    """Merge equal findings about different segments."""
    same: dict[Finding, list[Finding]] = {}
    for finding in found:
        remedy = finding.remedy.replace(finding.subject, "NAME")
        same.setdefault(replace(finding, subject="", remedy=remedy), []).append(finding)
    return [
        several[0] if len(several) == 1 else replace(nameless, subject=_subjects(several))
        for nameless, several in same.items()
    ]


def _subjects(several: list[Finding]) -> str:
    names = [finding.subject for finding in several[:_NAMED]]
    more = len(several) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _advice(finding: Finding) -> tuple[str, str, str | None]:
    return finding.severity, finding.remedy, finding.command
