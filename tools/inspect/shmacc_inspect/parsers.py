"""The verbs, and the parsers of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from shmacc_inspect import PROGRAM, arguments, failures

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

VERBS: Final = {name: verb.summary for name, verb in arguments.VERBS.items()}
HELP: Final = "help"
EXAMPLES: Final = """\
Examples:
  shmacc-inspect list                what is there
  shmacc-inspect show embeddings     one segment in full
  shmacc-inspect watch embeddings    see it live
  shmacc-inspect check               is all of it sound?
  shmacc-inspect clean               what could be removed

Exit status: 0 fine, 1 found something wrong or failed, 2 usage, 3 no such name,
4 some segments could not be read (check), 124 timed out, 130 ended by Ctrl-C."""
DESCRIPTION: Final = "See, watch, check and clean up shmacc's accumulators in shared memory."
_USUAL_COLUMNS: Final = 80  # if stdout is no terminal


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=_columns() - 2)


def _columns() -> int:
    """Return the terminal's width, as argparse does, but without importing shutil."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(1).columns or _USUAL_COLUMNS
    except OSError:
        return _USUAL_COLUMNS


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, prog: str, description: str, epilog: str, usage: str | None = None) -> None:
        """Set the options that all parsers share."""
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=_formatter,
            allow_abbrev=False,
        )

    def declared(self) -> list[argparse.Action]:
        """Return the declared arguments; argparse has no public list of them."""
        return self._actions

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; argparse's own method ignores a failed write."""
        print(self.format_help(), end="", file=file or sys.stdout)

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UsageError, which ends the command."""
        raise failures.UsageError(f"{message} (`{self.prog} --help`)")


def parser_of(verb: str) -> Parser:
    """Return the parser of a verb's arguments."""
    found = arguments.VERBS[verb]
    parser = Parser(f"{PROGRAM} {verb}", found.description, f"Examples:\n{found.examples}")
    found.declare(parser)
    arguments.add_common(parser)
    return parser


def top_parser() -> Parser:
    """Return the parser of a command line without a verb."""
    verbs = "\n".join(f"  {verb:<9} {what}" for verb, what in VERBS.items())
    parser = Parser(
        PROGRAM,
        f"{DESCRIPTION}\n\nVerbs (`{PROGRAM} VERB --help` has more):\n{verbs}",
        EXAMPLES,
        usage=f"{PROGRAM} VERB [NAME ...] [OPTION ...]",
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="print the versions of shmacc and of the layout of segments, and exit",
    )
    parser.add_argument(
        "--completion",
        choices=("bash", "zsh", "fish"),
        help="print the script that makes this shell complete verbs, options and names",
    )
    return parser
