"""Makes ``--help`` read like a manual page: what for, options, examples, where to read on."""

import argparse
from collections.abc import Mapping
from typing import Any

from fusedrec_torchrec.cli.commands import COMMANDS

__all__ = ["ManualFormatter", "add_parser", "epilog_of"]

INDENT = " " * 4


class ManualFormatter(argparse.HelpFormatter):
    """Fills the lines of a paragraph, and leaves text of several lines as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


def add_parser(
    commands: Any,
    name: str,
    *,
    purpose: str,
    examples: Mapping[str, str],
    read_on: str,
    summary: str | None = None,
    settings: type[Any] | None = None,
    **more: Any,
) -> argparse.ArgumentParser:
    """Adds a subcommand and returns its parser, which has no arguments yet.

    Args:
        commands: those of ``fusedrec``, or the actions of one.
        name: of the subcommand.
        purpose: one paragraph about what it is for.
        examples: command lines that run, and what each does.
        read_on: the document about it.
        summary: one line for the list of commands; that of ``COMMANDS`` if None.
        settings: the section whose settings a configuration file has.
        **more: other arguments of a parser.
    """
    epilog = epilog_of(examples, read_on)
    if settings is not None:
        from fusedrec_torchrec.cli.settings import settings_help

        epilog += "\n\n" + settings_help(settings)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary or COMMANDS[name],
        description=purpose,
        epilog=epilog,
        formatter_class=ManualFormatter,
        **more,
    )
    return parser


def epilog_of(examples: Mapping[str, str], read_on: str) -> str:
    """Returns what stands behind the options: examples, and where to read on."""
    lines = ["examples:"]
    for command, what in examples.items():
        lines += [f"  {what}", INDENT + command]
    return "\n".join([*lines, "", f"read on: {read_on}"])
