"""The command: its verbs, and its exit status."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Final

import typer

from shmacc_inspect import failures
from shmacc_inspect.verbs import cancel, check, clean, metrics, remove, show, watch
from shmacc_inspect.verbs import list as list_verb

VERBS: Final = {
    "list": list_verb,
    "show": show,
    "watch": watch,
    "check": check,
    "clean": clean,
    "remove": remove,
    "cancel": cancel,
    "metrics": metrics,
}

app = typer.Typer(
    name="shmacc-inspect",
    help="See, watch, check and clean up shmacc's accumulators in shared memory.",
    epilog="\b\nExamples:\n"
    "  shmacc-inspect list                what is there\n"
    "  shmacc-inspect show embeddings     one segment in full\n"
    "  shmacc-inspect watch embeddings    see it live\n"
    "  shmacc-inspect check               is all of it sound?\n"
    "  shmacc-inspect clean               what could be removed\n"
    "\b\nExit status: 0 fine, 1 found something wrong or failed, 2 usage, 3 no such name.",
    no_args_is_help=True,
    # Plain help: as readable, and without importing rich.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for name, module in VERBS.items():
    app.command(name, epilog=module.EPILOG)(module.run)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # late: it is slow to import

        print(f"shmacc-inspect {version('shmacc')}")
        failures.end(failures.FINE)


@app.callback()
def options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that stand before the verb."""


def main() -> int:
    """Run the command line; return the exit status of what failed, else exit with its own."""
    # `shmacc-inspect list | head` ends as any other tool would, without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 has no bars
    try:
        app(prog_name="shmacc-inspect")
    except KeyboardInterrupt:
        return failures.INTERRUPTED
    except Exception as error:
        status = failures.status_of(error)
        if status is None:
            raise
        failures.explain(error)
        return status
    return failures.FINE
