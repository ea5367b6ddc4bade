"""``fusedrec bench`` measures the fused sharding side by side with TorchRec's own."""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.plots import draw
from fusedrec_torchrec.bench.report import print_report, tables
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.bench.suite import DataName, SuiteConfig
from fusedrec_torchrec.bench.summary import summary_of
from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.core.config import from_mapping, load_yaml, with_overrides
from fusedrec_torchrec.core.files import write_text
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.data.lines import find_files
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions

__all__ = ["add_command"]

EXAMPLES = {
    "fusedrec bench --set pairs=5 --set systems=[fused_row_wise,row_wise] --output runs/small": ""
    "Measures two systems on a small generated workload, a minute.",
    "fusedrec bench benchmarks/quick.yaml --data train.txt --output runs/quick": "Measures on ids "
    "of Criteo data, five minutes.",
    "fusedrec bench benchmarks/papers.yaml --data train.txt --table data/taobao --output "
    "runs/papers": "Measures on Criteo ids and on a table of your own; links need root.",
    "fusedrec bench runs/small --json": "Prints what was measured again, for a program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "bench",
        purpose="Runs training steps of all systems in turn, with lower bounds, on real processes; "
        "writes figures (results.json), tables (report.md) and plots (.png).  Ratios are medians "
        "of neighbours in time, so that a machine that is busy for a while does not decide.",
        examples=EXAMPLES,
        read_on="docs/speed_up.md, docs/performance.md",
        settings=SuiteConfig,
    )
    parser.add_argument(
        "suite",
        nargs="?",
        type=Path,
        help="what to measure (.yaml, see benchmarks/), or a folder of results to show again; "
        "a small generated workload if left out",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=None,
        help="for workloads on Criteo data: text files, or a folder of prepared data",
    )
    parser.add_argument(
        "--table",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="for workloads on columns of your own (data: table): a folder of prepared data, as "
        "`fusedrec prepare --config configs/taobao.yaml` makes it",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench"), help="(default %(default)s)"
    )
    parser.add_argument("--only", default=None, help="workloads whose name contains this")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a setting of the suite, such as pairs=5 or workloads.0.batch_size=512",
    )
    parser.add_argument(
        "--validate-planner",
        action="store_true",
        help="calibrates each cluster of the suite first, and compares what the planner predicts "
        "with what is measured (benchmarks/validate.yaml)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, or shows what was measured before; writes tables and plots."""
    # Whoever is told to stop takes down the networks it has made.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = arguments.output
    if arguments.validate_planner:
        return _validate(arguments)
    if arguments.suite is not None and arguments.suite.is_dir():
        folder = arguments.suite
        document = load_results(folder / RESULTS)
    else:
        suite = _suite(arguments)
        suite.chosen(arguments.only)
        _check_data(arguments)

        from fusedrec_torchrec.bench.run import run_suite

        _check_device(suite)

        with tempfile.TemporaryDirectory() as scratch:
            prepared: dict[DataName, str] = {}
            criteo = _prepared(arguments, Path(scratch))
            if criteo is not None:
                prepared["criteo"] = criteo
            if arguments.table is not None:
                prepared["table"] = str(arguments.table)
            document = run_suite(
                suite, prepared, folder, arguments.only, progress=not arguments.quiet
            )
    workloads = [WorkloadFigures(result) for result in document["results"]]
    if arguments.json:
        print_json(summary_of(document, workloads))
    else:
        print_report(document, workloads)
    if workloads:
        write_text(folder / "report.md", _markdown(document, workloads))
        files = draw(workloads, folder)
        print(f"figures: {folder / RESULTS}, tables: {folder / 'report.md'}")
        print(f"plots: {', '.join(str(file) for file in files)}")
    failed: dict[str, str] = document.get("failed", {})
    for name, text in failed.items():
        print(f"fusedrec bench: {name} failed: {text}", file=sys.stderr)
    return 1 if failed else 0


def _suite(arguments: argparse.Namespace) -> SuiteConfig:
    data = {} if arguments.suite is None else load_yaml(arguments.suite)
    source = "suite" if arguments.suite is None else str(arguments.suite)
    return from_mapping(SuiteConfig, with_overrides(data, arguments.set), source)


def _check_device(suite: SuiteConfig) -> None:
    """Refuses CUDA where there is no GPU."""
    import torch

    if suite.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device")


def _validate(arguments: argparse.Namespace) -> int:
    suite = None
    if arguments.suite is None or not arguments.suite.is_dir():
        suite = _suite(arguments)
        if suite.device != "cpu":
            raise ValueError(f"device is {suite.device}, must be cpu with --validate-planner")
        suite.chosen(arguments.only)
    _check_data(arguments)

    from fusedrec_torchrec.bench.validate import compare_again, print_validation, validate, verdict

    with tempfile.TemporaryDirectory() as scratch:
        prepared = _prepared(arguments, Path(scratch))
        if suite is None:
            comparisons = compare_again(arguments.suite, prepared)
        else:
            comparisons = validate(
                suite, prepared, arguments.output, arguments.only, progress=not arguments.quiet
            )
    if not comparisons:
        print("fusedrec bench: nothing could be measured here", file=sys.stderr)
        return 1
    if arguments.json:
        told = [asdict(comparison) for comparison in comparisons]
        print_json({"comparisons": told, "verdict": verdict(comparisons)})
    else:
        print_validation(comparisons)
    return 0


def _check_data(arguments: argparse.Namespace) -> None:
    """Refuses data that is not there."""
    if arguments.data is not None and not _is_prepared(arguments.data):
        find_files(arguments.data)
    if arguments.table is not None and not _is_prepared([str(arguments.table)]):
        raise ValueError(
            f"--table is {arguments.table}, must be a folder of prepared data "
            f"(it has no {MANIFEST}): see `fusedrec prepare --config`"
        )


def _is_prepared(data: list[str]) -> bool:
    return len(data) == 1 and (Path(data[0]) / MANIFEST).is_file()


def _prepared(arguments: argparse.Namespace, scratch: Path) -> str | None:
    if arguments.data is None:
        return None
    if _is_prepared(arguments.data):
        return str(arguments.data[0])

    from fusedrec_torchrec.training.data.prepare import prepare

    options = PrepareOptions(on_bad_line="skip")
    data = prepare(arguments.data, scratch / "prepared", options, progress=not arguments.quiet)
    if data.left_out:
        print("\n".join(data.left_out), file=sys.stderr)
    return str(scratch / "prepared")


def _markdown(document: dict[str, Any], workloads: list[WorkloadFigures]) -> str:
    texts = [f"### {table.title}\n\n{table.markdown()}\n" for table in tables(workloads)]
    machine = json.dumps(document["machine"], indent=1)
    return "\n".join([*texts, f"### machine\n\n```json\n{machine}\n```\n"])
