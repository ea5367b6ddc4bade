"""Reads from the parsers what can be completed: commands, options, and what options take."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["TAKES", "Command", "Option", "Takes", "tree_of"]

Takes = Literal["nothing", "word", "choice", "setting", "yaml", "file", "folder"]
"""What stands behind an option or in the place of an argument."""

# By the names of arguments in the parsers.  Those with choices, and flags, need none.
TAKES: dict[str, Takes] = {
    **dict.fromkeys(("config", "plan", "rates_of", "what", "suite"), "yaml"),
    **dict.fromkeys(("data", "files", "path", "merge"), "file"),
    **dict.fromkeys(("plot", "save", "hot_set", "html", "out", "output", "infer"), "file"),
    **dict.fromkeys(("runs", "target", "resume"), "folder"),
    **dict.fromkeys(("batch_size", "samples", "top", "share", "counters", "hot_rows"), "word"),
    **dict.fromkeys(("memory", "embedding_dim", "min_count", "max_rows", "memory_mb"), "word"),
    **dict.fromkeys(("held_out", "ranks", "batches", "seed", "name", "only", "timeout"), "word"),
    **dict.fromkeys(("world_size", "table", "tables", "web", "every"), "word"),
    **dict.fromkeys(("label", "columns", "delimiter"), "word"),
    "set": "setting",
}
WORDS = {"what": ("diff", "schema")}  # that stand where files do


@dataclass(frozen=True)
class Option:
    """Is an option of a command, or an argument without a name.

    Attributes:
        names: with their dashes; none of an argument.
        help: one line about it.
        takes: what stands behind it.
        choices: the words that it takes, if they are known; beside files, if it takes files.
        is_optional: whether there need not be anything behind it.
        repeats: whether it may be given several times.
    """

    names: tuple[str, ...]
    help: str
    takes: Takes
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    repeats: bool = False


@dataclass(frozen=True)
class Command:
    """Is a command with its options, arguments and, if it has any, commands below it.

    Attributes:
        path: the words that lead to it, without ``fusedrec``.
        help: one line about it.
        options: by their names.
        arguments: without names, in order.
        settings: names that ``--set`` takes.
        commands: below this one.
    """

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Option, ...]
    settings: tuple[str, ...]
    commands: tuple["Command", ...]

    def walk(self) -> Iterator["Command"]:
        """Yields this command and all below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


def tree_of(parser: argparse.ArgumentParser, settings: Mapping[str, Sequence[str]]) -> Command:
    """Returns what a parser knows.

    Args:
        parser: of ``fusedrec``, with all of its commands.
        settings: names of settings, by the command that has ``--set``.
    """
    return _command(parser, (), "", settings)


def _command(
    parser: argparse.ArgumentParser,
    path: tuple[str, ...],
    text: str,
    settings: Mapping[str, Sequence[str]],
) -> Command:
    options, arguments, commands = [], [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands += [
                _command(below, (*path, name), summaries[name], settings)
                for name, below in action.choices.items()
            ]
        elif action.option_strings:
            options.append(_option(action))
        else:
            arguments.append(_option(action))
    names = tuple(settings.get(" ".join(path), ()))
    return Command(path, text, tuple(options), tuple(arguments), names, tuple(commands))


def _option(action: argparse.Action) -> Option:
    choices: Any = action.choices
    takes: Takes = "nothing"
    if choices is not None:
        takes = "choice"
    elif action.nargs != 0:
        takes = TAKES[action.dest]
    return Option(
        names=tuple(action.option_strings),
        help=_one_line(action),
        takes=takes,
        choices=tuple(map(str, choices or WORDS.get(action.dest, ()))),
        is_optional=action.nargs in ("?", "*"),
        repeats=isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"),
    )


def _one_line(action: argparse.Action) -> str:
    """Returns the help of an argument as a menu shows it: short, without its default."""
    if action.help is None or action.help == argparse.SUPPRESS:
        return ""
    text = action.help.partition(" (default")[0].partition(";")[0]
    return " ".join(text.replace("%(const)s", str(action.const)).split())
