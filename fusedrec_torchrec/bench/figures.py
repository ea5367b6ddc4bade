"""Computes what the measurements of a workload say: medians, ratios, bytes, efficiency."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from fusedrec_torchrec.bench.allocators import Allocator
from fusedrec_torchrec.bench.statistics import Ratio, paired_ratio
from fusedrec_torchrec.bench.suite import (
    CODEC_SYSTEMS,
    DEDUP_PER_TABLE,
    HOT_SYSTEMS,
    OURS,
    WorkloadConfig,
    headline_of,
    steps_alike,
)
from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = [
    "ALLOCATOR_TITLES",
    "BOUNDS",
    "KINDS",
    "SystemFigures",
    "WorkloadFigures",
    "side_by_side",
]

KINDS = ("ids", "rows", "gradients")
BOUNDS = ("exchange", "lookup", "gather")
ALLOCATOR_TITLES: dict[Allocator, str] = {
    "default": "",
    "keep": "memory kept",
    "jemalloc": "jemalloc",
}
# A fused step that is this much slower than the best stock system's is advised against.
TOLERATED = 1.05


@dataclass(frozen=True)
class SystemFigures:
    """Holds the figures of one system on one workload.

    Attributes:
        milliseconds: median of a step.
        against_fused: its time in units of the headline system's; None if there was none.
        collectives: number in a step, messages between two ranks included.
        bytes_sent: by all ranks in a step, with ideal collectives.
        bytes_by_kind: the same, of ids, rows and gradients; empty in results of earlier versions.
        rows_over_least: rows sent, those that ranks send themselves included, in units of the least
            that can serve the batch, see ``WorkloadFigures``; None where it means nothing.
        gloo_bytes_sent: as gloo sends them: its reduce-scatter is a whole all-reduce.
        memory: peak bytes of a rank beyond what libraries and data took before.
    """

    name: str
    milliseconds: float
    against_fused: Ratio | None
    collectives: float
    bytes_sent: int
    bytes_by_kind: dict[str, int]
    rows_over_least: float | None
    gloo_bytes_sent: int
    memory: int


class WorkloadFigures:
    """Holds the figures of one workload and allocator, from measurements as the JSON file has them.

    ``fused`` is the headline system: our planner's plan if that was measured, else
    ``fused_row_wise``.

    ``rows_over_least`` divides the elements of rows that all ranks get in a step by the sum over
    ranks and tables of min(distinct bags, distinct rows) x columns of the batch.  Above the line
    are all rows, remote or not: those on the wire as they were counted there, and those that ranks
    get from themselves, which travel nowhere and are counted from batch and plan.  Below the line
    are counts of the batch alone.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        self.config = from_mapping(WorkloadConfig, result["workload"])
        self.measured: dict[str, Any] = result["measured"]
        self.allocator: Allocator = result.get("allocator", "default")
        seconds: dict[str, list[float]] = self.measured["seconds"]
        self.headline = headline_of(seconds)
        fused = None if self.headline is None else seconds[self.headline]
        self.systems = {
            name: self._system(name, times, None if fused is None else paired_ratio(times, fused))
            for name, times in seconds.items()
        }

    def _system(self, name: str, times: list[float], ratio: Ratio | None) -> SystemFigures:
        ranks = self.measured["wire"][name]
        sent = [c for rank in ranks for c in rank]
        steps = steps_alike(name)
        return SystemFigures(
            name=name,
            milliseconds=1e3 * median(times),
            against_fused=ratio,
            collectives=max(len(rank) for rank in ranks) / steps,
            bytes_sent=round(sum(c["bytes_sent"] for c in sent) / steps),
            bytes_by_kind={
                kind: round(sum(c["bytes_sent"] for c in sent if c["kind"] == kind) / steps)
                for kind in KINDS
                if all("kind" in c for c in sent)
            },
            rows_over_least=self._rows_over_least(name),
            gloo_bytes_sent=sum(
                c["bytes_sent"] * (2 if c["name"] == "reduce_scatter" else 1) for c in sent
            ),
            memory=self.measured["memory"][name],
        )

    def _rows_over_least(self, name: str) -> float | None:
        """Returns rows in units of the least; codecs, hot rows and replicas count otherwise."""
        requests = self.measured.get("requests", {}).get(name)
        if requests is None or name in (*HOT_SYSTEMS, *CODEC_SYSTEMS, "data_parallel"):
            return None
        sent = [c for rank in self.measured["wire"][name] for c in rank]
        on_wire = sum(c["bytes_sent"] for c in sent if c["kind"] == "rows") / 4
        return float((on_wire + requests["own_elements"]) / max(requests["least_elements"], 1))

    @property
    def label(self) -> str:
        """Title of the workload, with the allocator unless that is the default."""
        allocator = ALLOCATOR_TITLES[self.allocator]
        return f"{self.title}, {allocator}" if allocator else self.title

    @property
    def title(self) -> str:
        """Name of the workload, with its link."""
        if not self.config.link or "link" in self.config.sweep:
            return self.config.name
        return f"{self.config.name}, {self.config.link}"

    @property
    def fused(self) -> SystemFigures | None:
        """The headline system, if one was measured."""
        return None if self.headline is None else self.systems[self.headline]

    @property
    def best_stock(self) -> SystemFigures | None:
        """The stock system with the shortest step."""
        ours = (*OURS, *HOT_SYSTEMS, *CODEC_SYSTEMS, DEDUP_PER_TABLE)
        stock = [system for name, system in self.systems.items() if name not in ours]
        return min(stock, key=lambda system: system.milliseconds, default=None)

    @property
    def best_ours(self) -> SystemFigures | None:
        """The system of ours, without codecs and hot rows, with the shortest step."""
        ours = [system for name, system in self.systems.items() if name in OURS]
        return min(ours, key=lambda system: system.milliseconds, default=None)

    @property
    def best_speed_up(self) -> Ratio | None:
        """Time of the best stock step / time of our best step."""
        return None if self.best_ours is None else self.speed_up_of(self.best_ours.name)

    def speed_up_of(self, system: str) -> Ratio | None:
        """Returns the time of the best stock step / that of a system that was measured."""
        if self.best_stock is None:
            return None
        seconds = self.measured["seconds"]
        return paired_ratio(seconds[self.best_stock.name], seconds[system])

    @property
    def speed_up(self) -> Ratio | None:
        """Time of the best stock step / time of the fused step."""
        return None if self.best_stock is None else self.best_stock.against_fused

    @property
    def advice(self) -> str:
        """The sharding to use here; empty if it cannot be told."""
        if self.fused is None or self.best_stock is None or self.speed_up is None:
            return ""
        return self.fused.name if self.speed_up.median >= 1 / TOLERATED else self.best_stock.name

    @property
    def efficiency(self) -> Ratio | None:
        """Sum of the lower bounds / time of the fused step; None if bounds are missing."""
        if self.fused is None or set(self.bound_seconds) != set(BOUNDS):
            return None
        bounds = [sum(seconds) for seconds in zip(*self.bound_seconds.values(), strict=True)]
        return paired_ratio(bounds, self.measured["seconds"][self.fused.name])

    @property
    def bound_seconds(self) -> dict[str, list[float]]:
        """Seconds of each lower bound, by its name."""
        bounds: dict[str, list[float]] = self.measured["bound_seconds"]
        return bounds

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of each stage of the fused step; empty without one."""
        return {name: 1e3 * value for name, value in self.measured.get("phases", {}).items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of rows and gradients that the fused step sends, all ranks."""
        assert self.fused is not None
        return self.row_bytes_of(self.fused.name)

    def row_bytes_of(self, system: str) -> int:
        """Returns the bytes of rows and gradients that a system sends in a step, all ranks."""
        return sum(
            c["bytes_sent"]
            for rank in self.measured["wire"][system]
            for c in rank
            if c["dtype"].startswith(("float", "uint8"))  # codecs send bytes
        )

    @property
    def least_row_bytes(self) -> int:
        """Bytes of every row that a rank needs of another, once, and of its gradient back.

        Of tables that their owners pool, it is every bag.
        """
        return 2 * int(self.measured["unique_remote_bytes"])

    @property
    def rows_per_output(self) -> float:
        """Distinct rows of a batch for each row of its output."""
        return float(self.measured["unique"] / max(self.measured["outputs"], 1))

    @property
    def bags_per_output(self) -> float | None:
        """Distinct bags of a batch for each row of its output; unknown to earlier versions."""
        bags = self.measured.get("distinct_bags")
        return None if bags is None else float(bags / max(self.measured["outputs"], 1))

    @property
    def planner_picks(self) -> dict[str, int]:
        """Number of tables that ``FusedShardingPlanner`` shards in each way."""
        picks: dict[str, int] = self.measured["planner_picks"]
        return picks

    @property
    def imbalance(self) -> dict[str, float]:
        """Requests to the most asked owner / mean, by system; empty without hot rows."""
        owners = self.measured.get("owners", {})
        return {
            name: max(owners[name]) / max(mean(owners[name]), 1e-9)
            for name in ("row_wise", FUSED, "fused_hot")
            if name in owners
        }

    @property
    def hits(self) -> dict[int, tuple[float, float]]:
        """Shares of a batch's rows and of its ids that are hot, by size of the hot set."""
        owners = self.measured.get("owners", {"hits": {}, "totals": [1, 1]})
        rows, ids = owners["totals"]
        return {
            int(size): (hot_rows / rows, hot_ids / ids)
            for size, (hot_rows, hot_ids) in owners["hits"].items()
        }

    @property
    def id_bytes(self) -> int:
        """Bytes of everything else that the fused step sends: ids, counts, padding."""
        assert self.fused is not None
        return self.fused.bytes_sent - self.row_bytes


def side_by_side(workloads: Sequence[WorkloadFigures]) -> list[dict[Allocator, WorkloadFigures]]:
    """Returns for each workload its figures with all allocators that it was measured with."""
    groups: list[dict[Allocator, WorkloadFigures]] = []
    for w in workloads:
        last = next(iter(groups[-1].values())) if groups else None
        if last is None or last.title != w.title or w.allocator in groups[-1]:
            groups.append({})
        groups[-1][w.allocator] = w
    return groups
