"""The completion script for zsh."""

from fusedrec_torchrec.cli.command_tree import Command, Option

__all__ = ["zsh_script"]

FILES = {
    "yaml": '_files -g "*.(yaml|yml)(-.)"',
    "file": "_files",
    "folder": "_files -/",
    "word": "",
    "setting": "_fusedrec_settings",
}
# A file of fpath is the function itself; a file that is sourced makes it known.
TAIL = """
if [[ $funcstack[1] == _fusedrec ]]; then
  _fusedrec "$@"
else
  compdef _fusedrec fusedrec
fi
"""


def zsh_script(tree: Command) -> str:
    """Returns a script for a folder of ``fpath``."""
    lines = [
        "#compdef fusedrec",
        "# zsh completion for fusedrec, made by `fusedrec completion zsh`.",
    ]
    for command in tree.walk():
        lines += ["", *_function(command)]
    return "\n".join([*lines, TAIL])


def _function(command: Command) -> list[str]:
    """Returns the function that completes one command."""
    name = "_".join(["_fusedrec", *command.path])
    lines = [f"{name}() {{"]
    if command.settings:
        lines.append(f"  local -a fusedrec_settings=({' '.join(command.settings)})")
    given = [_argument(option) for option in command.options]
    if command.commands:
        lines += [
            "  local context state line",
            "  local -A opt_args",
            "  _arguments -C "
            + " ".join([*given, "'1:command:->command'", "'*::argument:->below'"]),
            "  case $state in",
            "    command)",
            "      local -a commands=(",
            *(f"        {_quoted(f'{c.path[-1]}:{_plain(c.help)}')}" for c in command.commands),
            "      )",
            "      _describe command commands ;;",
            "    below)",
            "      case $words[1] in",
            *(
                f"        {c.path[-1]}) {'_'.join(['_fusedrec', *c.path])} ;;"
                for c in command.commands
            ),
            "      esac ;;",
            "  esac",
        ]
    else:
        for place, argument in enumerate(command.arguments, 1):
            where = "*" if argument.repeats else str(place)
            given.append(_quoted(f"{where}:{_plain(argument.help) or 'argument'}:{_of(argument)}"))
        lines.append("  _arguments " + " ".join(given))
    return [*lines, "}", *_settings_function(command)]


def _settings_function(command: Command) -> list[str]:
    if command.path:
        return []
    return [
        "",
        "_fusedrec_settings() {",
        "  compadd -S = -- $fusedrec_settings",
        "}",
    ]


def _argument(option: Option) -> str:
    """Returns an option as ``_arguments`` wants it: name, help, and what it takes."""
    names = option.names
    behind = ""
    if option.takes != "nothing":
        colon = "::" if option.is_optional else ":"
        behind = f"{colon}{option.takes}:{_of(option)}"
    text = f"[{_plain(option.help)}]{behind}"
    if len(names) == 1:
        return _quoted(("*" if option.repeats else "") + names[0] + text)
    return f"{{{','.join(names)}}}{_quoted(text)}"


def _of(option: Option) -> str:
    if option.takes == "choice":
        return f"({' '.join(option.choices)})"
    if option.choices:
        return f"{{compadd -- {' '.join(option.choices)}; {FILES[option.takes]}}}"
    return FILES[option.takes]


def _plain(text: str) -> str:
    """Returns a text without what means something to ``_arguments``."""
    return text.replace("[", "(").replace("]", ")").replace(":", ",").replace("\\", "")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
