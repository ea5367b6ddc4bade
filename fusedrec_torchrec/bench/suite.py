"""What a benchmark run measures: the tree behind ``benchmarks/*.yaml`` and ``fusedrec bench``."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Literal, get_args

from pydantic import Field

from fusedrec_torchrec.access.synthetic import BagKind
from fusedrec_torchrec.bench.allocators import Allocator
from fusedrec_torchrec.codecs.options import NARROW, CodecOptions, Codecs
from fusedrec_torchrec.core.config import from_mapping, section, to_mapping
from fusedrec_torchrec.core.device import Device
from fusedrec_torchrec.planner.search.owners import FUSED_MIXED
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    StockSharding,
)

__all__ = [
    "CODEC_SYSTEMS",
    "DEDUP_PER_TABLE",
    "FUSED_PLANNER",
    "HOT_SYSTEMS",
    "MLPERF_SIZES",
    "OURS",
    "PLANNED_SYSTEMS",
    "STOCK_DEDUP",
    "SYSTEMS",
    "DataName",
    "SuiteConfig",
    "SystemName",
    "WorkloadConfig",
    "headline_of",
    "steps_alike",
]

SystemName = Literal[
    StockSharding,
    "table_row_wise",
    "table_wise_dedup",
    "row_wise_dedup",
    "planner",
    "dedup_per_table",
    "fused_row_wise",
    "fused_table_wise",
    "fused_column_wise",
    "fused_mixed",
    "fused_planner",
    "fused_profiled",
    "fused_hot",
    "fused_hot_every_8",
    "fused_hot_batches",
    "fused_hot_batches_every_8",
    "fused_fp16",
    "fused_bf16",
    "fused_int8",
    "fused_dct",
]
SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)
DataName = Literal["zipf", "criteo", "table"]
HOT_SYSTEMS: tuple[SystemName, ...] = tuple(n for n in SYSTEMS if n.startswith("fused_hot"))
# Each table deduplicated and exchanged by itself, what the paper on FusedRec compares with.
DEDUP_PER_TABLE = "dedup_per_table"
FUSED_PLANNER = "fused_planner"
FUSED_PROFILED = "fused_profiled"  # by our planner with an access profile of the batches
# Whose plan depends on the workload: a suite names them where they are worth their time.
PLANNED_SYSTEMS = (
    FUSED_TABLE_WISE,
    FUSED_COLUMN_WISE,
    FUSED_MIXED,
    FUSED_PLANNER,
    FUSED_PROFILED,
)
# TorchRec's shardings of sequences, with its own dedup of ids (use_index_dedup).
STOCK_DEDUP = {"table_wise_dedup": "table_wise", "row_wise_dedup": "row_wise"}
# How rows and gradients travel.  The last is what the paper on DCT has for model parallelism.
CODEC_SYSTEMS: dict[str, Codecs] = {
    **{
        f"fused_{kind}": Codecs(forward=CodecOptions(type=kind), backward=CodecOptions(type=kind))
        for kind in NARROW
    },
    "fused_dct": Codecs(
        forward=CodecOptions(type="dct", density=0.05, values="bf16"),
        backward=CodecOptions(type="bf16"),
    ),
}
# Ids of a bag for each of Criteo's 26 features in MLPerf's benchmark of DLRM DCNv2.
MLPERF_SIZES = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
# What stock systems are compared with; codecs and hot rows have comparisons of their own.
OURS = (FUSED_PLANNER, FUSED_PROFILED, *FUSED_TYPES, FUSED_MIXED)


def headline_of(systems: Iterable[str]) -> str | None:
    """Returns the system that stands for this package: what a user gets who does not choose.

    That is our planner's plan where it was measured, else ``fused_row_wise``; None without both.
    """
    measured = set(systems)
    return next((name for name in (FUSED_PLANNER, FUSED) if name in measured), None)


def steps_alike(system: str) -> int:
    """Returns after how many steps a system does the same again."""
    return 8 if system.endswith("every_8") else 1


@section
class WorkloadConfig:
    """Describes a model and its batches, on which systems are compared.

    Attributes:
        name: Title in tables and plots; a sweep adds its values to it.
        data: Generated ids, those of a file in Criteo's format (--data), or those of a folder that
            `fusedrec prepare` made of columns of your own (--table), one id for each feature.
        module: EmbeddingBagCollection (pooled) or EmbeddingCollection (sequences).
        batch_size: Samples of one rank and step.
        ranks: Number of processes; more than the machine has cores say little about time.
        dims: Columns of the tables, in turn.
        tables: zipf: number of tables.
        rows: zipf: rows of each table.
        zipf: zipf: exponent of the law of popularity, 0 is uniform.
        pooling: zipf: average number of ids of a sample and feature; 1 is exactly one.
        bags: zipf: a bag's ids are drawn anew for each sample (fresh), or follow from its first
            (repeated), so that bags repeat as often as ids do.
        multi_hot: criteo: ids of a bag, table by table in turn, or mlperf for the sizes of MLPerf's
            DLRM DCNv2; an id has the same bag of random rows whenever it comes. One-hot if empty.
        hot_rows: How many of the most used rows are hot, in systems that have hot rows.
        batches: Samples as they come, or those only that need nothing but hot rows.
        systems: Systems to run on this workload; those of the suite if empty.
        link: Emulated hosts' link, as 1gbit or 200mbit; empty is loopback.
        sweep: Fields and the values they take in turn; all combinations are run.
        series: Name of the workload that a sweep made this one of.
    """

    name: str = Field(default="zipf", min_length=1)
    data: DataName = "zipf"
    module: Literal["ebc", "ec"] = "ebc"
    batch_size: int = Field(default=2048, ge=1)
    ranks: int = Field(default=2, ge=1)
    dims: list[int] = Field(default=[64], min_length=1)
    tables: int = Field(default=26, ge=1)
    rows: int = Field(default=12000, ge=1)
    zipf: float = Field(default=1.1, ge=0)
    pooling: float = Field(default=1.0, gt=0, le=1000)
    bags: BagKind = "fresh"
    multi_hot: Literal["mlperf"] | list[int] = Field(default=[])
    hot_rows: int = Field(default=20000, ge=1)
    batches: Literal["all", "hot"] = "all"
    systems: list[SystemName] = Field(default=[])
    link: str = ""
    sweep: dict[str, list[Any]] = Field(default={})
    series: str = ""

    def __post_init__(self) -> None:
        for dim in self.dims:
            if dim < 4 or dim % 4:
                raise ValueError(f"dims holds {dim}, must be positive multiples of 4")
        if self.multi_hot and self.data != "criteo":
            raise ValueError(f"multi_hot is {self.multi_hot}, must be empty unless data is criteo")
        for size in self.multi_hot if self.multi_hot != "mlperf" else ():
            if int(size) < 1:
                raise ValueError(f"multi_hot holds {size}, must be positive numbers of ids")

    def pooling_of(self, tables: int) -> list[float]:
        """Returns the mean number of ids in a bag of each table, as the workload is described.

        All ranks get the same, which counts of their own batches would not be.
        """
        if self.data == "zipf":
            return [self.pooling] * tables
        if self.multi_hot == "mlperf":
            return [float(size) for size in MLPERF_SIZES]
        sizes = self.multi_hot or [1]
        return [float(sizes[i % len(sizes)]) for i in range(tables)]

    def expanded(self) -> list["WorkloadConfig"]:
        """Returns one workload for each combination of the sweep's values."""
        if not self.sweep or self.series:
            return [self]
        base = {**to_mapping(self), "series": self.name}
        result = []
        for values in itertools.product(*self.sweep.values()):
            chosen = dict(zip(self.sweep, values, strict=True))
            title = ", ".join(
                _short(value) if field == "link" else f"{field} {_short(value)}"
                for field, value in chosen.items()
            )
            taken = {field: [value] for field, value in chosen.items()}
            data = {**base, **chosen, "name": f"{self.name}, {title}", "sweep": taken}
            result.append(from_mapping(WorkloadConfig, data, f"sweep of workload {self.name!r}"))
        return result


@section
class SuiteConfig:
    """Says which systems are compared, on what, and how often.

    Attributes:
        systems: What is compared; fused_hot has hot rows, fused_hot_every_8 syncs them every 8
            steps, and fused_hot_batches agrees before each exchange whether it is needed; and both.
            dedup_per_table sends distinct rows as fused_row_wise does, each table by itself.
            fused_fp16 and the like have codecs. fused_planner is the plan of FusedShardingPlanner,
            fused_table_wise deals whole tables to ranks, fused_column_wise splits the columns of
            each over all ranks, and fused_mixed has the three fused shardings by turns.
            table_wise_dedup and row_wise_dedup are TorchRec's, of sequences, with its own dedup.
        device: Where it runs: processes on CPU with gloo, or one for each GPU with NCCL.
        pairs: Rounds; in each, every system runs once, so that ratios are of neighbours in time.
        steps: Training steps of one measurement.
        warm_up: Steps of each system before the first measurement.
        threads: Threads of each rank.
        allocators: How ranks keep memory; every workload is measured with each. default is glibc,
            keep is glibc told to keep what it has, jemalloc needs libjemalloc.so.2.
        data_parallel_mib: data_parallel is left out if the tables are larger: it sends all of their
            gradients.
        workloads: What it is compared on.
    """

    systems: list[SystemName] = Field(
        default=[
            name
            for name in SYSTEMS
            if name not in {*HOT_SYSTEMS, *CODEC_SYSTEMS, *PLANNED_SYSTEMS, *STOCK_DEDUP}
            and name != DEDUP_PER_TABLE
        ],
        min_length=1,
    )
    device: Device = "cpu"
    pairs: int = Field(default=7, ge=5)
    steps: int = Field(default=4, ge=1)
    warm_up: int = Field(default=3, ge=1)
    threads: int = Field(default=1, ge=1)
    allocators: list[Allocator] = Field(default=["default"], min_length=1)
    data_parallel_mib: int = Field(default=512, ge=0)
    workloads: list[WorkloadConfig] = Field(default=[WorkloadConfig()], min_length=1)

    def __post_init__(self) -> None:
        if len(set(self.allocators)) < len(self.allocators):
            raise ValueError(f"allocators are {self.allocators}, must be different ones")

    def expanded(self) -> list[WorkloadConfig]:
        """Returns all workloads, with sweeps expanded and systems filled in."""
        return [
            dataclasses.replace(workload, systems=workload.systems or self.systems)
            for parent in self.workloads
            for workload in parent.expanded()
        ]

    def chosen(self, only: str | None = None) -> list[WorkloadConfig]:
        """Returns the workloads whose names contain ``only``, all of them if it is None.

        Raises:
            ValueError: there is none.
        """
        workloads = self.expanded()
        matching = [workload for workload in workloads if only is None or only in workload.name]
        if not matching:
            names = ", ".join(repr(workload.name) for workload in workloads)
            raise ValueError(f"no workload's name contains {only!r}; there are {names}")
        return matching


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value) or "loopback"
