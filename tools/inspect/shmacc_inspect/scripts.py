"""What `--completion` prints: for each shell, the script that makes it ask this command."""

from typing import Final

# Readline breaks words at colons (COMP_WORDBREAKS), and namespaces end with one. So the line is
# split again, at blanks only, and each candidate loses the part that readline takes for earlier
# words.
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
    command $words[1] --complete-described (math (count $words) - 1) $words[2..-1] 2>/dev/null
end
complete -c shmacc-inspect -f -a '(__shmacc_inspect)'
"""
SHELLS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
