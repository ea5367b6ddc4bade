"""Measures a cluster for the cost model: collectives first, then whole steps.

Links: all-to-alls and all-reduces of several sizes, a latency and a bandwidth through them.  Rates:
real training steps of fused and stock tables, of shapes that differ in what they stress; what the
links do not account for is divided among ids, rows, pooling and overhead by least squares, none of
which may be negative.  So a rate is what the stage takes in a step, not in a loop of its own.

Runs on all ranks of a cluster: ``fusedrec calibrate`` on one machine, ``torchrun -m
fusedrec_torchrec.planner.calibrate`` on several.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
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

from fusedrec_torchrec.config import to_yaml
from fusedrec_torchrec.data.hot_set import HotSet
from fusedrec_torchrec.data.profile import sample_profile
from fusedrec_torchrec.data.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.planner.access import RowClasses
from fusedrec_torchrec.planner.cluster import GB, ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost import HotUse, Step, fused_step, stock_step
from fusedrec_torchrec.planner.table_load import TableLoad
from fusedrec_torchrec.sharders import FusedEmbeddingBagCollectionSharder
from fusedrec_torchrec.sharding_plan import fused_row_wise
from fusedrec_torchrec.sharding_type import FUSED
from fusedrec_torchrec.terminal import print_table

__all__ = ["Measured", "calibrate", "fit_link", "fit_rates", "main"]

COLLECTIVE_SIZES = [1 << n for n in range(12, 25, 2)]  # bytes of a rank
REPEATS, IN_A_ROW = 7, 4
LONGEST = 3.0  # seconds for one figure, on slow links
BATCHES = 8  # that differ
COUNTERS = 1 << 21
SYSTEMS = (FUSED, "table_wise", "row_wise", "column_wise")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """A workload that stresses something."""

    tables: int = 26
    rows: int = 20_000
    dim: int = 64
    batch: int = 1024
    pooling: float = 1.0
    zipf: float = 1.1
    hot: int = 0


HOT_SHAPES = (
    Shape(batch=512, hot=5000),
    Shape(batch=2048, hot=20_000),
    Shape(batch=512, pooling=5.0, hot=20_000),
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
)


@dataclass(frozen=True)
class Measured:
    """A step as the cost model sees it, and how long it took."""

    shape: Shape
    step: Step
    seconds: float


# ---------------------------------------------------------------- what is measured


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Of a call, several in a row; the median of some such rows, and the slowest rank's."""
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
    """Of all ranks."""
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, list[float]]:
    """Seconds of all-to-alls and all-reduces of ``COLLECTIVE_SIZES``."""
    found: dict[str, list[float]] = {"all_to_all": [], "all_reduce": []}
    for size in COLLECTIVE_SIZES:
        count = size // 4 // group.size() * group.size()
        sent = torch.zeros(max(count, group.size()), device=device)
        received = torch.empty_like(sent)

        def exchange(received: torch.Tensor = received, sent: torch.Tensor = sent) -> None:
            dist.all_to_all_single(received, sent, group=group)

        def add_up(sent: torch.Tensor = sent) -> None:
            dist.all_reduce(sent, group=group)

        found["all_to_all"].append(seconds_of(exchange, device))
        found["all_reduce"].append(seconds_of(add_up, device))
    return found


def measure_step(system: str, shape: Shape, device: torch.device) -> Measured:
    """A training step of a system."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    names = [f"t{i}" for i in range(shape.tables)]
    source = SyntheticData(
        [
            SyntheticTable(name=name, rows=shape.rows, zipf=shape.zipf, pooling=shape.pooling)
            for name in names
        ],
        dense_features=1,
        samples=BATCHES * ranks * shape.batch,
    )
    hot_set = None
    if shape.hot:
        profile = sample_profile(source, 1.0, COUNTERS, progress=False)
        hot_set = HotSet.most_used(profile, shape.hot)
    model = _model(system, shape, names, device, hot_set)
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
        batch = KeyedJaggedTensor(keys=names, values=values, lengths=lengths, stride=shape.batch)
        model(batch).values().backward(gradient)

    seconds = seconds_of(step, device)
    classes = RowClasses.zipf(shape.rows, shape.zipf)
    loads = [TableLoad(n, shape.rows, shape.dim, shape.pooling, classes) for n in names]
    hot = None
    if hot_set is not None:
        hot = HotUse(np.array([len(hot_set.ids[name]) for name in names]))
    predicted = (
        fused_step(loads, shape.batch, ranks, hot=hot)
        if system == FUSED
        else stock_step(system, loads, shape.batch, ranks)
    )
    return Measured(shape, predicted, seconds)


def _model(
    system: str,
    shape: Shape,
    names: list[str],
    device: torch.device,
    hot_set: HotSet | None,
) -> DistributedModelParallel:
    ranks = dist.get_world_size()
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
    generators: dict[str, Callable[[int], Any]] = {
        FUSED: lambda i: fused_row_wise(
            hot_rows=None if hot_set is None else hot_set.ids[names[i]].tolist()
        ),
        "table_wise": lambda i: table_wise(rank=i % ranks, compute_kernel="fused"),
        "row_wise": lambda _: row_wise(compute_kernel="fused"),
        "column_wise": lambda _: column_wise(ranks=list(range(ranks)), compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        module,
        {name: generators[system](i) for i, name in enumerate(names)},
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


# ---------------------------------------------------------------- what follows from it


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in microseconds and bandwidth in GB/s of a line through the measurements.

    Relative errors count, so that small messages do, too.
    """
    size, time_ = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    latency, per_byte = non_negative(np.stack([np.ones_like(size), size], 1), time_)
    return float(latency) * 1e6, 1 / max(float(per_byte), 1e-15) / GB


def fit_rates(cluster: ClusterConfig, measured: Sequence[Measured]) -> RatesConfig:
    """Rates of one kind of tables, with the links as they are."""
    unit = RatesConfig(step=0.0, table=0.0, ids=1.0, lookup=1.0, pooling=1.0)
    columns, rest = [], []
    for each in measured:
        wire = sum(p.seconds(cluster, unit) for p in each.step.parts if p.is_collective)
        work = {"ids": 0.0, "lookup": 0.0, "pooling": 0.0}
        for part in each.step.parts:
            if not part.is_collective:
                work[part.kind] += part.seconds(cluster, unit)
        columns.append([1e-6, each.step.tables * 1e-6, *work.values()])
        rest.append(max(each.seconds - wire, 0.02 * each.seconds))
    weights = 1 / np.array([each.seconds for each in measured])
    step, table, *seconds = non_negative(np.array(columns), np.array(rest), weights)
    rates = [1 / max(float(s), 1e-6) for s in seconds]
    return RatesConfig(
        step=float(step), table=float(table), ids=rates[0], lookup=rates[1], pooling=rates[2]
    )


def fit_hot(cluster: ClusterConfig, measured: Sequence[Measured]) -> float:
    """Million ids a second that are looked up among hot rows, with all else as it is."""
    beyond, ids = [], []
    for each in measured:
        part = next(part for part in each.step.parts if part.name == "hot_lookup")
        known = each.step.seconds(cluster) - part.seconds(cluster, cluster.fused)
        beyond.append(max(each.seconds - known, 1e-9))
        ids.append(float(part.amount_W.max()) / 1e6)
    return float(np.median(np.array(ids) / np.array(beyond)))


def non_negative(matrix: Floats, wanted: Floats, weights: Floats | None = None) -> Floats:
    """Least squares without negative solutions: the best of all choices of what is not zero.

    Relative to what is wanted, unless there are other weights.  For a handful of columns.
    """
    weights = 1 / wanted if weights is None else weights
    scale = np.maximum(np.abs(matrix).max(0), 1e-300)
    a, b = matrix / scale * weights[:, None], wanted * weights
    best, least = np.zeros(matrix.shape[1]), float(b @ b)
    for size in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), size):
            part = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            error = float(((a[:, chosen] @ part - b) ** 2).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[list(chosen)] = part
    return best / scale


def calibrate(
    name: str, device: torch.device, progress: bool = True
) -> tuple[ClusterConfig, list[Measured]]:
    """Measures the cluster of all ranks; they all get the same answer."""
    ranks = dist.get_world_size()
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks)
    group = dist.group.WORLD
    assert group is not None
    everyone = collectives(group, device)
    within = everyone
    if local < ranks:
        nodes = [dist.new_group(list(range(n, n + local))) for n in range(0, ranks, local)]
        within = collectives(nodes[dist.get_rank() // local], device)
    cluster = ClusterConfig(
        name=name,
        device="cuda" if device.type == "cuda" else "cpu",
        ranks=ranks,
        ranks_per_node=local,
        memory=_memory(device, local),
        within_node=_link(within, local),
        between_nodes=_link(everyone, ranks),
    )
    measured = []
    todo = [(system, shape) for shape in SHAPES for system in SYSTEMS]
    todo += [(FUSED, shape) for shape in HOT_SHAPES]
    for system, shape in tqdm(todo, desc="steps", disable=not progress or dist.get_rank() != 0):
        measured.append(measure_step(system, shape, device))
    cold = [each for each in measured if not each.shape.hot]
    stock = fit_rates(cluster, [each for each in cold if each.step.system != FUSED])
    rates: dict[str, Any] = {
        "fused" if system == FUSED else system: fit_rates(
            cluster, [each for each in cold if each.step.system == system]
        )
        for system in SYSTEMS
    }
    cluster = replace(cluster, stock=stock, **rates)
    hot = fit_hot(cluster, [each for each in measured if each.shape.hot])
    return replace(cluster, fused=replace(cluster.fused, hot=min(hot, 1e6))), measured


def _link(seconds: dict[str, list[float]], ranks: int) -> LinkConfig:
    if ranks < 2:
        return LinkConfig()
    away = (ranks - 1) / ranks
    sent = [size * away for size in COLLECTIVE_SIZES]
    latency, all_to_all = fit_link(sent, seconds["all_to_all"])
    _, all_reduce = fit_link([2 * size for size in sent], seconds["all_reduce"])
    return LinkConfig(all_to_all=all_to_all, all_reduce=all_reduce, latency=latency)


def _memory(device: torch.device, local: int) -> float:
    """GB for a rank's tables."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory) / GB
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size / local / GB


# ---------------------------------------------------------------- the command


def report(cluster: ClusterConfig, measured: Sequence[Measured]) -> None:
    """Prints what was found, and how well it explains what was measured."""
    rows = []
    for each in measured:
        predicted = each.step.seconds(cluster)
        shape = each.shape
        rows.append(
            (
                each.step.system,
                f"{shape.tables} x {shape.rows} x {shape.dim}, batch {shape.batch}, pooling "
                f"{shape.pooling:g}, zipf {shape.zipf}" + (f", {shape.hot} hot" * bool(shape.hot)),
                f"{1e3 * each.seconds:.2f}",
                f"{1e3 * predicted:.2f}",
                f"{predicted / each.seconds - 1:+.0%}",
            )
        )
    print_table(
        f"steps of {cluster.name}, milliseconds",
        ("system", "shape", "measured", "predicted", "off by"),
        rows,
    )
    errors = [abs(m.step.seconds(cluster) / m.seconds - 1) for m in measured]
    print(f"median error {np.median(errors):.0%}, largest {max(errors):.0%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """On one rank of the cluster."""
    parser = argparse.ArgumentParser(prog="fusedrec calibrate")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", default="measured")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--store", help="file for the ranks to meet, in place of the environment")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if given.device == "cuda" else "gloo",
        init_method=None if given.store is None else f"file://{given.store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    cluster, measured = calibrate(given.name, device, not given.quiet)
    if dist.get_rank() == 0:
        given.output.write_text(to_yaml(cluster))
        report(cluster, measured)
        print(f"cluster: {given.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
