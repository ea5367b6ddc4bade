"""``fusedrec prepare`` turns text in Criteo's format into parquet."""

import argparse
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.training.data.prepare_options import (
    DENSE_TRANSFORMS,
    ON_BAD_LINE,
    PrepareOptions,
)
from fusedrec_torchrec.training.data.spelling import as_flag
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = ["add_command"]

EXAMPLES = {
    "fusedrec prepare train.txt --output prepared --quiet": "Prepares a file as it is.",
    "fusedrec prepare train.txt --output frequent --min-count 3 --on-bad-line skip": "Gives rare "
    "values one row in common, and leaves malformed lines out.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "prepare",
        purpose="Streams text files in Criteo's format into parquet, in bounded memory: values "
        "become rows of tables, and training reads them at full speed.  A run that was stopped or "
        "failed goes on where it was; with other text or settings it begins anew.",
        examples=EXAMPLES,
        read_on="docs/data.md",
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
    add_json(parser)
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
    from fusedrec_torchrec.training.data.summary import prepared_figures, print_prepared

    data = prepare(
        arguments.files,
        arguments.output,
        options,
        progress=not arguments.quiet,
        spelling=as_flag,
    )
    if arguments.json:
        print_json(prepared_figures(data))
    else:
        print_prepared(data)
