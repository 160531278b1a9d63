"""`show`: one segment in full."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from shmacc_inspect import failures, options, page
from shmacc_inspect.page import Cell

if TYPE_CHECKING:
    import argparse

    from shmacc import inspection
    from shmacc_inspect.output import NotShown, Shown

DESCRIPTION: Final = """\
Describe segments in full: processes, waiting takes, lock, counters, and the verdict.

It takes and changes nothing, and waits for no lock."""
EXAMPLES: Final = """\
Examples:
  shmacc-inspect show embeddings
  shmacc-inspect show embeddings --rows 20 --values
  shmacc-inspect show shmacc.alice:embeddings 'tower.*'
  shmacc-inspect show embeddings --json | jq .lock"""

_WITHOUT_ROWS: Final = {
    "dense": "a dense accumulator has",
    "arrays": "shared arrays have",
    "parameters": "parameters have",
}
_WITHOUT_SUMS: Final = {"arrays", "parameters"}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    options.add_names(parser)
    parser.add_argument(
        "--rows",
        metavar="K",
        type=options.count(0),
        default=0,
        help="the K rows that most gradients of this round touched",
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="norm, largest, NaN and infinite numbers of the round's sums",
    )
    parser.add_argument(
        "--layout", action="store_true", help="its memory: offset, size and fill of each region"
    )
    options.add_ascii(parser)
    options.add_namespace(parser)
    options.add_json(parser)


def run(
    *,
    names: list[str],
    rows: int,
    values: bool,
    layout: bool,
    ascii: bool,  # noqa: A002 - the option's name
    everywhere: bool,
    json: bool,
) -> None:
    """Run the verb."""
    from shmacc.errors import NotFoundError  # late: see the package
    from shmacc_inspect import describing, naming
    from shmacc_inspect.output import NotShown, to_json

    failed = False
    first, named = True, naming.exact(names)
    for summary in naming.select_fit(
        names, everywhere=everywhere, unfit=partial(_unfit, rows=rows, values=values)
    ):
        try:
            answer = _look(summary, rows=rows, values=values)
        except NotFoundError:
            if summary.name.system_name in named:
                raise
            continue  # a glob found it, and it is gone
        if json:
            print(to_json(answer))
        else:
            elements = describing.elements(answer, time.time(), layout=layout)
            page.show([*([] if first else [Cell("")]), *elements], plain=ascii)
        first = False
        if isinstance(answer, NotShown):
            page.write_line(answer.error)
            failed = True
    if failed:
        failures.end(failures.WRONG_OR_FAILED)


def _unfit(summary: inspection.Summary, *, rows: int, values: bool) -> str:
    """Return why what is asked for cannot be shown of a segment; empty: it can."""
    kind = summary.kind or ""
    if rows and kind in _WITHOUT_ROWS:
        return f"{_WITHOUT_ROWS[kind]} no rows of a round to count"
    return f"{_WITHOUT_ROWS[kind]} no sums" if values and kind in _WITHOUT_SUMS else ""


def _look(summary: inspection.Summary, *, rows: int, values: bool) -> Shown | NotShown:
    from shmacc import inspection  # late: see the package
    from shmacc.errors import DataLossError, PermissionDeniedError
    from shmacc_inspect.output import NotShown, shown

    name = summary.name.system_name
    try:
        return shown(
            inspection.describe(name),
            inspection.most_touched(name, rows) if rows else None,
            inspection.summarise_values(name) if values else None,
        )
    except (DataLossError, PermissionDeniedError) as error:
        return NotShown(summary, str(error))
