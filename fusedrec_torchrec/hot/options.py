"""What a user can choose about hot rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.core.config import OwnWords, section
from fusedrec_torchrec.hot.cost import CostOptions

__all__ = ["AdaptOptions", "HotOptions", "HotRule"]


@section
class HotRule:
    """Says which rows are hot, by exactly one of the settings.

    Attributes:
        ids: these rows of a table.
        top_k: the most used rows, this many.
        memory: the most used rows that fit into so many bytes on each rank, weights and optimizer
            state together.
        cost_model: the rows that are cheaper to replicate than to exchange, by the cost model.
    """

    ids: OwnWords[Sequence[int] | None] = None
    top_k: int | None = Field(default=None, ge=1)
    memory: int | None = Field(default=None, ge=1)
    cost_model: bool = False

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("ids", "top_k", "memory", "cost_model")
            if getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(given) != 1:
            raise ValueError(
                f"a rule for hot rows sets {' and '.join(given) or 'nothing'}, must set exactly "
                "one of ids, top_k, memory, cost_model"
            )


@section
class AdaptOptions:
    """Says how the hot set follows the data.

    Attributes:
        every: training steps from one look at the counts to the next.
        counters: rows that each rank counts at a time.  A count is too low by at most the rows
            counted divided by this.
        sample: one in so many batches is counted.
        decay: what counts are multiplied with after each look; 1 never forgets.
        margin: a row must be used this many times as often as the row whose place it takes.
    """

    every: int = Field(default=256, ge=1)
    counters: int = Field(default=1 << 16, ge=1)
    sample: int = Field(default=4, ge=1)
    decay: float = Field(default=0.5, ge=0, le=1)
    margin: float = Field(default=1.25, ge=1)

    def __post_init__(self) -> None:
        if self.every % self.sample:
            raise ValueError(f"every is {self.every}, must be a multiple of sample, {self.sample}")


@section
class HotOptions:
    """Says which rows are hot, and how they are kept in sync.

    Attributes:
        rule: which rows of all fused tables of a module together are hot; None if only ``tables``
            says.
        tables: which rows of single tables are hot, by table name.
        hot_set: file of a hot set (``fusedrec profile --hot-set``); for tables that ``tables`` says
            nothing about, instead of ``rule``.
        profile: file of the access profile (``fusedrec profile --save``) that rules count by.
        sync_every: steps from one sync of the replicas to the next.  1 is exact training; with more
            each rank goes on alone in between, see docs/hot-rows.md.
        hot_batches: whether batches may come that have hot rows only.  All ranks then agree before
            each exchange whether they need it, at the cost of a small all-gather.
        adapt: how the hot set follows the data; None if it stays.
        codec: how gradients of hot rows travel; what a codec takes from them is kept and added to
            the row's next gradient.  None: as they are.
        cost: what the cost model assumes, for a rule that asks it.
    """

    rule: HotRule | None = None
    tables: Mapping[str, HotRule] = Field(default={})
    hot_set: Path | None = None
    profile: Path | None = None
    sync_every: int = Field(default=1, ge=1)
    hot_batches: bool = False
    adapt: AdaptOptions | None = None
    codec: CodecOptions | None = None
    cost: CostOptions = CostOptions()

    def __post_init__(self) -> None:
        if self.rule is not None and self.rule.ids is not None:
            raise ValueError("rule.ids must be given table by table, in tables")
        if self.codec is not None and not self.codec.is_exact and self.adapt is not None:
            raise ValueError(
                f"codec is {self.codec.type} with adapt, must be without: what is left of the "
                "gradients of a row would be lost when it is no longer hot"
            )
        if self.rule is not None and self.hot_set is not None:
            raise ValueError("rule and hot_set are both given, must be one of them")
