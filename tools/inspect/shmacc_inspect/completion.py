"""What the shell asks when one presses the Tab key.

The shell's script (`--completion`) runs this command with `--complete`, the number of the word to
complete, and the words of the line; the answer is one candidate a line. Options come from the
parsers themselves, names from shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc_inspect import NAMESPACE_VARIABLE, main

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Readline breaks words at colons (COMP_WORDBREAKS), and namespaces end with one. So the line is
# split anew, at blanks alone, and of each candidate that part is left out which readline takes for
# words before.
_BASH: Final = r"""_shmacc_inspect() {
    local IFS=$' \t\n' line="${COMP_LINE:0:COMP_POINT}"
    local -a words
    read -r -a words <<<"$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    local number=$((${#words[@]} - 1))
    local word="${words[number]}"
    IFS=$'\n'
    COMPREPLY=($("${words[0]}" --complete "$number" "${words[@]:1}" 2>/dev/null))
    if [[ "$word" == *:* && "$COMP_WORDBREAKS" == *:* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%:*}:"}")
    fi
}
complete -o default -F _shmacc_inspect shmacc-inspect
"""
_ZSH: Final = r"""#compdef shmacc-inspect
_shmacc_inspect() {
    local -a found
    local answer="$("${words[1]}" --complete $((CURRENT - 1)) "${(@)words[2,CURRENT]}" 2>/dev/null)"
    found=("${(@f)answer}")
    if [[ -n "$found" ]]; then compadd -- "${found[@]}"; else _files; fi
}
compdef _shmacc_inspect shmacc-inspect
"""
_FISH: Final = r"""function __shmacc_inspect
    set -l words (commandline -opc) (commandline -ct)
    command $words[1] --complete (math (count $words) - 1) $words[2..-1] 2>/dev/null
end
complete -c shmacc-inspect -f -a '(__shmacc_inspect)'
"""
_PREFIX: Final = "shmacc."  # of names as they stand in /dev/shm
SHELLS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def answer(arguments: Sequence[str]) -> None:
    """Print the candidates for a word, given its number and the words after the command's own."""
    number = int(arguments[0])
    words = [*arguments[1:], ""]
    before, word = words[: number - 1], words[number - 1]
    for candidate in sorted(set(_candidates(before, word))):
        if candidate.startswith(word):
            print(candidate)


def _candidates(before: Sequence[str], word: str) -> Iterable[str]:
    if not before:
        return main.VERBS if not word.startswith("-") else _options(main.top_parser())
    if before[0] not in main.VERBS:
        return ()
    parser = main.parser_of(before[0])
    declared = parser.declared()
    option = next((action for action in declared if before[-1] in action.option_strings), None)
    if option is not None and option.nargs is None:  # which takes a value
        return option.choices or (_namespaces() if option.dest == "namespace" else ())
    if word.startswith("-"):
        return _options(parser)
    if not any(action.dest == "names" for action in declared):
        return ()
    return _names(before, word)


def _options(parser: main.Parser) -> Iterable[str]:
    return (text for action in parser.declared() for text in action.option_strings)


def _names(before: Sequence[str], word: str) -> Iterable[str]:
    import os  # with the library's, late: see the package

    from shmacc import inspection
    from shmacc_inspect.naming import typed_name

    for option in ("-n", "--namespace"):
        if option in before[:-1]:
            os.environ[NAMESPACE_VARIABLE] = before[before.index(option) + 1]
    whole = word.startswith(_PREFIX)
    for name in inspection.list_names():
        yield name.system_name if whole else typed_name(name)


def _namespaces() -> Iterable[str]:
    from shmacc import inspection  # late: see the package

    return {name.namespace for name in inspection.list_names() if name.namespace}
