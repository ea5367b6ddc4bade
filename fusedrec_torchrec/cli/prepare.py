"""``fusedrec prepare`` turns data into parquet that trains at full speed.

Text in Criteo's format is prepared as it is.  Files with other columns need a configuration that
says what the columns are, which ``--infer`` suggests.
"""

import argparse
from pathlib import Path
from typing import Any, get_args

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.cli.outputs import output_file
from fusedrec_torchrec.core.files import write_text
from fusedrec_torchrec.training.arguments import load_config
from fusedrec_torchrec.training.data.prepare_options import (
    DENSE_TRANSFORMS,
    ON_BAD_LINE,
    PrepareOptions,
)
from fusedrec_torchrec.training.data.spelling import as_flag
from fusedrec_torchrec.training.data.table_options import CsvOptions, FileFormat
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = ["add_command"]

COLUMNAR = (".parquet", ".pq", ".arrow", ".ipc", ".feather")
EXAMPLES = {
    "fusedrec prepare train.txt --output prepared --quiet": "Prepares a file as it is.",
    "fusedrec prepare clicks.csv --infer clicks.yaml --label clicked --quiet": "Looks at files "
    "with columns of their own, and writes a configuration for them.",
    "fusedrec prepare train.txt --output frequent --min-count 3 --on-bad-line skip": "Gives rare "
    "values one row in common, and leaves malformed lines out.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "prepare",
        purpose="Streams files into parquet, in bounded memory: text in Criteo's format (FILES "
        "--output FOLDER), or what data.table of a training configuration names (--config FILE), "
        "which --infer suggests.  Values become rows of tables, and training reads them at full "
        "speed.  A run that was stopped or failed goes on where it was; with other data or "
        "settings it begins anew.",
        examples=EXAMPLES,
        read_on="docs/data.md",
    )
    parser.add_argument(
        "files", nargs="*", help="text files, plain, .gz or .zst, or folders of them; with --infer "
        "also parquet, Arrow and Feather files and patterns"
    )  # fmt: skip
    parser.add_argument("--output", default=None, help="folder for the prepared data")
    _add_table_arguments(parser)
    default = PrepareOptions()
    criteo = parser.add_argument_group("text in Criteo's format")
    criteo.add_argument(
        "--min-count",
        type=whole(1),
        default=default.min_count,
        help="values seen less often share one row (default %(default)s)",
    )
    criteo.add_argument(
        "--max-rows",
        type=whole(RESERVED + 1),
        default=None,
        help="most rows of a table; beyond it only the most frequent values get their own row",
    )
    criteo.add_argument(
        "--dense-transform",
        choices=DENSE_TRANSFORMS,
        default=default.dense_transform,
        help="log(x + 3) of the integer columns, or none (default %(default)s)",
    )
    criteo.add_argument(
        "--on-bad-line",
        choices=ON_BAD_LINE,
        default=default.on_bad_line,
        help="stop at a malformed line, or count, report and skip it (default %(default)s)",
    )
    criteo.add_argument(
        "--memory-mb",
        type=whole(1),
        default=default.memory_mb,
        help="about what counting a column's values may use (default %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    add_json(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def _add_table_arguments(parser: argparse.ArgumentParser) -> None:
    table = parser.add_argument_group("files with columns of their own")
    table.add_argument("--config", default=None, help="training configuration with data.table")
    table.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="overrides one setting of --config, may be given several times",
    )
    table.add_argument(
        "--infer",
        type=output_file,
        default=None,
        metavar="CONFIG",
        help="looks at FILES and writes a configuration for them, with comments",
    )
    table.add_argument("--label", default=None, help="column or expression, for --infer")
    table.add_argument(
        "--columns", default="", help="names of the columns of text without a header: a,b,c"
    )
    table.add_argument("--delimiter", default=None, help="of text files, for --infer")
    table.add_argument(
        "--format",
        choices=get_args(FileFormat),
        default=None,
        help="of FILES whose names do not tell, for --infer",
    )


def run(arguments: argparse.Namespace) -> None:
    """Prepares the data and shows what it holds, or writes a configuration for it."""
    if arguments.infer is not None:
        if not arguments.files or arguments.config or arguments.output:
            arguments.usage_error("--infer needs FILES, without --config and --output")
        _infer(arguments)
        return
    if (arguments.config is None) != (bool(arguments.files) and arguments.output is not None):
        arguments.usage_error("needs FILES and --output, or --config, or FILES and --infer")
    if arguments.config is not None:
        _prepare_configured(arguments)
        return
    for file in arguments.files:
        if Path(file).suffix.lower() in COLUMNAR:
            raise ValueError(
                f"data file {file} is no text in Criteo's format: `fusedrec prepare {file} --infer "
                "FILE.yaml` writes a configuration for it, for `fusedrec prepare --config`"
            )
    options = PrepareOptions(
        min_count=arguments.min_count,
        max_rows=arguments.max_rows,
        dense_transform=arguments.dense_transform,
        on_bad_line=arguments.on_bad_line,
        memory_mb=arguments.memory_mb,
    )

    from fusedrec_torchrec.training.data.prepare import prepare

    data = prepare(
        arguments.files,
        arguments.output,
        options,
        progress=not arguments.quiet,
        spelling=as_flag,
    )
    _show(data, arguments.json)


def _show(data: Any, as_json: bool) -> None:
    from fusedrec_torchrec.training.data.summary import prepared_figures, print_prepared

    if as_json:
        print_json(prepared_figures(data))
    else:
        print_prepared(data)


def _prepare_configured(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.set)
    if arguments.output is not None or arguments.files:
        arguments.usage_error("--config says which files, and where: leave out FILES and --output")
    if config.data.source not in ("criteo", "table"):
        raise ValueError(
            f"data.source of {arguments.config} is {config.data.source}, must be table or criteo: "
            "there is nothing to prepare"
        )

    from fusedrec_torchrec.training.data.prepared import PreparedData
    from fusedrec_torchrec.training.source import open_source

    data = open_source(config, progress=not arguments.quiet)
    assert isinstance(data, PreparedData)
    _show(data, arguments.json)


def _infer(arguments: argparse.Namespace) -> None:
    columns = [name.strip() for name in arguments.columns.split(",")] if arguments.columns else []
    csv = CsvOptions(columns=columns, delimiter=arguments.delimiter)

    from fusedrec_torchrec.core.config import from_mapping
    from fusedrec_torchrec.core.safe_yaml import parse_yaml
    from fusedrec_torchrec.training.config import TrainConfig
    from fusedrec_torchrec.training.data.bad_lines import BadLines
    from fusedrec_torchrec.training.data.infer import look_at, suggest
    from fusedrec_torchrec.training.data.infer_yaml import yaml_of
    from fusedrec_torchrec.training.data.table_files import find_table_files
    from fusedrec_torchrec.training.data.table_source import TableSource

    files = find_table_files(arguments.files, arguments.format)
    bad_lines = BadLines("skip")
    facts = look_at(files, csv, bad_lines, progress=not arguments.quiet)
    suggestion = suggest(facts, arguments.label)
    path: Path = arguments.infer
    text = yaml_of(
        suggestion, facts[0].rows, arguments.files, arguments.format, csv, f"runs/{path.stem}"
    )
    config = from_mapping(TrainConfig, parse_yaml(text, str(path)), str(path))
    assert config.data.table is not None
    TableSource(files, config.data.table)  # raises if it cannot work
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    print(text, end="")
    for example in bad_lines.examples:
        print(f"  malformed: {example}")
    if bad_lines.total:
        print(
            f"{bad_lines.total} malformed lines: data.table.on_bad_line: skip would leave them out"
        )
    print(f"configuration: {path}")
