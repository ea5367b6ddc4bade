"""``fusedrec calibrate`` measures a cluster for the planner."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.outputs import output_file
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.core.device import DEVICES
from fusedrec_torchrec.core.json_file import read_json
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.training.config import LaunchConfig

__all__ = ["add_command"]

FIGURES = "figures.json"
EXAMPLES = {
    "fusedrec calibrate --ranks 2 --output cluster.yaml": "Measures links and rates of two ranks, "
    "some minutes.",
    "fusedrec calibrate --rates-of cluster.yaml --output links.yaml": "Measures the links of the "
    "same machines anew.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "calibrate",
        purpose="Measures collectives and training steps on the ranks of this machine, and writes "
        "a cluster file for the planner.  On several machines: torchrun ... -m "
        "fusedrec_torchrec.planner.calibrate.measure --output cluster.yaml",
        examples=EXAMPLES,
        read_on="docs/planner.md, docs/cost_model.md",
    )
    parser.add_argument("--ranks", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default %(default)s)")
    parser.add_argument("--name", default="measured", help="of the cluster")
    parser.add_argument(
        "--output", type=output_file, default=Path("cluster.yaml"), help="(default %(default)s)"
    )
    parser.add_argument(
        "--rates-of",
        type=Path,
        default=None,
        metavar="CLUSTER",
        help="cluster file of the same machines: takes its rates, and measures links only",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks that measure, and waits for them."""
    if arguments.ranks < 2:
        raise ValueError(f"--ranks is {arguments.ranks}, must be at least 2: links are measured")
    command = ["--output", str(arguments.output), "--name", arguments.name]
    command += ["--device", arguments.device, *(["--quiet"] if arguments.quiet else [])]
    if arguments.rates_of is not None:
        from_mapping(ClusterConfig, load_yaml(arguments.rates_of), str(arguments.rates_of))
        command += ["--rates-of", str(arguments.rates_of)]

    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from fusedrec_torchrec.training.launch import launch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no CUDA device")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.json:
            command += ["--figures", str(Path(scratch) / FIGURES)]
        try:
            launch(
                LaunchConfig(ranks=arguments.ranks),
                command,
                "fusedrec_torchrec.planner.calibrate.measure",
            )
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(f"fusedrec calibrate: rank {rank} failed: {failure.message}", file=sys.stderr)
            return 1
        if arguments.json:
            print_json(
                {
                    "output": arguments.output,
                    "cluster": load_yaml(arguments.output),
                    **read_json(Path(scratch), FIGURES),
                }
            )
    return 0
