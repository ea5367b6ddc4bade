"""Time and memory of fused tables; stock tables are estimated by TorchRec's own estimators."""

import math
from typing import Any

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

from fusedrec_torchrec.compat.optimizers import optimizer_of
from fusedrec_torchrec.planner.cost.memory import BATCH_BYTES_PER_ID
from fusedrec_torchrec.planner.enumerator import is_fused
from fusedrec_torchrec.planner.workload import TableWorkload

__all__ = ["FusedPerfEstimator", "FusedStorageEstimator", "optimizer_bytes"]

STATE_BYTES = 4  # FBGEMM keeps optimizer state in float32
ID_BYTES = 4  # on the wire
ROW_ELEMENT_BYTES = 4  # rows are looked up, travel and pool as float32 unless told otherwise

# Of each optimizer, how many states it keeps per element of a row, and how many per row.
STATES: dict[EmbOptimType, tuple[int, int]] = {
    EmbOptimType.EXACT_SGD: (0, 0),
    EmbOptimType.EXACT_ADAGRAD: (1, 0),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (0, 1),
    EmbOptimType.ADAM: (2, 0),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (1, 1),
    EmbOptimType.LAMB: (2, 0),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: (1, 1),
    EmbOptimType.LARS_SGD: (1, 0),
}


def optimizer_bytes(optimizer: EmbOptimType, rows: int, dim: int) -> tuple[int, int]:
    """Bytes of a shard's optimizer state, per element and per row.

    Two numbers, because FBGEMM keeps per-row state on the device even if the table is in host
    memory.  An optimizer we do not know counts as Adam.
    """
    per_element, per_row = STATES.get(optimizer, STATES[EmbOptimType.ADAM])
    return rows * dim * per_element * STATE_BYTES, rows * per_row * STATE_BYTES


class FusedPerfEstimator(ShardEstimator):
    """Estimates fused options; hands the others to TorchRec's default estimator."""

    def __init__(
        self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._stock = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=topology, constraints=constraints
        )

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        stock = [option for option in sharding_options if not is_fused(option)]
        self._stock.estimate(stock, sharder_data_map=sharder_data_map)
        for option in filter(is_fused, sharding_options):
            self._estimate_fused(option)

    def _estimate_fused(self, option: ShardingOption) -> None:
        topology, work = self._topology, TableWorkload(option, self._constraints)
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
        row_bytes = work.dim * work.element_size
        for shard in option.shards:
            share = shard.size[0] / max(work.rows, 1)
            # Every rank asks this shard for its share of the distinct rows of its batch.
            asked = ranks * work.unique * share
            remote = asked * (ranks - 1) / max(ranks, 1)
            # As TorchRec counts: rows read from the table and outputs written, no copies between.
            forward = (asked + work.output_rows) * row_bytes / memory_bw
            shard.perf = Perf(
                fwd_compute=forward,
                fwd_comms=remote * row_bytes / wire_bw,
                bwd_compute=forward * topology.bwd_compute_multiplier,
                bwd_comms=remote * row_bytes / wire_bw,
                input_dist_comms=remote * ID_BYTES / wire_bw,
            )


class FusedStorageEstimator(ShardEstimator):
    """Memory of fused options: weights, optimizer state and the buffers of a batch.

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
                shard.storage = self._storage(option, shard.size[0], fused_params)

    def _storage(self, option: ShardingOption, rows: int, fused_params: dict[str, Any]) -> Storage:
        work = TableWorkload(option, self._constraints)
        weights = rows * work.dim * work.element_size
        element_state, row_state = optimizer_bytes(
            optimizer_of(option.tensor, fused_params.get("optimizer")), rows, work.dim
        )
        table = weights + element_state

        row_bytes = work.dim * ROW_ELEMENT_BYTES
        share = rows / max(work.rows, 1)
        ranks = self._topology.world_size
        looked_up = ranks * min(work.ids * share, rows) * row_bytes
        received = min(work.ids, work.rows) * row_bytes
        output = work.output_rows * row_bytes
        # Rows and output have gradients of the same size.
        buffers = work.ids * BATCH_BYTES_PER_ID + 2 * (looked_up + received + output)
        buffers = math.ceil(buffers)

        if self._topology.compute_device != "cuda":
            return Storage(hbm=0, ddr=table + row_state + buffers)
        if option.compute_kernel == EmbeddingComputeKernel.FUSED.value:
            return Storage(hbm=table + row_state + buffers, ddr=0)
        cache = 0
        if option.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value:
            load_factor = option.cache_load_factor or fused_params.get("cache_load_factor")
            cache = math.ceil(weights * (load_factor or UVM_CACHING_RATIO))
        return Storage(hbm=cache + row_state + buffers, ddr=table)
