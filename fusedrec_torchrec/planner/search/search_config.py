"""What the planner may decide."""

from typing import Literal

from pydantic import Field

from fusedrec_torchrec.codecs.options import CodecOptions, Codecs
from fusedrec_torchrec.core.config import section

__all__ = ["Codec", "GroupsConfig", "HotSearchConfig", "SearchConfig", "System"]

System = Literal["fused_row_wise", "table_wise", "row_wise", "column_wise", "data_parallel"]
Codec = Literal["fp16", "bf16", "int8"]


@section
class HotSearchConfig:
    memory: float = Field(default=256.0, ge=0)
    """MB on each rank that replicas of hot rows may take, optimizer state included; 0 is none.
    Which rows are hot is known from an access profile only."""
    sync_every: int = Field(default=1, ge=1)
    """Steps from one sync of the replicas to the next; 1 is exact training."""


@section
class GroupsConfig:
    sizes: list[int] | Literal["all"] = Field(default=[])
    """Ranks of a group of 2D parallelism that may be chosen, beside one group of all ranks; all is
    every divisor.  Groups change what is trained, unless gradients are synced."""
    sync: Literal["weights", "gradients"] = "weights"
    """What the groups exchange."""
    sync_every: int = Field(default=1, ge=1)
    """Steps from one sync of weights to the next."""

    def __post_init__(self) -> None:
        if self.sizes != "all" and any(size < 1 for size in self.sizes):
            raise ValueError(f"sizes is {self.sizes}, must be numbers of at least 1, or all")
        if self.sync == "gradients" and self.sync_every != 1:
            raise ValueError(
                f"sync_every is {self.sync_every} with sync gradients, which happens in every step"
            )


@section
class SearchConfig:
    systems: list[System] = Field(
        default=["fused_row_wise", "table_wise", "row_wise", "column_wise"], min_length=1
    )
    """Shardings to choose from.  data_parallel has a dense optimizer of its own."""
    tables: dict[str, list[System]] = Field(default={})
    """Shardings of single tables, by table name."""
    row_ranges: Literal["balanced", "even"] = "balanced"
    """Rows of fused tables: ranges of equal load, where an access profile tells it, or of equal
    length."""
    hot: HotSearchConfig = HotSearchConfig()
    groups: GroupsConfig = GroupsConfig()
    input_dist: Literal["auto", "single_shot", "exact_counts"] = "auto"
    """How ids of fused tables travel; auto takes the faster."""
    codecs: list[Codec | Codecs] = Field(default=[])
    """Lossy codecs that may be chosen: a name, for rows and gradients, or forward and backward as
    in sharding.exchange.codecs of a training."""

    def allowed_codecs(self) -> list[Codecs]:
        """Returns the lossy codecs that may be chosen."""
        return [
            codec
            if isinstance(codec, Codecs)
            else Codecs(forward=CodecOptions(type=codec), backward=CodecOptions(type=codec))
            for codec in self.codecs
        ]

    def __post_init__(self) -> None:
        for name, systems in self.tables.items():
            if not systems:
                raise ValueError(f"tables.{name} is empty, must list at least one sharding")
