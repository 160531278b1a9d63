"""Answers the shell when somebody presses Tab.

The shell's script (`--completion` prints it) runs this command with `--complete`, the number of the
word to complete, and the words of the line. The answer has one candidate a line; with
`--complete-described`, a tab and a description follow each candidate. Options come from the
parsers, names from shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmacc_inspect import NAMESPACE_VARIABLE, parsers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PREFIX: Final = "shmacc."  # names in /dev/shm begin with it
# Readline breaks words at colons (COMP_WORDBREAKS), and a namespace is followed by a colon. So the
# line is split again, at blanks only, and each candidate loses its part up to the last colon.
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
    [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace
    return 0
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
    if test "$words[-2]" = --output
        __fish_complete_path "$words[-1]"
        return
    end
    command $words[1] --complete-described (math (count $words) - 1) $words[2..-1] 2>/dev/null
end
complete -c shmacc-inspect -f -a '(__shmacc_inspect)'
"""
SHELLS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def answer(arguments: Sequence[str], *, described: bool) -> None:
    """Print the candidates for a word, given its number and the words after the command's own."""
    number = int(arguments[0])
    words = [*arguments[1:], ""]
    before, word = words[: number - 1], words[number - 1]
    candidates = _candidates(before, word)
    for candidate in sorted(set(candidates)):
        if candidate.startswith(word):
            what = candidates.get(candidate, "") if isinstance(candidates, dict) else ""
            print(f"{candidate}\t{what}" if described and what else candidate)


def _candidates(before: Sequence[str], word: str) -> Iterable[str]:
    """Return the candidates; as a dict if each has a description."""
    if not before:
        if word.startswith("-"):
            return _options(parsers.top_parser())
        return {**parsers.VERBS, parsers.HELP: "print the help of a verb, or of all"}
    if before == ["--completion"]:
        return tuple(SHELLS)
    if before == [parsers.HELP]:
        return parsers.VERBS
    return _of_verb(before, word) if before[0] in parsers.VERBS else ()


def _of_verb(before: Sequence[str], word: str) -> Iterable[str]:
    parser = parsers.parser_of(before[0])
    declared = parser.declared()
    option = next((action for action in declared if before[-1] in action.option_strings), None)
    if option is not None and option.nargs is None:  # it takes a value
        # `choices` may be a dict: pass its keys only, since the values are no descriptions.
        return tuple(option.choices or _values(option.dest))
    if word.startswith("-") and "--" not in before:
        return _options(parser)
    if not any(action.dest == "names" for action in declared):
        return ()
    return _names(before, word)


def _values(option: str) -> Iterable[str]:
    """Return the possible values of an option, if they are known."""
    if option == "namespace":
        return _namespaces()
    return ("step=", "count=", "gone") if option == "condition" else ()


def _options(parser: parsers.Parser) -> Iterable[str]:
    return {
        text: action.help or "" for action in parser.declared() for text in action.option_strings
    }


def _names(before: Sequence[str], word: str) -> Iterable[str]:
    import os  # only here: help must come at once

    from shmacc import inspection
    from shmacc_inspect import naming

    for option in ("-n", "--namespace"):
        if option in before[:-1]:
            os.environ[NAMESPACE_VARIABLE] = before[before.index(option) + 1]
    whole = word.startswith(_PREFIX)
    for name in inspection.list_names():
        yield name.system_name if whole else naming.word(name)


def _namespaces() -> Iterable[str]:
    from shmacc import inspection  # only here: help must come at once

    return {name.namespace for name in inspection.list_names() if name.namespace}
