"""The completion script for fish."""

from collections.abc import Iterator

from fusedrec_torchrec.cli.command_tree import Command, Option

__all__ = ["fish_script"]

HEAD = r"""# fish completion for fusedrec, made by `fusedrec completion fish`.
function __fusedrec_at  # whether the command line begins with these words
    set -l words (commandline -opc)
    set -e words[1]
    for place in (seq (count $argv))
        test "$words[$place]" = "$argv[$place]"; or return 1
    end
end

function __fusedrec_next  # whether these are all words so far, and a command comes next
    set -l words (commandline -opc)
    set -e words[1]
    test "$words" = "$argv"
end

function __fusedrec_yaml  # files of configurations, and folders that lead to them
    set -l typed (commandline -ct)
    for path in $typed*.yaml $typed*.yml $typed*/
        echo $path
    end
end

complete -c fusedrec -f
"""
FILES = {
    "yaml": "-a '(__fusedrec_yaml)'",
    "file": "-F",
    "folder": "-a '(__fish_complete_directories)'",
    "word": "",
}


def fish_script(tree: Command) -> str:
    """Returns a script for ``~/.config/fish/completions``."""
    lines = [line for command in tree.walk() for line in _lines(command)]
    return "\n".join([HEAD, *(line.rstrip() for line in lines)]) + "\n"


def _lines(command: Command) -> Iterator[str]:
    """Yields what completes one command."""
    here = " ".join(command.path)
    for below in command.commands:
        yield (
            f"complete -c fusedrec -n '__fusedrec_next {here}' -a {below.path[-1]} "
            f"-d {_quoted(below.help)}"
        )
    # Those of fusedrec itself stand before any command.
    when = f"__fusedrec_at {here}" if command.path else "__fusedrec_next"
    for option in command.options:
        yield f"complete -c fusedrec -n '{when}' {_option(option, command)}"
    for argument in command.arguments[-1:]:
        yield f"complete -c fusedrec -n '{when}' {_taken(argument, command)}"


def _option(option: Option, command: Command) -> str:
    names = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names]
    words = [*names]
    if option.takes != "nothing":
        needs = "-r" if option.takes == "file" else "-x"  # with files, or with nothing else
        words += [*([] if option.is_optional else [needs]), _taken(option, command)]
    return " ".join([*words, f"-d {_quoted(option.help)}"])


def _taken(option: Option, command: Command) -> str:
    if option.takes == "choice":
        return f"-a {_quoted(' '.join(option.choices))}"
    if option.takes == "setting":
        return f"-a {_quoted(' '.join(f'{setting}=' for setting in command.settings))}"
    words = f"-a {_quoted(' '.join(option.choices))} " if option.choices else ""
    return words + FILES[option.takes]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
