"""Prints tables for people: drawn by rich on a terminal, as plain text everywhere else."""

import re
import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["human_bytes", "print_table"]

QUANTITY = re.compile(r"-?[\d.,]+ ?(%|B|KiB|MiB|GiB|TiB)?|")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    file: TextIO | None = None,
) -> None:
    """Prints a table; columns of numbers are aligned to the right."""
    file = file or sys.stdout
    text = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [
        name != "" and all(QUANTITY.fullmatch(line[i]) for line in text)
        for i, name in enumerate(columns)
    ]
    if file.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for name, is_right in zip(columns, right, strict=True):
            table.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for line in text:
            table.add_row(*map(Text, line))  # names in brackets are no markup
        Console(file=file).print(table)
        return
    lines = [list(columns), *text] if any(columns) else text
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    print(title, file=file)
    for line in lines:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip(), file=file)


def human_bytes(count: float) -> str:
    """Returns a number of bytes as people read it: 1536 is 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
