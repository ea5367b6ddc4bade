"""What the planner may decide."""

from typing import Literal

from pydantic import Field

from fusedrec_torchrec.codecs.options import CodecOptions, Codecs, NarrowType
from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.exchange.options import InputDist
from fusedrec_torchrec.sharding.grid_options import GridSync
from fusedrec_torchrec.sharding.sharding_type import SHARDINGS, Sharding

__all__ = ["GroupsConfig", "HotSearchConfig", "SearchConfig"]


@section
class HotSearchConfig:
    """Says how much memory hot rows may take, and how often they are synced.

    Attributes:
        memory: MB on each rank that replicas of hot rows may take, optimizer state included; 0 is
            none. Which rows are hot is known from an access profile only.
        sync_every: Steps from one sync of the replicas to the next; 1 is exact training.
    """

    memory: float = Field(default=256.0, ge=0)
    sync_every: int = Field(default=1, ge=1)


@section
class GroupsConfig:
    """Says which groups of 2D parallelism may be chosen.

    Attributes:
        sizes: Ranks of a group of 2D parallelism that may be chosen, beside one group of all ranks;
            all is every divisor. Groups change what is trained, unless gradients are synced.
        sync: What the groups exchange.
        sync_every: Steps from one sync of weights to the next.
    """

    sizes: list[int] | Literal["all"] = Field(default=[])
    sync: GridSync = "weights"
    sync_every: int = Field(default=1, ge=1)

    def __post_init__(self) -> None:
        if self.sizes != "all" and any(size < 1 for size in self.sizes):
            raise ValueError(f"sizes is {self.sizes}, must be numbers of at least 1, or all")
        if self.sync == "gradients" and self.sync_every != 1:
            raise ValueError(
                f"sync_every is {self.sync_every} with sync gradients, which happens in every step"
            )


@section
class SearchConfig:
    """Says what the planner may decide.

    Attributes:
        systems: Shardings to choose from. data_parallel has a dense optimizer of its own;
            table_wise and column_wise are for tables that cannot be fused in the same way.
        tables: Shardings of single tables, by table name.
        row_ranges: Rows of fused tables: ranges of equal load, where an access profile tells it, or
            of equal length.
        hot: Replicas of hot rows.
        groups: 2D parallelism.
        input_dist: How ids of fused tables travel; auto takes the faster.
        codecs: Lossy codecs that may be chosen: a name, for rows and gradients, or forward and
            backward as in sharding.exchange.codecs of a training.
    """

    systems: list[Sharding] = Field(
        default=[s for s in SHARDINGS if s != "data_parallel"], min_length=1
    )
    tables: dict[str, list[Sharding]] = Field(default={})
    row_ranges: Literal["balanced", "even"] = "balanced"
    hot: HotSearchConfig = HotSearchConfig()
    groups: GroupsConfig = GroupsConfig()
    input_dist: Literal["auto", InputDist] = "auto"
    codecs: list[NarrowType | Codecs] = Field(default=[])

    def allowed_codecs(self) -> list[Codecs]:
        """Returns ``codecs`` with a name replaced by what it stands for, both ways."""
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
