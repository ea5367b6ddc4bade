"""Fused tables as a TorchRec ``EmbeddingSharding``: plan in, stages of the data path out.

Derives from TorchRec's row-wise sharding, which already describes tables split by row ranges
over all ranks, with their ShardedTensor and DTensor metadata.  Tables that their owners pool are
described by TorchRec's table-wise and column-wise shardings.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_configs import PoolingType

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.codecs.wire import Wire, build, build_backward
from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.id_group import id_group
from fusedrec_torchrec.compat.table_shards import column_wise_shards, table_wise_shards
from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.all_ranks import raise_naming_ranks
from fusedrec_torchrec.core.fingerprint import check_same_on_all_ranks, facts_of
from fusedrec_torchrec.exchange.bag_layout import BagLayout
from fusedrec_torchrec.exchange.buckets import (
    BucketedTables,
    check_bucket,
    group_into_buckets,
    slot_names,
)
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.early_dist import EarlyDist
from fusedrec_torchrec.exchange.input_dist import FusedInputDist
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.exchange.output_dist import FusedOutputDist
from fusedrec_torchrec.exchange.replication import Replication
from fusedrec_torchrec.hot.choose import Chosen, choose
from fusedrec_torchrec.hot.index import HotIndex
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.hot.rows import HotRows
from fusedrec_torchrec.sharding.early_checks import check_early
from fusedrec_torchrec.sharding.module_settings import ModuleSettings, codecs_of, settings_of
from fusedrec_torchrec.sharding.replicated_env import ReplicatedEnv
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    OWNER_POOLED,
)

__all__ = ["FusedEmbeddingSharding"]

logger = logging.getLogger(__name__)


class FusedEmbeddingSharding(
    BaseRwEmbeddingSharding[FusedShardingContext, ReceivedRows, torch.Tensor, torch.Tensor]
):
    """All fused tables of one module, whatever their types.

    Args:
        sharding_infos: the tables and their part of the plan.
        env: ranks and process group.
        device: where tables and batches live.
        pooled: whether ids are pooled (EmbeddingBagCollection) or not (EmbeddingCollection).
        qcomm_codecs_registry: TorchRec's codecs; those for fused tables stand in the plan already.
    """

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        pooled: bool = True,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if env.process_group is None:
            raise ValueError("env.process_group is None, fused tables need a process group")
        ranks, everyone = list(range(env.world_size)), None
        if isinstance(env, ShardingEnv2D):
            ranks = torch.distributed.get_process_group_ranks(env.sharding_pg)
            everyone = env.process_group
        settings = settings_of(sharding_infos)
        for info in sharding_infos:
            if is_owner_pooled(info):
                check_columns(info, ranks)
                check_owner_can_pool(info, pooled, settings)
            else:
                check_row_ranges(info, ranks)
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        self._id_group = id_group(self._group(), self._device)
        self._everyone = None if everyone is None else id_group(everyone, self._device)
        self.settings = settings
        self._pooled = pooled
        self._weighted = pooled and any(i.embedding_config.is_weighted for i in sharding_infos)
        self._mean_tables = {
            info.embedding_config.name
            for info in sharding_infos
            if info.embedding_config.pooling == PoolingType.MEAN
        }
        codecs = {info.embedding_config.name: codecs_of(info) for info in sharding_infos}
        self._frozen = {
            info.embedding_config.name for info in sharding_infos if not info.param.requires_grad
        }
        self._buckets = group_into_buckets(
            self._shard(sharding_infos),
            codecs=codecs,
            frozen=self._frozen,
            owner_pooled={i.embedding_config.name for i in sharding_infos if is_owner_pooled(i)},
            # That of the model, which batches most likely have, too: no ids need to be moved.
            order=[info.embedding_config.name for info in sharding_infos],
        )
        # What TorchRec asks of a sharding is answered by all tables, on whatever ranks they are.
        self._grouped_embedding_configs = [bucket.config for bucket in self._buckets]
        self._grouped_embedding_configs_per_rank = [
            [bucket.per_rank[rank] for bucket in self._buckets] for rank in range(self._world_size)
        ]
        types = {i.embedding_config.name: i.param_sharding.sharding_type for i in sharding_infos}
        for bucket in self._buckets:
            check_bucket(bucket, self._device, types)
        self.tables = BucketedTables(self._buckets)
        self._hot = self._choose_hot_rows()
        self.layout = ExchangeLayout(
            self.tables, self._device, None if self._hot is None else self._hot.capacity
        )
        self._bag_layout = BagLayout(self.tables, self._device)
        self.wires = self._wires(codecs)

    @property
    def counted_on_device(self) -> bool:
        """Whether the ids of a batch need not be counted on the host, where there are kernels.

        They must be where a hot row is not found by a hash table.
        """
        return self._hot is None or native.available()

    @property
    def takes_any_order(self) -> bool:
        """Whether features may be in another order than slots, where ids are not counted.

        Sequences, learned weights and bags that owners pool go by the order of slots.
        """
        return self._pooled and self.settings.processed is None and not self._bag_layout.buckets

    @cached_property
    def lookup(self) -> FusedLookup:
        """The lookup of the tables on this rank, with what replicates their rows."""
        return FusedLookup(
            rank=self._rank,
            buckets=self._buckets,
            pg=self._pg,
            device=self._device,
            frozen=self._frozen,
            replicate=self._replicate,
        )

    def _replicate(self, kernels: Sequence[BucketKernel]) -> list[Replication]:
        """Makes what replicates rows of the tables."""
        replications: list[Replication] = []
        if self._hot is not None:
            index = HotIndex(self.layout, self._hot.home_keys(self.layout))
            hot = self.settings.hot
            of_rows = [kernels[b.physical] for b in self._buckets if not b.owner_pooled]
            replications.append(
                HotRows(self._group(), self._id_group, self.layout, of_rows, index, hot)
            )
        if isinstance(self._env, ReplicatedEnv):
            replications.extend(self._env.replications(kernels))
        return replications

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> FusedLookup:
        return self.lookup

    def create_input_dist(self, device: torch.device | None = None) -> FusedInputDist:
        names = slot_names(self.tables.tables)
        mean_S = torch.tensor([table in self._mean_tables for _, table in names])
        return FusedInputDist(
            self._id_group,
            self.layout,
            self.settings.options,
            mean_S if self._pooled else None,
            self._weighted,
            self.lookup.replication,
            self._everyone,
            self._bag_layout,
            learned_weights=self.settings.processed is not None,
        )

    def create_output_dist(self, device: torch.device | None = None) -> FusedOutputDist:
        dims = [bucket.dim for bucket in self.tables.buckets]
        return FusedOutputDist(self._group(), dims, self.wires, self.lookup.changes)

    def create_early_dist(self) -> EarlyDist | None:
        """Makes what sends rows of the next batch early; None if all travel late.

        Raises:
            ValueError: rows may change that the current batch does not ask for.
        """
        kernels = [self.lookup.kernels[bucket.physical] for bucket in self._buckets]
        check_early(self._buckets, kernels, self._device, self._everyone is not None)
        wire = None if self.wires is None else self.wires[0]
        early = [
            kernel if wire is None or wire.codecs[k].encodes_rows_apart else None
            for k, kernel in enumerate(kernels)
        ]
        if all(kernel is None for kernel in early):
            return None
        dims = [bucket.dim for bucket in self.tables.buckets]
        return EarlyDist(self._group(), early, dims, wire, self.lookup.changes)

    def embedding_dims(self) -> list[int]:
        return [
            table.embedding_dim
            for config in self._grouped_embedding_configs
            for table in config.embedding_tables
            for _ in table.feature_names
        ]

    def _shard(
        self, sharding_infos: list[EmbeddingShardingInfo]
    ) -> list[list[ShardedEmbeddingTable]]:
        kinds = [
            (FUSED, super()._shard),
            (FUSED_TABLE_WISE, partial(table_wise_shards, self)),
            (FUSED_COLUMN_WISE, partial(column_wise_shards, self)),
        ]
        shards = [
            shard([info for info in sharding_infos if info.param_sharding.sharding_type == kind])
            for kind, shard in kinds
        ]
        return [
            [table for tables in of_rank for table in tables]
            for of_rank in zip(*shards, strict=True)
        ]

    def _choose_hot_rows(self) -> Chosen | None:
        """Returns the hot rows to begin with; None if nobody asks for any."""
        hot = self.settings.hot
        of_rows = [bucket for bucket in self._buckets if not bucket.owner_pooled]
        chosen = self._choose_on_all_ranks(BucketedTables(of_rows), hot) if of_rows else None
        if chosen is None:
            if hot != HotOptions():
                logger.warning(
                    "hot: settings are given, but no rows: set rule, tables or hot_set, or "
                    "hot_rows in the plan"
                    if of_rows
                    else "hot: settings are given, but the owners of all tables pool them, and "
                    "rows that owners pool are not replicated: make tables fused_row_wise"
                )
        elif self._everyone is not None:
            raise ValueError(
                "hot rows are not supported with 2D parallelism: their current values are in "
                "replicas within a group, and groups sync the rows of the tables; remove the hot "
                "rows, or use DistributedModelParallel"
            )
        return chosen

    def _choose_on_all_ranks(self, tables: BucketedTables, hot: HotOptions) -> Chosen | None:
        """Chooses hot rows; every rank reads files of its own, so ranks compare their choice."""
        if not (hot.tables or hot.rule is not None or hot.hot_set is not None):
            return None
        chosen, problem = None, None
        try:
            chosen = choose(hot, tables)
        except (ValueError, OSError) as error:
            problem = str(error)
        raise_naming_ranks(problem, self._group())
        assert chosen is not None
        facts = facts_of("capacity of buckets", chosen.capacity)
        # Replicas must stay equal to the last bit, so all ranks must sum in the same order.
        facts |= facts_of("use of C++ operators", native.available_on(self._device))
        for table, ids in zip(tables.tables, chosen.ids, strict=True):
            facts |= facts_of(f"hot rows of table {table.name!r}", ids)
        check_same_on_all_ranks("hot rows", facts, self._group(), self._device)
        return chosen

    def _wires(self, codecs: Mapping[str, Any]) -> tuple[Wire, Wire] | None:
        """Returns the codecs of rows and of gradients; None if all travel as they are."""
        tables, buckets = self.tables.tables, self.tables.buckets
        of_bucket = [codecs[tables[b.first_table].name] for b in buckets]
        if all(codecs_or_none is None for codecs_or_none in of_bucket):
            return None
        for config in self._grouped_embedding_configs:
            check_output_type(config, codecs)
        dims = [bucket.dim for bucket in buckets]
        both = [codecs_or_none or Codecs() for codecs_or_none in of_bucket]
        forward = [build(c.forward, d, self._device) for c, d in zip(both, dims, strict=True)]
        backward = [
            build_backward(c.backward, codec, dim, self._device)
            for c, codec, dim in zip(both, forward, dims, strict=True)
        ]
        return Wire(forward, dims), Wire(backward, dims)

    def _group(self) -> torch.distributed.ProcessGroup:
        assert self._pg is not None
        return self._pg


def check_output_type(config: GroupedEmbeddingConfig, codecs: Mapping[str, Any]) -> None:
    """Refuses codecs for rows that are not float32."""
    given = (config.fused_params or {}).get("output_dtype", SparseType.FP32)
    for table in config.embedding_tables:
        if codecs[table.name] is not None and given != SparseType.FP32:
            raise ValueError(
                f"table {table.name!r} has codecs and fused_params has output_dtype {given}, must "
                "be fp32: codecs work on float32 rows"
            )


def is_owner_pooled(info: EmbeddingShardingInfo) -> bool:
    """Returns whether the owners of a table pool its bags."""
    return info.param_sharding.sharding_type in OWNER_POOLED


def check_owner_can_pool(
    info: EmbeddingShardingInfo, pooled: bool, settings: ModuleSettings
) -> None:
    """Refuses tables that only requesters can pool."""
    name, kind = info.embedding_config.name, info.param_sharding.sharding_type
    if not pooled:
        raise ValueError(
            f"table {name!r} of an EmbeddingCollection is {kind}, must be {FUSED}: sequences are "
            f"not pooled; {FUSED}(rows_per_rank=...) can put a whole table on one rank"
        )
    if settings.processed is not None:
        raise ValueError(
            f"table {name!r} is {kind} and its features are processed, must be {FUSED}: the "
            "gradients of learned weights need the rows, which stay with their owner"
        )
    if name in settings.hot.tables:
        raise ValueError(
            f"table {name!r} is {kind} and has hot rows, must be {FUSED}: bags are pooled where "
            "the table is, not where a replica is"
        )


def check_columns(info: EmbeddingShardingInfo, wanted: Sequence[int]) -> None:
    """Refuses plans other than equally many columns on each of some ranks, in order."""
    config, spec = info.embedding_config, info.param_sharding.sharding_spec
    kind = info.param_sharding.sharding_type
    where = f"plan of table {config.name!r} ({kind})"
    if not isinstance(spec, EnumerableShardingSpec):
        raise ValueError(f"{where}: sharding_spec is {spec}, must be an EnumerableShardingSpec")
    ranks = [shard.placement.rank() if shard.placement else None for shard in spec.shards]
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(wanted):
        raise ValueError(
            f"{where}: shards lie on ranks {ranks}, must be different ones of {list(wanted)}"
        )
    if kind == FUSED_TABLE_WISE and len(ranks) > 1:
        raise ValueError(f"{where}: there are {len(ranks)} shards, must be one")
    columns = config.embedding_dim // len(ranks)
    for i, shard in enumerate(spec.shards):
        size, offset = list(shard.shard_sizes), list(shard.shard_offsets)
        if offset != [0, i * columns] or size != [config.num_embeddings, columns]:
            raise ValueError(
                f"{where}: shard of rank {ranks[i]} has offset {offset} and size {size}, must have "
                f"offset {[0, i * columns]} and size {[config.num_embeddings, columns]}: all rows, "
                f"and as many of the {config.embedding_dim} columns as the others"
            )


def check_row_ranges(info: EmbeddingShardingInfo, wanted: Sequence[int]) -> None:
    """Refuses plans other than one contiguous row range per rank, in rank order."""
    config, spec = info.embedding_config, info.param_sharding.sharding_spec
    where = f"plan of table {config.name!r} (fused_row_wise)"
    if not isinstance(spec, EnumerableShardingSpec):
        raise ValueError(f"{where}: sharding_spec is {spec}, must be an EnumerableShardingSpec")
    ranks = [shard.placement.rank() if shard.placement else None for shard in spec.shards]
    if ranks != list(wanted):
        raise ValueError(
            f"{where}: shards lie on ranks {ranks}, must be one shard on each of ranks "
            f"{list(wanted)}, in this order (a shard may have no rows)"
        )
    _check_contiguous(where, spec.shards, config.num_embeddings, config.embedding_dim)


def _check_contiguous(where: str, shards: Sequence[Any], rows: int, dim: int) -> None:
    start = 0
    for shard in shards:
        size, offset = list(shard.shard_sizes), list(shard.shard_offsets)
        if offset != [start, 0] or size[1] != dim or size[0] < 0:
            raise ValueError(
                f"{where}: shard of rank {shard.placement.rank()} has offset {offset} and size "
                f"{size}, must have offset {[start, 0]} and all {dim} columns"
            )
        start += size[0]
    if start != rows:
        raise ValueError(f"{where}: shards have {start} rows in total, must be {rows}")
