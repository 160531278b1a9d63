"""Arguments and options that several verbs have, and the completion of names."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shmacc_inspect import NAMESPACE_VARIABLE


def complete_name(incomplete: str) -> list[str]:
    """Return the names of segments with this beginning, for the shell."""
    from shmacc import inspection  # late: see the package
    from shmacc_inspect.naming import typed_name

    names = (typed_name(summary.name) for summary in inspection.list_segments())
    return sorted(name for name in names if name.startswith(incomplete))


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A shared_name, or a segment's whole name in /dev/shm (shmacc....).",
        autocompletion=complete_name,
        show_default=False,
    ),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A shared_name, or a segment's whole name in /dev/shm (shmacc....).",
        autocompletion=complete_name,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Say it as JSON (schema: docs/inspect.md).")]
AllNamespaces = Annotated[
    bool,
    typer.Option(
        "--all-namespaces",
        "-A",
        help=f"All namespaces, although {NAMESPACE_VARIABLE} is set.",
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Do it. Without this, only say what would be done.")
]


def namespace(*, everywhere: bool) -> str | None:
    """Return the namespace that a verb without a NAME looks at; None: all of them."""
    return None if everywhere else os.environ.get(NAMESPACE_VARIABLE) or None
