"""The least time that a step can take on a GPU: bytes over bandwidth, launches, collectives.

Nobody has measured any of it.  Bytes of our own kernels come from ``core/gpu/traffic``, those of
FBGEMM's are assumptions, written down in ``fbgemm_forward`` and ``fbgemm_backward`` and not
compared with its source, collectives from a cluster file, launches from the counts of the emulated
GPU.  No kernel reaches the whole bandwidth of memory, so a real step takes longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.core.gpu.segments import FEW, PIECE
from fusedrec_torchrec.core.gpu.traffic import NUMBER, Shape, kernels
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.step import Step, fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = [
    "GPUS",
    "LAUNCHES",
    "LAUNCH_MICROSECONDS",
    "Gpu",
    "StageTime",
    "estimated_rates",
    "fbgemm_backward",
    "fbgemm_forward",
    "roofline",
    "shape_of",
    "with_many_ids",
]


@dataclass(frozen=True)
class Gpu:
    """Is a GPU as its data sheet has it.

    Attributes:
        name: of the GPU.
        bandwidth: of its memory, GB/s.
        source: of the number.
    """

    name: str
    bandwidth: float
    source: str


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 2039.0, "NVIDIA A100 data sheet, HBM2e"),
    "h100": Gpu("H100 SXM 80 GB", 3350.0, "NVIDIA H100 data sheet, HBM3"),
}
LAUNCH_MICROSECONDS = 4.0
"""The assumed time of a kernel that has nothing to do, with the gap to the next one."""
LAUNCHES = {"fused_row_wise": 33, "table_wise": 52}
"""The launches of a step of 26 tables of one dimension, see ``emulated_cuda/test_budget.py``."""
ID, OFFSET, STATE, RADIX_BITS = 8, 8, 4, 8
SORTED = ID + 4  # a linear index, and where it came from


def fbgemm_forward(ids: float, outputs: float, dim: int) -> float:
    """Returns the bytes of a lookup: indices, offsets and rows are read, outputs written."""
    row = NUMBER * dim
    return (ID + row) * ids + (OFFSET + row) * outputs


def fbgemm_backward(ids: float, unique: float, outputs: float, dim: int, rows: float) -> float:
    """Returns the bytes of an update with row-wise AdaGrad.

    Indices become linear ones (read, written), are sorted by radix in passes of eight bits, and
    runs of equal ones are found; gradients are read for each id, rows and states read and written.
    """
    row = NUMBER * dim
    passes = max(ceil(log2(max(rows, 2)) / RADIX_BITS), 1)
    sort = (2 * ID + OFFSET) * ids + 2 * SORTED * passes * ids + ID * ids + 12 * unique
    return sort + (row * ids if outputs else 0) + 2 * (row + STATE) * unique


@dataclass(frozen=True)
class StageTime:
    """Is a stage of a step, with its bytes and seconds on the busiest rank."""

    name: str
    amount: float
    seconds: float
    is_collective: bool = False


def shape_of(tables: Sequence[TableLoad], batch: int) -> Shape:
    """Returns the batch of a rank, rows of all tables spread evenly over the ranks."""
    (dim,) = {table.dim for table in tables}
    unique = sum(table.unique(batch) for table in tables)
    bags = sum(batch * table.bags for table in tables)
    ids = sum(table.ids(batch) for table in tables)
    many = [with_many_ids(table.classes, table.ids(batch)) for table in tables]
    long, in_them = (sum(of_table) for of_table in zip(*many, strict=True))
    # The last piece of a row is half full in the mean.
    return Shape(ids, unique, bags, unique, dim, long, in_them / PIECE + long / 2)


def with_many_ids(classes: RowClasses, ids: float) -> tuple[float, float]:
    """Returns how many rows more than a few of ``ids`` are of, by Poisson's law, and these ids."""
    mean_C = classes.shares_C * ids
    terms_FC = np.empty((FEW + 1, mean_C.size))
    terms_FC[0] = np.exp(-mean_C)
    for few in range(1, FEW + 1):
        terms_FC[few] = terms_FC[few - 1] * mean_C / few
    long_C = classes.rows_C * np.clip(1 - terms_FC.sum(0), 0, None)
    ids_C = classes.rows_C * np.clip(mean_C - np.arange(FEW + 1) @ terms_FC, 0, None)
    return float(long_C.sum()), float(ids_C.sum())


def roofline(
    system: str, tables: Sequence[TableLoad], batch: int, cluster: ClusterConfig, gpu: Gpu
) -> list[StageTime]:
    """Returns the stages of a step of ``fused_row_wise`` or ``table_wise``, launches last."""
    ranks, shape = cluster.ranks, shape_of(tables, batch)
    rows = sum(table.rows for table in tables)
    distinct = sum(table.unique(batch * ranks) for table in tables)  # of all ranks' batches
    if system == "fused_row_wise":
        step = fused_step(tables, batch, ranks)
        asked, own = shape.asked, distinct / ranks
        work = dict.fromkeys(("dedup", "lookup", "pooling", "pooling_backward", "update"), 0.0)
        for kernel in kernels(shape):
            work[kernel.stage] += kernel.asked
        work["lookup"] += fbgemm_forward(asked, asked, shape.dim)
        work["update"] += fbgemm_backward(asked, own, asked, shape.dim, rows / ranks)
    else:
        assert system == "table_wise", system
        step = stock_step(system, tables, batch, ranks)
        row, share = NUMBER * shape.dim, 1 / ranks  # of the tables; bags of all ranks
        ids, bags = shape.ids * ranks * share, shape.bags * ranks * share
        work = {
            "permute": 2 * (2 * ID * shape.ids + 2 * 4 * shape.bags),  # before and after sending
            "lookup": fbgemm_forward(ids, bags, shape.dim),
            "outputs": 2 * 2 * row * shape.bags,  # to their columns, and back
            "update": fbgemm_backward(ids, distinct * share, bags, shape.dim, rows / ranks),
        }
    times = [
        StageTime(name, amount, amount / (gpu.bandwidth * 1e9)) for name, amount in work.items()
    ]
    rates = cluster.rates(system)
    times += [
        StageTime(stage.name, float(stage.amount_W.max()), stage.seconds(cluster, rates), True)
        for stage in step.stages
        if stage.is_collective
    ]
    launches = LAUNCHES[system]
    return [*times, StageTime("launches", launches, launches * LAUNCH_MICROSECONDS * 1e-6)]


def estimated_rates(
    system: str, tables: Sequence[TableLoad], batch: int, cluster: ClusterConfig, gpu: Gpu
) -> dict[str, float]:
    """Returns the cost model's rates that give its stages the times of the roofline.

    Two digits: million ids a second, and GB/s of rows that are looked up and pooled.
    """
    seconds = {t.name: t.seconds for t in roofline(system, tables, batch, cluster, gpu)[:-1]
               if not t.is_collective}  # fmt: skip
    is_fused = system == "fused_row_wise"
    step = (fused_step if is_fused else _table_wise)(tables, batch, cluster.ranks)
    amounts: dict[str, float] = {}
    for stage in step.stages:
        if not stage.is_collective:
            mean = float(stage.amount_W.mean())
            amounts[stage.kind] = amounts.get(stage.kind, 0.0) + mean
    spent = {
        "ids": seconds["dedup" if is_fused else "permute"],
        "lookup": seconds["lookup"] + seconds["update"],
        "pooling": seconds["pooling"] + seconds["pooling_backward"]
        if is_fused
        else seconds["outputs"],
    }
    units = {"ids": 1e6, "lookup": 1e9, "pooling": 1e9}
    return {kind: float(f"{amounts[kind] / spent[kind] / units[kind]:.2g}") for kind in spent}


def _table_wise(tables: Sequence[TableLoad], batch: int, ranks: int) -> Step:
    return stock_step("table_wise", tables, batch, ranks)
