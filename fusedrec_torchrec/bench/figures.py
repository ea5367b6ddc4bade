"""Computes what the measurements of a workload say: medians, ratios, bytes, efficiency."""

from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from fusedrec_torchrec.bench.statistics import Ratio, paired_ratio
from fusedrec_torchrec.bench.suite import (
    CODEC_SYSTEMS,
    HOT_SYSTEMS,
    WorkloadConfig,
    steps_alike,
)
from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["SystemFigures", "WorkloadFigures"]

# A fused step that is this much slower than the best stock system's is advised against.
TOLERATED = 1.05


@dataclass(frozen=True)
class SystemFigures:
    """Holds the figures of one system on one workload.

    Attributes:
        milliseconds: median of a step.
        against_fused: its time in units of the fused step's; None if there was no fused step.
        collectives: number in a step, messages between two ranks included.
        bytes_sent: by all ranks in a step, with ideal collectives.
        gloo_bytes_sent: as gloo sends them: its reduce-scatter is a whole all-reduce.
        memory: peak bytes of a rank beyond what libraries and data took before.
    """

    name: str
    milliseconds: float
    against_fused: Ratio | None
    collectives: float
    bytes_sent: int
    gloo_bytes_sent: int
    memory: int


class WorkloadFigures:
    """Holds the figures of one workload, from the measurements as the JSON file has them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.config = from_mapping(WorkloadConfig, result["workload"])
        self.measured: dict[str, Any] = result["measured"]
        seconds: dict[str, list[float]] = self.measured["seconds"]
        fused = seconds.get(FUSED)
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
            gloo_bytes_sent=sum(
                c["bytes_sent"] * (2 if c["name"] == "reduce_scatter" else 1) for c in sent
            ),
            memory=self.measured["memory"][name],
        )

    @property
    def title(self) -> str:
        """Name of the workload, with its link."""
        if not self.config.link or "link" in self.config.sweep:
            return self.config.name
        return f"{self.config.name}, {self.config.link}"

    @property
    def fused(self) -> SystemFigures | None:
        """The fused system, if it was measured."""
        return self.systems.get(FUSED)

    @property
    def best_stock(self) -> SystemFigures | None:
        """The stock system with the shortest step."""
        ours = (FUSED, *HOT_SYSTEMS, *CODEC_SYSTEMS)
        stock = [system for name, system in self.systems.items() if name not in ours]
        return min(stock, key=lambda system: system.milliseconds, default=None)

    @property
    def speed_up(self) -> Ratio | None:
        """Time of the best stock step / time of the fused step."""
        return None if self.best_stock is None else self.best_stock.against_fused

    @property
    def advice(self) -> str:
        """The sharding to use here; empty if it cannot be told."""
        if self.fused is None or self.best_stock is None or self.speed_up is None:
            return ""
        return FUSED if self.speed_up.median >= 1 / TOLERATED else self.best_stock.name

    @property
    def efficiency(self) -> Ratio | None:
        """Sum of the lower bounds / time of the fused step."""
        if self.fused is None:
            return None
        bounds = [sum(seconds) for seconds in zip(*self.bound_seconds.values(), strict=True)]
        return paired_ratio(bounds, self.measured["seconds"][FUSED])

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
        return self.row_bytes_of(FUSED)

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
        """Bytes of every row that a rank needs of another, once, and of its gradient back."""
        return 2 * int(self.measured["unique_remote_bytes"])

    @property
    def rows_per_output(self) -> float:
        """Distinct rows of a batch for each row of its output."""
        return float(self.measured["unique"] / max(self.measured["outputs"], 1))

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
