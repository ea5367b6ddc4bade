"""``fusedrec doctor`` examines an installation on its device, and writes a report to send."""

import argparse
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.cli.outputs import output_file
from fusedrec_torchrec.core.device import DEVICES

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = commands.add_parser(
        "doctor",
        help="examine this installation and its GPUs, and write a report to send",
        description="Looks at versions, operators, kernels and GPUs, and trains small models on "
        "the device against the unsharded module: one rank for each GPU with NCCL, or two on CPU "
        "with gloo.  What is skipped is listed with the reason.  Exit code 1 if anything failed.",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default %(default)s)")
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examines, prints and writes the report."""
    from fusedrec_torchrec.doctor.examination import examine

    findings = examine(arguments.device, arguments.timeout)
    findings.write(arguments.output)
    print(findings.text())
    print(f"report: {arguments.output}")
    return 1 if findings.has_failed else 0
