"""``fusedrec doctor`` examines an installation on its device, and writes a report to send."""

import argparse
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.cli.outputs import output_file
from fusedrec_torchrec.core.device import DEVICES

__all__ = ["add_command"]

EXAMPLES = {
    "fusedrec doctor": "Examines an installation on CPU, half a minute.",
    "fusedrec doctor --runs runs --output report.md": "Also tries the file system that runs go to, "
    "and writes the report elsewhere.",
    "fusedrec doctor --json": "Prints all findings for a program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "doctor",
        purpose="Looks at versions, compiler, operators, kernels, backends, GPUs and NCCL, and at "
        "shared memory, file handles and the locks of the file system that runs go to; trains "
        "small models on the device against the unsharded module, one rank for each GPU with NCCL, "
        "or two on CPU with gloo, and times a few steps.  It ends with a page to paste into an "
        "issue.  What is skipped is listed with the reason.  Exit code 1 if anything failed.",
        examples=EXAMPLES,
        read_on="docs/install.md, docs/gpu.md",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default %(default)s)")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        help="folder that runs go to, whose file system is tried (default %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=output_file,
        default=Path("runs/doctor.md"),
        help="the one file to send, text and JSON (default %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=whole(1),
        default=600,
        help="seconds that ranks have for their training (default %(default)s)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examines, prints and writes the report."""
    from fusedrec_torchrec.doctor.examination import examine

    findings = examine(arguments.device, arguments.timeout, arguments.runs)
    findings.write(arguments.output)
    if arguments.json:
        print_json(findings.document())
    else:
        print(findings.text())
    print(f"report: {arguments.output}")
    return 1 if findings.has_failed else 0
