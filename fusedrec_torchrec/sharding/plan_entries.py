"""``fused_row_wise()`` and others for hand-written plans, next to TorchRec's ``row_wise()``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    calculate_shard_sizes_and_offsets,
)
from torchrec.distributed.sharding_plan import placement as placement_of
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.codecs.registry import RegistryCodecs
from fusedrec_torchrec.compat.placement import RemoteDevice
from fusedrec_torchrec.exchange.options import InputDist
from fusedrec_torchrec.hot.options import HotRule
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_COLUMN_WISE, FUSED_TABLE_WISE

__all__ = [
    "FusedParameterSharding",
    "GridShardingPlan",
    "fused_by_owners",
    "fused_column_wise",
    "fused_row_wise",
    "fused_table_wise",
    "owner_shards",
    "remote_devices",
]


@dataclass
class FusedParameterSharding(ParameterSharding):
    """A table's part of a plan, with its hot rows.

    Attributes:
        hot_rows: which rows are replicated; None if the sharder's options say, or none are.
        input_dist: how ids of the module's fused tables travel, as in ``ExchangeOptions``; None if
            the sharder's options say.
        codecs: how the table's rows and gradients travel; None if the sharder's options say.
    """

    hot_rows: HotRule | None = None
    input_dist: InputDist | None = None
    codecs: Codecs | RegistryCodecs | None = None


@dataclass
class GridShardingPlan(ShardingPlan):
    """A plan for the ranks of one group of 2D parallelism.

    Attributes:
        sharding_group_size: ranks of a group.
    """

    sharding_group_size: int = 0


@lru_cache(maxsize=8)
def remote_devices(device_type: str, ranks: int, local_ranks: int) -> list[RemoteDevice]:
    """Returns where the shards of each rank are."""
    return [RemoteDevice(placement_of(device_type, rank, local_ranks)) for rank in range(ranks)]


def fused_row_wise(
    rows_per_rank: Sequence[int] | None = None,
    compute_kernel: str = EmbeddingComputeKernel.FUSED.value,
    hot_rows: HotRule | Sequence[int] | None = None,
    input_dist: InputDist | None = None,
    codecs: Codecs | None = None,
) -> ParameterShardingGenerator:
    """Makes a generator for TorchRec's ``construct_module_sharding_plan``.

    Args:
        rows_per_rank: how many consecutive rows each rank owns; TorchRec's even split if None.
        compute_kernel: ``"fused"``, or on CUDA also ``"fused_uvm"`` and ``"fused_uvm_caching"``.
        hot_rows: rows to replicate on every rank: a rule, or their ids.  What the sharder's
            ``HotOptions`` say about the table goes before.
        input_dist: ``"single_shot"`` or ``"exact_counts"``, for all fused tables of the module;
            what the sharder's options say if None.
        codecs: how the table's rows and gradients travel; what the sharder's options say if None.

    Example::

        plan = construct_module_sharding_plan(
            ebc,
            {"table_0": fused_row_wise(), "table_1": fused_row_wise([10, 90])},
            sharder=FusedEmbeddingBagCollectionSharder(),
        )
    """

    def generate(
        param: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[nn.Module],
    ) -> ParameterSharding:
        rows, dim = param.shape
        if rows_per_rank is None:
            sizes, offsets = calculate_shard_sizes_and_offsets(
                param, world_size, local_size, ShardingType.ROW_WISE.value
            )
        else:
            if (
                len(rows_per_rank) != world_size
                or sum(rows_per_rank) != rows
                or min(rows_per_rank) < 0
            ):
                raise ValueError(
                    f"rows_per_rank is {list(rows_per_rank)}, must be {world_size} numbers of at "
                    f"least 0 that add up to {rows}"
                )
            sizes = [[n, dim] for n in rows_per_rank]
            offsets = [[start, 0] for start in list(accumulate(rows_per_rank, initial=0))[:-1]]
        rule = hot_rows
        if rule is not None and not isinstance(rule, HotRule):
            rule = HotRule(ids=tuple(rule))
        return FusedParameterSharding(
            hot_rows=rule,
            input_dist=input_dist,
            codecs=codecs,
            sharding_type=FUSED,
            compute_kernel=compute_kernel,
            ranks=list(range(world_size)),
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata(shard_offsets=offset, shard_sizes=size, placement=device)
                    for size, offset, device in zip(
                        sizes,
                        offsets,
                        remote_devices(device_type, world_size, local_size),
                        strict=True,
                    )
                ]
            ),
        )

    return generate


def fused_table_wise(
    rank: int,
    compute_kernel: str = EmbeddingComputeKernel.FUSED.value,
    input_dist: InputDist | None = None,
    codecs: Codecs | None = None,
) -> ParameterShardingGenerator:
    """Makes a generator for TorchRec's ``construct_module_sharding_plan``: a table on one rank.

    The rank pools, so one row for each distinct bag of a batch travels.  For pooled tables only.

    Args:
        rank: that has the table.
        compute_kernel, input_dist, codecs: as for ``fused_row_wise``.
    """
    return _whole_rows(FUSED_TABLE_WISE, [rank], compute_kernel, input_dist, codecs)


def fused_column_wise(
    ranks: Sequence[int],
    compute_kernel: str = EmbeddingComputeKernel.FUSED.value,
    input_dist: InputDist | None = None,
    codecs: Codecs | None = None,
) -> ParameterShardingGenerator:
    """Makes a generator for TorchRec's ``construct_module_sharding_plan``: columns on some ranks.

    Every one of the ranks pools its columns of a bag.  For pooled tables only.

    Args:
        ranks: that have equally many columns each, in the order of the columns.
        compute_kernel, input_dist, codecs: as for ``fused_row_wise``.
    """
    return _whole_rows(FUSED_COLUMN_WISE, list(ranks), compute_kernel, input_dist, codecs)


def fused_by_owners(
    owners: Sequence[int], hot_rows: HotRule | Sequence[int] | None = None
) -> ParameterShardingGenerator:
    """Makes a generator of the fused sharding in which these ranks pool the table.

    Args:
        owners: none if requesters pool, one that has the whole table, or several that have columns.
        hot_rows: as for ``fused_row_wise``; only where requesters pool.
    """
    if not owners:
        return fused_row_wise(hot_rows=hot_rows)
    assert hot_rows is None, "owners pool no table with hot rows"
    return fused_table_wise(owners[0]) if len(owners) == 1 else fused_column_wise(owners)


def _whole_rows(
    sharding_type: str,
    ranks: list[int],
    compute_kernel: str,
    input_dist: InputDist | None,
    codecs: Codecs | None,
) -> ParameterShardingGenerator:
    def generate(
        param: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[nn.Module],
    ) -> ParameterSharding:
        rows, dim = param.shape
        shards = owner_shards(sharding_type, rows, dim, ranks, world_size)
        devices = remote_devices(device_type, world_size, local_size)
        return FusedParameterSharding(
            input_dist=input_dist,
            codecs=codecs,
            sharding_type=sharding_type,
            compute_kernel=compute_kernel,
            ranks=list(ranks),
            sharding_spec=EnumerableShardingSpec(
                [
                    ShardMetadata(list(offset), list(size), devices[rank])
                    for rank, (offset, size) in zip(ranks, shards, strict=True)
                ]
            ),
        )

    return generate


def owner_shards(
    sharding_type: str, rows: int, dim: int, ranks: Sequence[int], world_size: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns offsets and sizes of the shards of a table that its owners pool.

    Raises:
        ValueError: ranks are not different ones, or columns cannot be divided among them.
    """
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        raise ValueError(
            f"ranks of a {sharding_type} table are {list(ranks)}, must be different ones in "
            f"[0, {world_size})"
        )
    if sharding_type == FUSED_TABLE_WISE and len(ranks) > 1:
        raise ValueError(f"ranks of a {sharding_type} table are {list(ranks)}, must be one")
    columns = dim // len(ranks)
    if columns * len(ranks) != dim or columns % 4:
        raise ValueError(
            f"{dim} columns of a {sharding_type} table are to be split over {len(ranks)} ranks, "
            "each must get the same number, a multiple of 4"
        )
    return [((0, i * columns), (rows, columns)) for i in range(len(ranks))]
