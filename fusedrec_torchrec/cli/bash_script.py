"""The completion script for bash."""

from fusedrec_torchrec.cli.command_tree import Command, Option

__all__ = ["bash_script"]

HEAD = r"""# bash completion for fusedrec, made by `fusedrec completion bash`.
_fusedrec_offer() {  # words that begin with what is typed
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(compgen -W "$1" -- "$2")
}

_fusedrec_files() {  # files of some kinds, folders that lead to them, and words
    local current="$1" words="$2" word pattern
    shift 2
    compopt -o filenames 2>/dev/null
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(
        compgen -W "$words" -- "$current"
        for pattern in "$@"; do compgen -f -X "!$pattern" -- "$current"; done
        compgen -d -- "$current"
    )
}

_fusedrec() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
    local place="" commands="" options="" arguments="" settings="" kind="" choices=""
    COMPREPLY=()
    if (( COMP_CWORD > 1 )); then place="${COMP_WORDS[1]}"; fi
"""
TAIL = r"""
    if [[ -z $kind && $current == -* ]]; then kind="options"; fi
    if [[ -z $kind && -n $commands ]]; then kind="commands"; fi
    case "${kind:-$arguments}" in
        options) _fusedrec_offer "$options" "$current" ;;
        commands) _fusedrec_offer "$commands" "$current" ;;
        choice) _fusedrec_offer "$choices" "$current" ;;
        setting)
            compopt -o nospace 2>/dev/null
            _fusedrec_offer "$settings" "$current"
            ;;
        yaml) _fusedrec_files "$current" "$choices" "*.yaml" "*.yml" ;;
        folder) _fusedrec_files "$current" "" ;;
        file) _fusedrec_files "$current" "" "*" ;;
    esac
}

complete -F _fusedrec fusedrec
"""


def bash_script(tree: Command) -> str:
    """Returns a script that bash reads once; completing then needs no other program."""
    parents = [command.path[0] for command in tree.commands if command.commands]
    deeper = [
        f"    if [[ $place == {name} ]] && (( COMP_CWORD > 2 )); then "
        'place="$place ${COMP_WORDS[2]}"; fi\n'
        for name in parents
    ]
    cases = [_case(command) for command in tree.walk()]
    return "".join([HEAD, *deeper, '    case "$place" in\n', *cases, "    esac\n", TAIL])


def _case(command: Command) -> str:
    options = " ".join(name for option in command.options for name in option.names)
    lines = [f'        "{" ".join(command.path)}")', f'            options="{options}"']
    if command.commands:
        lines.append(f'            commands="{" ".join(c.path[-1] for c in command.commands)}"')
    if command.settings:
        lines.append(f'            settings="{" ".join(f"{s}=" for s in command.settings)}"')
    if command.arguments:
        last = command.arguments[-1]
        lines.append(f'            arguments="{last.takes}"; choices="{" ".join(last.choices)}"')
    taking = [option for option in command.options if option.takes != "nothing"]
    if taking:
        lines.append('            case "$previous" in')
        lines += [f"                {_previous(option)} ;;" for option in taking]
        lines.append("            esac")
    return "\n".join([*lines, "            ;;"]) + "\n"


def _previous(option: Option) -> str:
    known = f'; choices="{" ".join(option.choices)}"' if option.choices else ""
    # Behind an option that takes a word nobody knows, nothing is offered.
    text = f'{"|".join(option.names)}) kind="{option.takes}"{known}'
    if option.is_optional:  # the next option may stand there, too
        return text.replace(") kind=", ") [[ $current != -* ]] && kind=")
    return text
