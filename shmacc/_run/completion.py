"""The scripts that make shells complete the options of ``shmacc-run``, and files after them."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any


class Completion(argparse.Action):
    """Prints the script for a shell, made from the parser's own options, and exits."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, choices=tuple(_SHELLS))

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *_rest: Any) -> None:
        actions = [action for action in parser._actions if action.option_strings]  # noqa: SLF001
        print("\n".join(_SHELLS[shell](parser.prog, actions)))  # noqa: T201
        parser.exit()


def _bash(program: str, actions: list[argparse.Action]) -> Iterator[str]:
    options = " ".join(option for action in actions for option in action.option_strings)
    yield f"complete -o default -W '{options}' {program}"


def _zsh(program: str, actions: list[argparse.Action]) -> Iterator[str]:
    function = "_" + program.replace("-", "_")
    yield f"#compdef {program}"
    yield f"{function}() {{"
    yield "    _arguments \\"
    for action in actions:
        for option in action.option_strings:
            yield f"        '{option}[{_said(action)}]{_values(action)}' \\"
    yield "        '*::file:_files'"
    yield "}"
    yield f"compdef {function} {program}"


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return f":value:({' '.join(action.choices)})" if action.choices else ":value:_files"


def _fish(program: str, actions: list[argparse.Action]) -> Iterator[str]:
    for action in actions:
        names = (
            f"-{'l' if option.startswith('--') else 's'} {option.lstrip('-')}"
            for option in action.option_strings
        )
        values = f"-x -a '{' '.join(action.choices)}'" if action.choices else "-r"
        value = f"{values} " if action.nargs is None else ""
        yield f"complete -c {program} {' '.join(names)} {value}-d '{_said(action)}'"


def _said(action: argparse.Action) -> str:
    return (action.help or "").replace("'", "").replace("[", "(").replace("]", ")")


_SHELLS: dict[str, Callable[[str, list[argparse.Action]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
