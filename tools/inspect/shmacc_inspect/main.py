"""Finds the verb, parses its arguments, runs it, and turns errors into an exit status."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

from shmacc_inspect import NAMESPACE_VARIABLE, PROGRAM, failures
from shmacc_inspect.parsers import HELP, VERBS, parser_of, top_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMPLETE: Final = "--complete"  # for the scripts of `--completion`
_COMPLETE_DESCRIBED: Final = "--complete-described"


def main(arguments: Sequence[str]) -> int:
    """Run a command line; return its exit status."""
    try:
        _run(list(arguments))
    except SystemExit as end:  # argparse raises it, too, after --help
        return end.code if isinstance(end.code, int) else failures.FINE
    except Exception as error:
        status = failures.status_of(error)
        if status is None:
            raise
        failures.explain(error)
        return status
    return failures.FINE


def _run(arguments: list[str]) -> None:
    first = arguments[0] if arguments else ""
    if first in VERBS:
        asked = _parsed(first, arguments[1:])
        _choose(asked.pop("namespace", None))
        importlib.import_module(f"shmacc_inspect.verbs.{first}").run(**asked)
    elif first == HELP:
        _help(arguments[1:])
    elif first in {_COMPLETE, _COMPLETE_DESCRIBED}:
        from shmacc_inspect import completion

        completion.answer(arguments[1:], described=first == _COMPLETE_DESCRIBED)
    elif not first:
        top_parser().print_help(sys.stderr)
        failures.end(failures.USAGE)
    elif not first.startswith("-"):
        raise _no_verb(first)
    else:
        _answer_without_verb(arguments)


def _parsed(verb: str, arguments: list[str]) -> dict[str, Any]:
    """Return a verb's arguments by name. All words after `--` are names, even if they begin with -.

    argparse's parse_intermixed_args would take such words for options. So the parser gets the word
    "name" for each of them, in front of all options, where it cannot be an option's value.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names = arguments[at + 1 :]
    in_place = ["name"] * len(names)
    asked = vars(parser_of(verb).parse_intermixed_args([*in_place, *arguments[:at]]))
    asked["names"] = asked["names"][len(names) :] + names
    return asked


def _choose(namespace: str | None) -> None:
    """Use this namespace; None: that of the environment."""
    from shmacc.errors import InvalidArgumentError  # only here: help must come at once
    from shmacc_inspect import naming

    try:
        naming.choose(namespace)
    except InvalidArgumentError as error:
        said = str(error).replace(NAMESPACE_VARIABLE, "--namespace", 1)
        raise failures.UsageError(said) from None


def _help(verbs: list[str]) -> None:
    """Print the help of one verb, or of all verbs."""
    if not verbs:
        top_parser().print_help()
    elif verbs[0] in VERBS and not verbs[1:]:
        parser_of(verbs[0]).print_help()
    else:
        raise _no_verb(" ".join(verbs))


def _answer_without_verb(arguments: list[str]) -> None:
    asked = top_parser().parse_args(arguments)
    if asked.version:
        from importlib.metadata import version  # late: it is slow to import

        from shmacc import inspection

        print(f"{PROGRAM} {version('shmacc')}, layout version {inspection.LAYOUT_VERSION}")
    elif asked.completion:
        from shmacc_inspect.completion import SHELLS

        print(SHELLS[asked.completion], end="")


def _no_verb(word: str) -> failures.UsageError:
    import difflib  # late: only a wrong verb needs it

    found = difflib.get_close_matches(word, VERBS, n=1)
    hint = f"; there is {found[0]}" if found else ""
    return failures.UsageError(f"there is no verb {word!r}{hint} (`{PROGRAM} --help`)")
