"""Time and memory of fused tables; stock tables are estimated by TorchRec's own estimators."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import (
    DEFAULT_PERF_ESTIMATOR,
    UVM_CACHING_RATIO,
    kernel_bw_lookup,
)
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)

from fusedrec_torchrec.compat.optimizers import OPTIMIZERS, STATE_BYTES, optimizer_of
from fusedrec_torchrec.planner.cost.memory import BATCH_BYTES_PER_ID, buffer_bytes, owner_bytes
from fusedrec_torchrec.planner.cost.step import fused_step
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad
from fusedrec_torchrec.planner.option_load import is_fused, option_load
from fusedrec_torchrec.sharding.sharding_type import OWNER_POOLED

__all__ = ["FusedPerfEstimator", "FusedStorageEstimator", "optimizer_bytes"]

ID_BYTES = 4  # on the wire
# What an id costs FBGEMM's CPU kernels besides its columns, in columns.  Measured, lookup and
# update of 1506 bags of 100 ids: 5.2 ms with 64 columns, 4.2 ms with 32.
ID_COLUMNS = 100
ROW_ELEMENT_BYTES = 4  # rows are looked up, travel and pool as float32 unless told otherwise


def optimizer_bytes(optimizer: EmbOptimType, rows: int, dim: int) -> tuple[int, int]:
    """Returns the bytes of a shard's optimizer state, per element and per row.

    Two numbers, because FBGEMM keeps per-row state on the device even if the table is in host
    memory.  An optimizer we do not know counts as Adam.
    """
    state = OPTIMIZERS.get(optimizer, OPTIMIZERS[EmbOptimType.ADAM])
    return rows * dim * state.per_element * STATE_BYTES, rows * state.per_row * STATE_BYTES


class FusedPerfEstimator(ShardEstimator):
    """Estimates the time of fused options; hands others to TorchRec's default estimator.

    Args:
        topology: the ranks.
        constraints: TorchRec's, for pooling factors.
        known: what batches ask of tables that somebody knows, by table; the enumerator fills it in
            before it asks for estimates.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        known: Mapping[str, TableLoad] | None = None,
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._known = {} if known is None else known
        self._stock = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=topology, constraints=constraints
        )

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        stock = [option for option in sharding_options if not is_fused(option)]
        self._stock.estimate(stock, sharder_data_map=sharder_data_map)
        for option in filter(is_fused, sharding_options):
            self._estimate_fused(option)

    def _estimate_fused(self, option: ShardingOption) -> None:
        topology, (load, batch) = self._topology, self._load(option)
        ranks = topology.world_size
        memory_bw = kernel_bw_lookup(
            topology.compute_device,
            option.compute_kernel,
            topology.hbm_mem_bw,
            topology.ddr_mem_bw,
            topology.hbm_to_ddr_mem_bw,
            option.cache_load_factor,
        )
        assert memory_bw is not None
        wire_bw = topology.comms_bandwidths.get_bw(
            topology.intra_group_size, ranks, CollectiveType.ALL_TO_ALL
        )
        if option.sharding_type in OWNER_POOLED:
            self._estimate_owned(option, load, batch, memory_bw, wire_bw)
            return
        row_bytes = load.dim * load.element_bytes
        ranges = np.cumsum([0, *(shard.size[0] for shard in option.shards)])
        step = fused_step([load], batch, ranks, [ranges])
        lookup_W, rows_W = (
            next(stage.amount_W for stage in step.stages if stage.name == name).tolist()
            for name in ("lookup", "rows")
        )
        for shard, lookup, rows in zip(option.shards, lookup_W, rows_W, strict=True):
            # TorchRec counts rows on the wire in the table's data type.
            sent = rows * load.element_bytes / NUMBER_BYTES
            # As TorchRec counts: rows read from the table and outputs written, no copies between.
            forward = (lookup + batch * load.outputs * row_bytes) / memory_bw
            shard.perf = Perf(
                fwd_compute=forward,
                fwd_comms=sent / wire_bw,
                bwd_compute=forward * topology.bwd_compute_multiplier,
                bwd_comms=sent / wire_bw,
                input_dist_comms=sent / row_bytes * ID_BYTES / wire_bw,
            )

    def _load(self, option: ShardingOption) -> tuple[TableLoad, int]:
        """Returns what an option's table is asked for, and by how many samples of a rank."""
        known = self._known.get(option.name)
        if known is None:
            return option_load(option, self._constraints), 1
        return known, option.batch_size

    def _estimate_owned(
        self,
        option: ShardingOption,
        load: TableLoad,
        batch: int,
        memory_bw: float,
        wire_bw: float,
    ) -> None:
        """Estimates a table that its owners pool; what requesters do is the same on all ranks."""
        owners, ranks = len(option.shards), self._topology.world_size
        step = fused_step([load], batch, ranks, exact_counts=True, owners=[range(owners)])
        amounts = {stage.name: float(stage.amount_W[0]) for stage in step.stages}
        bags, element = load.distinct_bags(batch), load.element_bytes / NUMBER_BYTES
        words = bags.bags + bags.ids * (2 if load.weighted else 1)
        written = ranks * bags.bags * load.dim / owners * load.element_bytes
        forward = (amounts["lookup"] + amounts["bag_lookup"] + written) / memory_bw
        if self._topology.compute_device == "cpu":  # every owner of columns goes through all ids
            columns = load.dim / owners
            forward *= owners * (ID_COLUMNS + columns) / (ID_COLUMNS + load.dim)
        sent = amounts["rows"] * element / wire_bw
        for shard in option.shards:
            shard.perf = Perf(
                fwd_compute=forward,
                fwd_comms=sent,
                bwd_compute=forward * self._topology.bwd_compute_multiplier,
                bwd_comms=sent,
                input_dist_comms=(ranks - 1) * words * ID_BYTES / wire_bw,
            )


class FusedStorageEstimator(ShardEstimator):
    """Estimates the memory of fused options: weights, optimizer state, buffers of a batch.

    Weights and state are exact.  Buffers are what a step needs at most if ids are uniform.
    """

    def __init__(
        self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._stock = EmbeddingStorageEstimator(topology=topology, constraints=constraints)

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        stock = [option for option in sharding_options if not is_fused(option)]
        self._stock.estimate(stock, sharder_data_map=sharder_data_map)
        for option in filter(is_fused, sharding_options):
            fused_params = sharder_data_map[option.module_type_key].fused_params
            for shard in option.shards:
                shard.storage = self._storage(option, shard.size, fused_params)

    def _storage(
        self, option: ShardingOption, size: list[int], fused_params: dict[str, Any]
    ) -> Storage:
        load = option_load(option, self._constraints)
        rows, columns = size[0], size[1] if size[0] else load.dim
        weights = rows * columns * load.element_bytes
        element_state, row_state = optimizer_bytes(
            optimizer_of(option.tensor, fused_params.get("optimizer")), rows, columns
        )
        table = weights + element_state
        buffers = math.ceil(self._buffers(option, load, rows))

        if self._topology.compute_device != "cuda":
            return Storage(hbm=0, ddr=table + row_state + buffers)
        if option.compute_kernel == EmbeddingComputeKernel.FUSED.value:
            return Storage(hbm=table + row_state + buffers, ddr=0)
        cache = 0
        if option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
            load_factor = option.cache_load_factor or fused_params.get("cache_load_factor")
            cache = math.ceil(weights * (load_factor or UVM_CACHING_RATIO))
        return Storage(hbm=cache + row_state + buffers, ddr=table)

    def _buffers(self, option: ShardingOption, load: TableLoad, rows: int) -> float:
        """Returns the bytes that a batch needs on the rank of a shard."""
        ranks = self._topology.world_size
        if option.sharding_type in OWNER_POOLED:
            kind, owners = option.sharding_type, len(option.shards)
            of_owner = owner_bytes(load, 1, ranks, kind, owners)
            return of_owner + buffer_bytes(load, kind, 1, ranks)
        ids, row_bytes = load.ids(1), load.dim * ROW_ELEMENT_BYTES
        share = rows / max(load.rows, 1)
        looked_up = ranks * min(ids * share, rows) * row_bytes
        received = min(ids, load.rows) * row_bytes
        output = load.outputs * row_bytes
        # Rows and output have gradients of the same size.
        return ids * BATCH_BYTES_PER_ID + 2 * (looked_up + received + output)
