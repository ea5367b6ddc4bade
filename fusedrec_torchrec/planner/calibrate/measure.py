"""Measures a cluster for the cost model: collectives first, then whole steps.

All-to-alls and all-reduces of several sizes; then training steps of fused and stock tables, of
shapes that differ in what they stress.  Their time is divided among latency and bytes of links,
ids, rows, pooling and overhead by least squares, none of which may be negative.  So a rate is what
the stage takes in a step, not in a loop of its own.  Of fused tables groups of stages are timed,
too.

Runs on all ranks of a cluster: ``fusedrec calibrate`` on one machine, ``torchrun -m
fusedrec_torchrec.planner.calibrate.measure`` on several.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from fusedrec_torchrec.access.bag_counts import CountedBags
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.access.synthetic import BagKind, SyntheticData, SyntheticTable
from fusedrec_torchrec.core.config import from_mapping, load_yaml, to_yaml
from fusedrec_torchrec.core.device import DEVICES
from fusedrec_torchrec.core.files import write_json, write_text
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.planner.calibrate.fit import Timed, fit, fit_link
from fusedrec_torchrec.planner.calibrate.fresh_processes import FreshProcesses
from fusedrec_torchrec.planner.calibrate.stage_times import seconds_of_groups
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig, LinkConfig
from fusedrec_torchrec.planner.cost.step import HotUse, Step, fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.owners import FUSED_MIXED, owners_in_turn
from fusedrec_torchrec.sharding.plan_entries import fused_by_owners
from fusedrec_torchrec.sharding.sharders import FusedEmbeddingBagCollectionSharder
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
)

__all__ = ["Measured", "Shape", "calibrate", "figures_of", "main", "report"]

COLLECTIVE_SIZES = [1 << n for n in range(12, 25, 2)]  # bytes of a rank
REPEATS, IN_A_ROW = 7, 4
LONGEST = 3.0  # seconds for one figure, on slow links
BATCHES = 8  # that differ
COUNTERS = 1 << 21
SYSTEMS = (FUSED, "table_wise", "row_wise", "column_wise")


@dataclass(frozen=True)
class Shape:
    """Is a workload that stresses something."""

    tables: int = 26
    rows: int = 20_000
    dim: int = 64
    batch: int = 1024
    pooling: float = 1.0
    zipf: float = 1.1
    hot: int = 0
    bags: BagKind = "fresh"

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [f"t{i}" for i in range(self.tables)]

    @property
    def outputs(self) -> int:
        """How many numbers a batch's output has."""
        return self.batch * self.tables * self.dim


LINK_SHAPES = (
    Shape(batch=256),
    Shape(batch=1024, dim=128),
    Shape(pooling=5.0, batch=512, rows=5000),
)
HOT_SHAPES = (
    Shape(batch=512, hot=5000),
    Shape(batch=2048, hot=20_000),
    Shape(batch=512, pooling=5.0, hot=20_000),
)
OWNED_SHAPES = (  # of fused tables that their owners pool
    (FUSED_TABLE_WISE, Shape(pooling=3.0, batch=2048)),
    (FUSED_TABLE_WISE, Shape(pooling=10.0, batch=512)),
    (FUSED_TABLE_WISE, Shape(pooling=30.0, batch=512, dim=16)),
    (FUSED_COLUMN_WISE, Shape(pooling=10.0, batch=512)),
    (FUSED_TABLE_WISE, Shape(batch=2048)),  # bags of one id
    (FUSED_COLUMN_WISE, Shape(batch=1024)),
    # Of bags that repeat, requesters read more ids than owners.
    (FUSED_TABLE_WISE, Shape(pooling=30.0, batch=1024, bags="repeated")),
    (FUSED_TABLE_WISE, Shape(pooling=8.0, batch=2048, dim=32, bags="repeated")),
    (FUSED_COLUMN_WISE, Shape(pooling=30.0, batch=512, dim=32, bags="repeated")),
    (FUSED_MIXED, Shape(batch=16)),  # little else than the start of a step and its buckets
    (FUSED_MIXED, Shape(batch=64)),
    (FUSED_MIXED, Shape(batch=64, dim=16)),
    (FUSED_MIXED, Shape(pooling=10.0, batch=512)),
)
SHAPES = (
    Shape(batch=64),
    Shape(batch=512),
    Shape(batch=4096),
    Shape(dim=16, batch=4096),
    Shape(dim=256),
    Shape(zipf=0.6, batch=2048),
    Shape(zipf=1.3, batch=2048),
    Shape(pooling=10.0, batch=512),
    Shape(tables=100, batch=512, rows=5000),
    Shape(tables=4, batch=4096),
    # Of long bags, those of few columns tell what an id costs, and those of many what a row.
    Shape(pooling=30.0, batch=512, dim=16),
    Shape(pooling=30.0, batch=256, dim=128),
)


@dataclass(frozen=True)
class Measured(Timed):
    """Is a measured step of a shape, with tables sharded in some way."""

    shape: Shape
    sharding: str


# ---------------------------------------------------------------- what is measured


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Returns how long a call takes on the slowest rank, the median of several rows of calls."""
    times = []
    repeat, repeats = 0, REPEATS
    while repeat <= repeats:
        function()  # caches are those of whatever ran last
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(IN_A_ROW):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begun) / IN_A_ROW)
        if not repeat:  # which was to warm up, and to see how long it takes
            first = _slowest(times.pop(), device)
            repeats = min(max(round(LONGEST / (first * (IN_A_ROW + 1))), 2), REPEATS)
        repeat += 1
    return _slowest(float(np.median(times)), device)


def _slowest(seconds: float, device: torch.device) -> float:
    """Returns the longest time of all ranks, which all must call this."""
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, list[float]]:
    """Returns the seconds of all-to-alls and all-reduces of ``COLLECTIVE_SIZES``."""
    seconds: dict[str, list[float]] = {"all_to_all": [], "all_reduce": []}
    for size in COLLECTIVE_SIZES:
        count = size // 4 // group.size() * group.size()
        sent = torch.zeros(max(count, group.size()), device=device)
        received = torch.empty_like(sent)

        def exchange(received: torch.Tensor = received, sent: torch.Tensor = sent) -> None:
            dist.all_to_all_single(received, sent, group=group)

        def add_up(sent: torch.Tensor = sent) -> None:
            dist.all_reduce(sent, group=group)

        seconds["all_to_all"].append(seconds_of(exchange, device))
        seconds["all_reduce"].append(seconds_of(add_up, device))
    return seconds


def source_of(shape: Shape, ranks: int) -> tuple[SyntheticData, HotSet | None]:
    """Returns data of a shape, and its hot rows."""
    source = SyntheticData(
        [
            SyntheticTable(
                name=name,
                rows=shape.rows,
                zipf=shape.zipf,
                pooling=shape.pooling,
                bags=shape.bags,
            )
            for name in shape.names
        ],
        dense_features=1,
        samples=BATCHES * ranks * shape.batch,
    )
    if not shape.hot:
        return source, None
    profile = sample_profile(source, 1.0, COUNTERS, progress=False)
    return source, HotSet.most_used(profile, shape.hot)


def seconds_of_step(
    system: str, shape: Shape, device: torch.device, stages: bool
) -> tuple[float, dict[str, float]]:
    """Returns how long a training step takes, and groups of its stages; all ranks must call it.

    Args:
        system: how tables are sharded.
        shape: of the workload.
        device: of this rank.
        stages: whether stages are timed, too.  They are those of fused tables without hot rows,
            whose sync runs beside them.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    source, hot_set = source_of(shape, ranks)
    model = _model(system, shape, device, hot_set)
    batches = []
    for number in range(BATCHES):
        start = (number * ranks + rank) * shape.batch
        samples = source.read(start, start + shape.batch)
        lengths = (
            np.ones(shape.tables * shape.batch, np.int32)
            if samples.lengths is None
            else samples.lengths.ravel()
        )
        batches.append(
            (torch.from_numpy(samples.ids).to(device), torch.from_numpy(lengths).to(device))
        )
    gradient = torch.full((shape.batch, shape.tables * shape.dim), 1e-6, device=device)
    turn = cycle(batches)

    def step() -> None:
        values, lengths = next(turn)  # nothing computed from it yet, as of a data loader
        batch = KeyedJaggedTensor(
            keys=shape.names, values=values, lengths=lengths, stride=shape.batch
        )
        model(batch).values().backward(gradient)

    seconds = seconds_of(step, device)
    if not stages or system not in (*FUSED_TYPES, FUSED_MIXED) or hot_set is not None:
        return seconds, {}
    return seconds, seconds_of_groups(step, device)


def predicted(system: str, shape: Shape, ranks: int) -> Step:
    """Returns the same step as the cost model sees it."""
    classes = RowClasses.zipf(shape.rows, shape.zipf)
    by_chance = BagsByChance(classes, shape.pooling, scattered=True)
    bag_use: Mapping[str, BagsByChance | CountedBags] = dict.fromkeys(shape.names, by_chance)
    source, hot_set = source_of(shape, ranks)
    if shape.bags == "repeated":  # which no law of rows knows
        bag_use = sample_profile(source, 1.0, COUNTERS, progress=False).bags
    loads = [
        TableLoad(name, shape.rows, shape.dim, shape.pooling, classes, bag_use=bag_use[name])
        for name in shape.names
    ]
    if system not in (*FUSED_TYPES, FUSED_MIXED):
        return stock_step(system, loads, shape.batch, ranks)
    hot = None
    if hot_set is not None:
        hot = HotUse(np.array([len(hot_set.ids[name]) for name in shape.names]))
    owners = [owners_in_turn(system, i, shape.dim, ranks) for i in range(shape.tables)]
    return fused_step(loads, shape.batch, ranks, hot=hot, owners=owners)


def _model(
    system: str, shape: Shape, device: torch.device, hot_set: HotSet | None
) -> DistributedModelParallel:
    ranks, names = dist.get_world_size(), shape.names
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=shape.rows, embedding_dim=shape.dim, feature_names=[name]
            )
            for name in names
        ],
        device=torch.device("meta"),
    )
    sharder: Any = FusedEmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 1e-3}
    )
    stock: dict[str, Callable[[int], ParameterShardingGenerator]] = {
        "table_wise": lambda i: table_wise(rank=i % ranks, compute_kernel="fused"),
        "row_wise": lambda _: row_wise(compute_kernel="fused"),
        "column_wise": lambda _: column_wise(ranks=list(range(ranks)), compute_kernel="fused"),
    }

    def generator(i: int) -> ParameterShardingGenerator:
        if system in stock:
            return stock[system](i)
        hot_rows = None if hot_set is None else hot_set.ids[names[i]].tolist()
        return fused_by_owners(owners_in_turn(system, i, shape.dim, ranks), hot_rows=hot_rows)

    plan = construct_module_sharding_plan(
        module,
        {name: generator(i) for i, name in enumerate(names)},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        world_size=ranks,
        device_type=device.type,
    )
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def both_links(device: torch.device, local: int) -> list[dict[str, list[float]]]:
    """Returns the seconds of collectives among all ranks, and among those of a node."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    everyone = collectives(group, device)
    if local == ranks:
        return [everyone, everyone]
    nodes = [dist.new_group(list(range(n, n + local))) for n in range(0, ranks, local)]
    return [everyone, collectives(nodes[dist.get_rank() // local], device)]


def calibrate(
    name: str,
    device: torch.device,
    ranks: int,
    run: Callable[[Callable[[], Any]], Any],
    progress: bool = True,
    rates: ClusterConfig | None = None,
) -> tuple[ClusterConfig, list[Measured]]:
    """Measures the cluster of all ranks and returns it; they all get the same answer.

    Args:
        name: of the cluster.
        device: of this rank.
        ranks: of the cluster.
        run: runs a function in a process group of all ranks.
        progress: whether to show a bar.
        rates: a cluster of the same machines; only links are measured then.
    """
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    everyone, within = run(lambda: both_links(device, local))
    cluster = ClusterConfig(
        name=name,
        device="cuda" if device.type == "cuda" else "cpu",
        ranks=ranks,
        ranks_per_node=local,
        memory=run(lambda: _memory(device, local)),
        within_node=_link(within, local),
        between_nodes=_link(everyone, ranks),
    )
    shapes = SHAPES if rates is None else LINK_SHAPES
    todo = [(system, shape) for shape in shapes for system in SYSTEMS]
    todo += [(FUSED, shape) for shape in HOT_SHAPES]
    todo += OWNED_SHAPES if rates is None else ()
    measured = []
    for system, shape in tqdm(todo, desc="steps", disable=not progress):
        seconds, of_stages = run(
            partial(seconds_of_step, system, shape, device, stages=rates is None)
        )
        step = predicted(system, shape, ranks)
        measured.append(Measured(step, seconds, shape, system, of_stages=of_stages))
    away = (ranks - local if local < ranks else ranks - 1) / ranks
    far = [size * away for size in COLLECTIVE_SIZES]
    curve = list(zip(far, everyone["all_to_all"], strict=True))
    return fit(cluster, curve, measured, rates), measured


def _link(seconds: dict[str, list[float]], ranks: int) -> LinkConfig:
    if ranks < 2:
        return LinkConfig()
    away = (ranks - 1) / ranks
    sent = [size * away for size in COLLECTIVE_SIZES]
    latency, all_to_all = fit_link(sent, seconds["all_to_all"])
    _, all_reduce = fit_link([2 * size for size in sent], seconds["all_reduce"])
    return LinkConfig(all_to_all=all_to_all, all_reduce=all_reduce, latency=latency)


def _memory(device: torch.device, local: int) -> float:
    """Returns the GB for a rank's tables."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory) / GB
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size / local / GB


# ---------------------------------------------------------------- the command


def figures_of(cluster: ClusterConfig, measured: Sequence[Measured]) -> dict[str, Any]:
    """Returns what was measured, and how well the cluster explains it."""
    steps: list[dict[str, Any]] = []
    for timed in measured:
        predicted = timed.step.seconds(cluster)
        shape = timed.shape
        steps.append(
            {
                "sharding": timed.sharding,
                "shape": f"{shape.tables} x {shape.rows} x {shape.dim}, batch {shape.batch}, "
                f"pooling {shape.pooling:g}, zipf {shape.zipf}"
                + (f", {shape.hot} hot" * bool(shape.hot))
                + (", repeated bags" * (shape.bags == "repeated")),
                "measured_ms": 1e3 * timed.seconds,
                "predicted_ms": 1e3 * predicted,
                "off_by": predicted / timed.seconds - 1,
            }
        )
    errors = [abs(step["off_by"]) for step in steps]
    return {
        "steps": steps,
        "median_error": float(np.median(errors)),
        "largest_error": max(errors),
    }


def report(cluster: ClusterConfig, measured: Sequence[Measured]) -> None:
    """Prints what was measured, and how well the cluster explains it."""
    figures = figures_of(cluster, measured)
    print_table(
        f"steps of {cluster.name}, milliseconds",
        ("sharding", "shape", "measured", "predicted", "off by"),
        [
            (
                step["sharding"],
                step["shape"],
                f"{step['measured_ms']:.2f}",
                f"{step['predicted_ms']:.2f}",
                f"{step['off_by']:+.0%}",
            )
            for step in figures["steps"]
        ],
    )
    print(f"median error {figures['median_error']:.0%}, largest {figures['largest_error']:.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cluster as one of its ranks; the first one writes the result."""
    parser = argparse.ArgumentParser(prog="fusedrec calibrate")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", default="measured")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--rates-of", type=Path, help="cluster file of the same machines")
    parser.add_argument("--store", help="file for the ranks to meet, in place of the environment")
    parser.add_argument("--figures", type=Path, help="file for the figures, instead of tables")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    on_cuda = given.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    rates = None
    if given.rates_of is not None:
        rates = from_mapping(ClusterConfig, load_yaml(given.rates_of), str(given.rates_of))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = FreshProcesses(rank, ranks, "nccl" if on_cuda else "gloo", given.store)
    progress = rank == 0 and not given.quiet
    cluster, measured = calibrate(given.name, device, ranks, run, progress, rates)
    if rank == 0:
        write_text(given.output, to_yaml(cluster))
        if given.figures is not None:
            write_json(given.figures, figures_of(cluster, measured))
            return
        report(cluster, measured)
        print(f"cluster: {given.output}")


if __name__ == "__main__":
    main()
