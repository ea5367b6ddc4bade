"""``fusedrec profile`` shows how the rows of the tables are accessed."""

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from fusedrec_torchrec.access.access_profile import COUNTERS
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.cli.outputs import output_file, plot_file
from fusedrec_torchrec.core.files import naming
from fusedrec_torchrec.sharding.optimizer_config import EMBEDDING_OPTIMIZERS
from fusedrec_torchrec.training.arguments import load_config
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.data.prepare_options import ON_BAD_LINE, PrepareOptions
from fusedrec_torchrec.training.data.spelling import as_flag

__all__ = ["add_command"]

FLOAT_BYTES = 4
EXAMPLES = {
    "fusedrec profile configs/tiny.yaml --samples 50000": "Shows the tables of a configuration.",
    "fusedrec profile configs/tiny.yaml --samples 50000 --save access.npz --hot-set hot.npz "
    "--hot-rows 2000": "Also picks hot rows, and keeps an access profile for the planner.",
    "fusedrec profile configs/tiny.yaml --samples 50000 --json": "Prints the figures for a "
    "program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "profile",
        purpose="Counts accesses to all rows: distinct ids in a batch, the share of accesses that "
        "the most used rows take, and the most used rows themselves.  It shows whether dedup and "
        "hot rows pay, and writes the access profiles and hot sets that planner and training take.",
        examples=EXAMPLES,
        read_on="docs/data.md, docs/hot-rows.md",
    )
    parser.add_argument(
        "data",
        nargs="+",
        help="a folder of prepared data, a training configuration (.yaml) with any data, or Criteo "
        "text files",
    )
    parser.add_argument("--batch-size", type=int, default=4096, help="(default %(default)s)")
    parser.add_argument(
        "--samples",
        type=whole(1),
        default=None,
        help="only the first so many; --share is of all of them",
    )
    parser.add_argument(
        "--top", type=whole(0), default=3, help="most used rows to show of each table"
    )
    parser.add_argument("--plot", type=plot_file, default=None, help="draws coverage curves (.png)")
    add_json(parser)
    sampled = parser.add_argument_group("access profile and hot set, for training with hot rows")
    sampled.add_argument(
        "--save", type=output_file, default=None, help="writes an access profile (.npz)"
    )
    sampled.add_argument(
        "--share", type=float, default=0.05, help="of the samples it counts (default %(default)s)"
    )
    sampled.add_argument(
        "--counters",
        type=int,
        default=COUNTERS,
        help="rows it counts at a time; bounds its memory and size (default %(default)s)",
    )
    sampled.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="profiles of other data to add to it"
    )
    sampled.add_argument(
        "--sample-only",
        action="store_true",
        help="does not look at the other samples, and needs no counter for every row",
    )
    sampled.add_argument(
        "--hot-set", type=output_file, default=None, help="writes a hot set (.npz)"
    )
    size = sampled.add_mutually_exclusive_group()
    size.add_argument("--hot-rows", type=int, default=None, help="rows of the hot set")
    size.add_argument(
        "--memory",
        type=float,
        default=256,
        help="MiB of the hot set on each rank, weights and optimizer state (default %(default)s)",
    )
    sampled.add_argument(
        "--embedding-dim", type=int, default=64, help="columns of a row (default %(default)s)"
    )
    sampled.add_argument(
        "--optimizer",
        choices=EMBEDDING_OPTIMIZERS,
        default="rowwise_adagrad",
        help="of the tables",
    )
    parser.add_argument("--on-bad-line", choices=ON_BAD_LINE, default="error", help="of text files")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Counts accesses, prints what they are like, and writes what is asked for."""
    writes = arguments.save is not None or arguments.hot_set is not None
    if not writes and (arguments.merge or arguments.sample_only):
        raise ValueError("--merge and --sample-only need --save or --hot-set, to write to")
    if arguments.sample_only and arguments.plot is not None:
        raise ValueError("--plot needs all samples, for the true curve: leave out --sample-only")
    hot_rows = _hot_rows(arguments) if writes else 0
    with tempfile.TemporaryDirectory() as scratch:
        _profile(arguments, _open(arguments, Path(scratch)), writes, hot_rows)


def _profile(arguments: argparse.Namespace, source: Source, writes: bool, hot_rows: int) -> None:
    from fusedrec_torchrec.access.access_profile import AccessProfile

    others = [AccessProfile.load(path) for path in arguments.merge]

    from fusedrec_torchrec.access.hot_set import HotSet
    from fusedrec_torchrec.access.profile import draw_coverage, profile, sample_profile
    from fusedrec_torchrec.access.recorder import merged
    from fusedrec_torchrec.cli import profile_figures as figures_of

    progress = not arguments.quiet
    sampled = None
    if writes:
        sampled = sample_profile(source, arguments.share, arguments.counters, progress)
        sampled = merged([sampled, *others]) if others else sampled
        hot_set = HotSet.most_used(sampled, hot_rows)
    result, figures = None, {}
    if sampled is None or not arguments.sample_only:
        result = profile(source, arguments.batch_size, arguments.samples, progress)
        figures = figures_of.accesses(result, arguments.top)
        if not arguments.json:
            figures_of.print_accesses(result, figures)
    if sampled is not None:
        hot = figures_of.hot_set(sampled, hot_set, _row_bytes(arguments))
        if result is not None:
            hot |= figures_of.true_hot_set(hot_set, result, source)
        figures["hot_set"] = hot
        if not arguments.json:
            figures_of.print_hot_set(hot)
    if arguments.save is not None and sampled is not None:
        sampled.save(arguments.save)
        print(f"access profile: {arguments.save}")
    if arguments.hot_set is not None:
        hot_set.save(arguments.hot_set)
        print(f"hot set: {arguments.hot_set}")
    if arguments.json:
        print_json(figures)
    if arguments.plot is not None and result is not None:
        with naming(arguments.plot):
            draw_coverage(result, arguments.plot, sampled)
        print(f"coverage curves: {arguments.plot}")


def _row_bytes(arguments: argparse.Namespace) -> int:
    """Returns the bytes of a hot row on a rank, with its optimizer state."""
    if arguments.embedding_dim < 1:
        raise ValueError(f"--embedding-dim is {arguments.embedding_dim}, must be at least 1")

    from fusedrec_torchrec.sharding.fused_params import state_bytes

    dim = int(arguments.embedding_dim)
    return FLOAT_BYTES * dim + state_bytes(arguments.optimizer, dim)


def _hot_rows(arguments: argparse.Namespace) -> int:
    if arguments.hot_rows is not None:
        if arguments.hot_rows < 1:
            raise ValueError(f"--hot-rows is {arguments.hot_rows}, must be at least 1")
        return int(arguments.hot_rows)
    rows = 0
    if math.isfinite(arguments.memory):
        rows = int(arguments.memory * 2**20) // _row_bytes(arguments)
    if rows < 1:
        raise ValueError(
            f"--memory is {arguments.memory} MiB, must be at least {_row_bytes(arguments)} bytes, "
            "one row with its optimizer state"
        )
    return rows


def _open(arguments: argparse.Namespace, scratch: Path) -> Source:
    first = Path(arguments.data[0])
    if len(arguments.data) == 1 and first.suffix in (".yaml", ".yml"):
        config = load_config(str(first), [])

        from fusedrec_torchrec.training.source import open_source

        return open_source(config, progress=not arguments.quiet)
    if len(arguments.data) == 1 and (first / MANIFEST).is_file():
        from fusedrec_torchrec.training.data.prepared import PreparedData

        return PreparedData.open(first)

    from fusedrec_torchrec.training.data.prepare import prepare

    options = PrepareOptions(on_bad_line=arguments.on_bad_line)
    data = prepare(arguments.data, scratch, options, not arguments.quiet, as_flag)
    if data.left_out:
        print("\n".join(data.left_out), file=sys.stderr)
    return data
