"""What a benchmark run measures: the tree behind ``benchmarks/*.yaml`` and ``fusedrec bench``."""

import dataclasses
import itertools
from typing import Any, Literal, get_args

from pydantic import Field

from fusedrec_torchrec.codecs.options import CodecOptions, Codecs
from fusedrec_torchrec.core.config import from_mapping, section, to_mapping

__all__ = [
    "CODEC_SYSTEMS",
    "HOT_SYSTEMS",
    "SYSTEMS",
    "SuiteConfig",
    "SystemName",
    "WorkloadConfig",
    "steps_alike",
]

NARROW: tuple[Literal["fp16", "bf16", "int8"], ...] = ("fp16", "bf16", "int8")
SystemName = Literal[
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "planner",
    "data_parallel",
    "fused_row_wise",
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
HOT_SYSTEMS: tuple[SystemName, ...] = tuple(n for n in SYSTEMS if n.startswith("fused_hot"))
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


def steps_alike(system: str) -> int:
    """After how many steps a system does the same again."""
    return 8 if system.endswith("every_8") else 1


@section
class WorkloadConfig:
    name: str = Field(default="zipf", min_length=1)
    """Title in tables and plots; a sweep adds its values to it."""
    data: Literal["zipf", "criteo"] = "zipf"
    """Generated ids, or those of a file in Criteo's format (--data)."""
    module: Literal["ebc", "ec"] = "ebc"
    """EmbeddingBagCollection (pooled) or EmbeddingCollection (sequences)."""
    batch_size: int = Field(default=2048, ge=1)
    """Samples of one rank and step."""
    ranks: int = Field(default=2, ge=1)
    """Number of processes; more than the machine has cores say little about time."""
    dims: list[int] = Field(default=[64], min_length=1)
    """Columns of the tables, in turn."""
    tables: int = Field(default=26, ge=1)
    """zipf: number of tables."""
    rows: int = Field(default=12000, ge=1)
    """zipf: rows of each table."""
    zipf: float = Field(default=1.1, ge=0)
    """zipf: exponent of the law of popularity, 0 is uniform."""
    pooling: float = Field(default=1.0, gt=0, le=1000)
    """zipf: average number of ids of a sample and feature; 1 is exactly one."""
    hot_rows: int = Field(default=20000, ge=1)
    """How many of the most used rows are hot, in systems that have hot rows."""
    batches: Literal["all", "hot"] = "all"
    """Samples as they come, or those only that need nothing but hot rows."""
    systems: list[SystemName] = Field(default=[])
    """Systems to run on this workload; those of the suite if empty."""
    link: str = ""
    """Emulated hosts' link, as 1gbit or 200mbit; empty is loopback."""
    sweep: dict[str, list[Any]] = Field(default={})
    """Fields and the values they take in turn; all combinations are run."""
    series: str = ""
    """Name of the workload that a sweep made this one of."""

    def __post_init__(self) -> None:
        for dim in self.dims:
            if dim < 4 or dim % 4:
                raise ValueError(f"dims holds {dim}, must be positive multiples of 4")

    def expanded(self) -> list["WorkloadConfig"]:
        """One workload for each combination of the sweep's values."""
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
    systems: list[SystemName] = Field(
        default=[name for name in SYSTEMS if name not in {*HOT_SYSTEMS, *CODEC_SYSTEMS}],
        min_length=1,
    )
    """What is compared; fused_hot has hot rows, fused_hot_every_8 syncs them every 8 steps, and
    fused_hot_batches agrees before each exchange whether it is needed; and both.  fused_fp16 and
    the like have codecs."""
    pairs: int = Field(default=7, ge=5)
    """Rounds; in each, every system runs once, so that ratios are of neighbours in time."""
    steps: int = Field(default=4, ge=1)
    """Training steps of one measurement."""
    warm_up: int = Field(default=3, ge=1)
    """Steps of each system before the first measurement."""
    threads: int = Field(default=1, ge=1)
    """Threads of each rank."""
    data_parallel_mib: int = Field(default=512, ge=0)
    """data_parallel is left out if the tables are larger: it sends all of their gradients."""
    workloads: list[WorkloadConfig] = Field(default=[WorkloadConfig()], min_length=1)
    """What it is compared on."""

    def expanded(self) -> list[WorkloadConfig]:
        """All workloads, with sweeps expanded and systems filled in."""
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
        found = [workload for workload in workloads if only is None or only in workload.name]
        if not found:
            names = ", ".join(repr(workload.name) for workload in workloads)
            raise ValueError(f"no workload's name contains {only!r}; there are {names}")
        return found


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value) or "loopback"
