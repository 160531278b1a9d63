"""`show`: describe segments in full."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import TYPE_CHECKING

from shmacc import inspection
from shmacc.errors import DataLossError, PermissionDeniedError
from shmacc_inspect import describing, failures, naming, page
from shmacc_inspect.output import NotShown, Shown, to_json
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    from shmacc.inspection import Summary


def run(
    *, names: list[str], rows: int, values: bool, layout: bool, everywhere: bool, json: bool
) -> None:
    """Run the verb."""
    failed = False
    look = partial(_look, rows=rows, values=values)
    unfit = partial(_unfit, rows=rows, values=values)
    answers = naming.answers(names, look, everywhere=everywhere, unfit=unfit)
    for number, answer in enumerate(answers):
        if json:
            print(to_json(answer))
        else:
            elements = describing.elements(answer, time.time(), layout=layout)
            page.show([*([Cell("")] if number else []), *elements])
        if isinstance(answer, NotShown):
            page.write_line(answer.error)
            failed = True
    if failed:
        failures.end(failures.WRONG_OR_FAILED)


def _unfit(summary: Summary, *, rows: int, values: bool) -> str:
    """Return why the options do not apply to a segment; empty: they do."""
    if rows and (summary.is_arrays or summary.kind == "dense"):
        return f"{naming.in_words(summary)} have no rows of a round to count"
    return f"{naming.in_words(summary)} have no sums" if values and summary.is_arrays else ""


def _look(summary: Summary, *, rows: int, values: bool) -> Shown | NotShown:
    name = summary.name.system_name
    try:
        seen = inspection.describe(name)
        touched, still = inspection.most_touched(name, rows) if rows else (None, None)
        return Shown(
            **{field.name: getattr(seen, field.name) for field in dataclasses.fields(seen)},
            damage=inspection.damage(name),
            most_touched=touched,
            most_touched_still=still,
            values=inspection.summarise_values(name) if values else None,
        )
    except (DataLossError, PermissionDeniedError) as error:
        return NotShown(summary, str(error))
