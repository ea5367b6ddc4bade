"""``fusedrec prepare``: text in Criteo's format to parquet."""

import argparse
from typing import Any

from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.training.data.prepare import PrepareOptions, prepare
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.spelling import as_flag
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = ["add_command", "print_prepared"]


def add_command(commands: Any) -> None:
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
        choices=["log", "none"],
        default=default.dense_transform,
        help="log(x + 3) of the integer columns, or none (default %(default)s)",
    )
    parser.add_argument(
        "--on-bad-line",
        choices=["error", "skip"],
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
    options = PrepareOptions(
        min_count=arguments.min_count,
        max_rows=arguments.max_rows,
        dense_transform=arguments.dense_transform,
        on_bad_line=arguments.on_bad_line,
        memory_mb=arguments.memory_mb,
    )
    data = prepare(
        arguments.files,
        arguments.output,
        options,
        progress=not arguments.quiet,
        spelling=as_flag,
    )
    print_prepared(data)


def print_prepared(data: PreparedData) -> None:
    """What prepared data holds."""
    manifest = data.manifest
    print_table(
        f"prepared data {data.folder}",
        ("", ""),
        [
            ("samples", data.samples),
            ("clicks", f"{manifest['clicks'] / data.samples:.2%}"),
            ("dense features", data.dense_features),
            ("tables", len(data.table_rows)),
            ("rows of all tables", sum(data.table_rows.values())),
            ("parts", len(manifest["parts"])),
            ("malformed lines left out", sum(manifest["bad_lines"]["counts"].values())),
        ],
    )
    print_table("tables", ("name", "rows"), list(data.table_rows.items()))
    if manifest["bad_lines"]["counts"]:
        print_table(
            "malformed lines", ("reason", "lines"), list(manifest["bad_lines"]["counts"].items())
        )
        for example in manifest["bad_lines"]["examples"]:
            print(f"  {example}")
