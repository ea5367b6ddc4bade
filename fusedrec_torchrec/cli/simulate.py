"""``fusedrec simulate`` shows how systems scale, by the cost model."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.cli.outputs import plot_file
from fusedrec_torchrec.core.files import naming
from fusedrec_torchrec.planner.config import SCALINGS
from fusedrec_torchrec.training.planner_files import read_planner_files

__all__ = ["add_command"]

RANKS = "8,16,32,64,128,256,512,1024,2048,4096"
EXAMPLES = {
    "fusedrec simulate --config configs/planner/tiny.yaml --ranks 1,2": "Scales a small model.",
    "fusedrec simulate --config configs/planner/large_dlrm.yaml --ranks 8,64,512 --batches 2 "
    "--plot scaling.png": "Draws throughput over ranks of a cluster of GPUs.",
    "fusedrec simulate --config configs/planner/large_dlrm.yaml --ranks 8,64 --scaling both "
    "--batches 1 --json": "Prints weak and strong scaling for a program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "simulate",
        purpose="Prices a training step of TorchRec's shardings, of dedup table by table, of the "
        "fused exchange, with hot rows and in groups (2D), on clusters of many sizes; with "
        "stragglers from sampled batches.  Nothing is run: figures are those of the cost model.",
        examples=EXAMPLES,
        read_on="docs/scaling.md, docs/cost_model.md",
    )
    parser.add_argument("--config", type=Path, required=True, help="configs/planner/*.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="overrides one"
    )
    parser.add_argument("--ranks", default=RANKS, help="sizes of the cluster (default %(default)s)")
    parser.add_argument(
        "--scaling",
        choices=[*SCALINGS, "both"],
        default="weak",
        help="as many samples for each rank, or as many in all (default %(default)s)",
    )
    parser.add_argument("--batches", type=int, default=8, help="to sample (default %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the sample")
    parser.add_argument("--plot", type=plot_file, default=None, help="draws throughput (.png)")
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prices all systems on all sizes, prints tables, and writes figures and plots."""
    sizes = _sizes(arguments.ranks)
    if arguments.batches < 1:
        raise ValueError(f"--batches is {arguments.batches}, must be at least 1")
    scalings = SCALINGS if arguments.scaling == "both" else (arguments.scaling,)
    files = read_planner_files(arguments.config, [*arguments.set, f"ranks={sizes[0]}"])
    per_node = files.cluster.ranks_per_node
    for size in sizes:
        if size > per_node and size % per_node:
            raise ValueError(
                f"--ranks has {size}, must be at most {per_node} or a multiple of it, the ranks of "
                f"a node of {files.cluster.name}"
            )

    from tqdm import tqdm

    from fusedrec_torchrec.planner.report.scaling_plot import draw_scaling
    from fusedrec_torchrec.planner.report.scaling_table import print_scaling
    from fusedrec_torchrec.planner.simulate import SYSTEMS, simulate
    from fusedrec_torchrec.training.planning import planning_of

    planning = planning_of(files)
    points = list(
        tqdm(
            simulate(planning, sizes, scalings, SYSTEMS, arguments.batches, arguments.seed),
            total=len(sizes) * len(scalings) * len(SYSTEMS),
            disable=arguments.quiet,
            file=sys.stderr,
            unit="point",
        )
    )
    if arguments.json:
        print_json(
            {"cluster": planning.cluster.name, "points": [asdict(point) for point in points]}
        )
    else:
        for scaling in scalings:
            print_scaling(scaling, [point for point in points if point.scaling == scaling])
    if arguments.plot is not None:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        with naming(arguments.plot):
            draw_scaling(arguments.plot, points, planning.cluster.name)
        print(f"plot: {arguments.plot}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or sizes != sorted(set(sizes)):
        raise ValueError(f"--ranks is {text!r}, must be ascending numbers such as 8,16,32")
    return sizes
