"""``fusedrec prepare`` turns text in Criteo's format into parquet."""

import argparse
from typing import Any

from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.training.data.prepare_options import (
    DENSE_TRANSFORMS,
    ON_BAD_LINE,
    PrepareOptions,
)
from fusedrec_torchrec.training.data.spelling import as_flag
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = commands.add_parser(
        "prepare",
        help="turn Criteo text files into parquet that trains at full speed",
        description="Streams text files into parquet, in bounded memory.  A run that was stopped "
        "or failed goes on where it was; with other text or settings it begins anew.",
    )
    parser.add_argument("files", nargs="+", help="text files, plain or .gz, or folders of them")
    parser.add_argument("--output", required=True, help="folder for the prepared data")
    default = PrepareOptions()
    parser.add_argument(
        "--min-count",
        type=whole(1),
        default=default.min_count,
        help="values seen less often share one row (default %(default)s)",
    )
    parser.add_argument(
        "--max-rows",
        type=whole(RESERVED + 1),
        default=None,
        help="most rows of a table; beyond it only the most frequent values get their own row",
    )
    parser.add_argument(
        "--dense-transform",
        choices=DENSE_TRANSFORMS,
        default=default.dense_transform,
        help="log(x + 3) of the integer columns, or none (default %(default)s)",
    )
    parser.add_argument(
        "--on-bad-line",
        choices=ON_BAD_LINE,
        default=default.on_bad_line,
        help="stop at a malformed line, or count, report and skip it (default %(default)s)",
    )
    parser.add_argument(
        "--memory-mb",
        type=whole(1),
        default=default.memory_mb,
        help="about what counting a column's values may use (default %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prepares the data and shows what it holds."""
    options = PrepareOptions(
        min_count=arguments.min_count,
        max_rows=arguments.max_rows,
        dense_transform=arguments.dense_transform,
        on_bad_line=arguments.on_bad_line,
        memory_mb=arguments.memory_mb,
    )

    from fusedrec_torchrec.training.data.prepare import prepare
    from fusedrec_torchrec.training.data.summary import print_prepared

    data = prepare(
        arguments.files,
        arguments.output,
        options,
        progress=not arguments.quiet,
        spelling=as_flag,
    )
    print_prepared(data)
