"""The owner's lookup: one FBGEMM table per bucket, one call per bucket.

FBGEMM's table-batched embedding is built with a single table of all the bucket's local rows, so
a lookup needs no grouping by table: local row numbers are the ids, one per bag.  The update is
FBGEMM's fused optimizer in backward, which sums the gradients of a row asked for by several
ranks before it applies them.

To TorchRec the bucket still looks like its separate tables: weights and optimizer state are
views under TorchRec's own names, so state dicts and optimizer keys are those of stock shardings.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbeddingBag,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    compute_kernel_to_embedding_location,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from fusedrec_torchrec.compat.model_trackers import refuse_tracker
from fusedrec_torchrec.compat.momentum_scale import MomentumScaledRowWiseAdagrad, scale_table
from fusedrec_torchrec.core.regroup import bucket_major, rank_major
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.context import ReceivedRows

if TYPE_CHECKING:
    from fusedrec_torchrec.grid.gradients import SharedUpdates
    from fusedrec_torchrec.hot.rows import HotRows

__all__ = ["BucketKernel", "BucketTable", "FusedLookup", "check_bucket"]

logger = logging.getLogger(__name__)

CPU_OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
)
CUDA_OPTIMIZERS = (
    *CPU_OPTIMIZERS,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
    EmbOptimType.LARS_SGD,
)
CPU_KERNELS = (EmbeddingComputeKernel.FUSED,)
CUDA_KERNELS = (
    *CPU_KERNELS,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
)
DATA_TYPES = (SparseType.FP32, SparseType.FP16)
# State tensors that FBGEMM's optimizers keep per row or per element.
STATE_PREFIXES = ("momentum1", "momentum2", "prev_iter", "row_counter")


def _values(members: tuple[Any, ...]) -> list[str]:
    return [str(member.value) for member in members]


def kernels_of(device_type: str) -> list[str]:
    """Compute kernels that fused tables can use on a device."""
    return _values(CUDA_KERNELS if device_type == "cuda" else CPU_KERNELS)


def optimizers_of(device_type: str) -> tuple[EmbOptimType, ...]:
    """Optimizers that fused tables can use on a device."""
    return CUDA_OPTIMIZERS if device_type == "cuda" else CPU_OPTIMIZERS


def optimizer_of(weight: torch.Tensor, default: EmbOptimType | None) -> EmbOptimType:
    """A table's optimizer: of ``apply_optimizer_in_backward``, else the sharder's, else SGD."""
    classes = getattr(weight, "_optimizer_classes", [None])
    if classes[0] is MomentumScaledRowWiseAdagrad:
        return EmbOptimType.EXACT_ROWWISE_ADAGRAD
    if classes[0] is not None:
        return optimizer_type_to_emb_opt_type(classes[0])
    return default or EmbOptimType.EXACT_SGD


def check_bucket(config: GroupedEmbeddingConfig, device: torch.device) -> None:
    """Refuses what the kernel cannot do, by table, with what it can."""
    kernels, optimizers = kernels_of(device.type), optimizers_of(device.type)
    optimizer = (config.fused_params or {}).get("optimizer", EmbOptimType.EXACT_SGD)
    if not isinstance(optimizer, EmbOptimType):
        raise ValueError(
            f"table {config.embedding_tables[0].name!r} (fused_row_wise on {device.type}): "
            f"optimizer is {optimizer!r}, must be one of EmbOptimType's {_values(optimizers)}"
        )
    if device.type == "cpu" and (config.fused_params or {}).get("weight_decay"):
        logger.warning(
            "weight_decay is set for table %r, but FBGEMM's CPU kernels ignore it, as they do for "
            "stock tables",
            config.embedding_tables[0].name,
        )
    for table in config.embedding_tables:
        where = f"table {table.name!r} (fused_row_wise on {device.type})"
        if table.local_cols % 4 or table.local_cols <= 0:
            raise ValueError(
                f"{where}: embedding_dim is {table.local_cols}, must be a positive multiple of 4"
            )
        if table.compute_kernel.value not in kernels:
            raise ValueError(
                f"{where}: compute_kernel is {table.compute_kernel.value!r}, must be one of "
                f"{kernels}"
            )
        if optimizer not in optimizers:
            raise ValueError(
                f"{where}: optimizer is {optimizer.value!r}, must be one of {_values(optimizers)}"
            )
        if data_type_to_sparse_type(table.data_type) not in DATA_TYPES:
            raise ValueError(
                f"{where}: data_type is {table.data_type.value!r}, must be one of "
                f"{[t.name for t in DATA_TYPES]}"
            )
        if table.use_virtual_table:
            raise ValueError(f"{where}: use_virtual_table is True, must be False")


class BucketTable(SplitTableBatchedEmbeddingBagsCodegen):
    """A single FBGEMM table that shows itself as the tables it is made of.

    FBGEMM finds tables in its buffers through ``embedding_specs`` and lists of physical offsets,
    and uses these only where it hands out views (``split_embedding_weights``,
    ``split_optimizer_states``).  Setting them per table after construction is all it takes.
    """

    def __init__(
        self,
        table_rows: list[int],
        dim: int,
        location: EmbeddingLocation,
        compute_device: ComputeDevice,
        **kwargs: Any,
    ) -> None:
        # FBGEMM tells its devices apart by the table that is not empty: keep one spare row.
        total = max(sum(table_rows), 1)
        super().__init__(
            embedding_specs=[(total, dim, location, compute_device)],
            feature_table_map=[0],
            pooling_mode=PoolingMode.SUM,
            **kwargs,
        )
        starts = list(accumulate(table_rows, initial=0))[:-1]
        self.embedding_specs = [(rows, dim, location, compute_device) for rows in table_rows]
        for prefix in ("weights", *STATE_PREFIXES):
            if not hasattr(self, f"{prefix}_physical_offsets"):
                continue
            elements = sum(
                getattr(self, f"{prefix}_{place}").numel() for place in ("dev", "host", "uvm")
            )
            per_row = dim if elements >= total * dim else 1
            first = getattr(self, f"{prefix}_physical_offsets")[0]
            setattr(self, f"{prefix}_physical_offsets", [first + s * per_row for s in starts])
            placement = getattr(self, f"{prefix}_physical_placements")[0]
            setattr(self, f"{prefix}_physical_placements", [placement] * len(table_rows))

    frozen = False
    """Whether the tables are looked up, but not trained."""

    def freeze(self) -> None:
        """Stops training; the views that TorchRec shows as parameters take it from the table."""
        self.frozen = True
        for name in ("weights_dev", "weights_host", "weights_uvm"):
            getattr(self, name).requires_grad_(False)


class BucketOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's view of FBGEMM's optimizer; tells before somebody looks at its state."""

    def __init__(self, *args: Any) -> None:
        self.before_state: Callable[[], None] | None = None
        super().__init__(*args)

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        if self.before_state is not None:
            self.before_state()
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state = state


class BucketKernel(BatchedFusedEmbeddingBag):
    """TorchRec's embedding kernel around a ``BucketTable``.

    Args:
        config: the tables of the bucket.
        pg: the process group.
        device: of the tables.
        frozen: whether the tables are looked up, but not trained.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        frozen: bool = False,
    ) -> None:
        # Not BatchedFusedEmbeddingBag.__init__: it would build an FBGEMM table per table.
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device)
        device = device or torch.device("cpu")
        on_cuda = device.type == "cuda"
        weights_precision = data_type_to_sparse_type(config.data_type)
        fused_params = dict(config.fused_params or {})
        fused_params.setdefault("cache_precision", weights_precision)
        # Ids are checked on the requester, with an error instead of a silent row 0.
        fused_params.setdefault("bounds_check_mode", BoundsCheckMode.NONE)
        self._settings: dict[str, Any] = {
            "dim": self._local_cols[0],
            "compute_device": ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU,
            "weights_precision": weights_precision,
            "device": device,
            **fused_params,
        }
        self._emb_module = self._made(
            table_rows=self._local_rows,
            location=compute_kernel_to_embedding_location(config.embedding_tables[0].compute_kernel)
            if on_cuda
            else EmbeddingLocation.HOST,
            table_names=["+".join(table.name for table in config.embedding_tables)],
            **self._settings,
        )
        if frozen:
            self.table.freeze()
        self._optim = BucketOptimizer(config, self._emb_module, pg)
        self._offsets = torch.empty(0, dtype=torch.int32, device=device)
        self.init_parameters()

    @property
    def table(self) -> BucketTable:
        return self._emb_module

    @property
    def optimizer(self) -> "BucketOptimizer":
        return self._optim

    def sibling(self, rows: int) -> BucketTable:
        """Another table of the same kind and optimizer, in the memory of the device itself."""
        on_cuda = self._settings["compute_device"] == ComputeDevice.CUDA
        return self._made(
            table_rows=[rows],
            location=EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST,
            **self._settings,
        )

    @staticmethod
    def _made(**settings: Any) -> BucketTable:
        table = BucketTable(**settings)
        scale_table(table)
        return table

    def one_id_per_bag(self, ids: int) -> torch.Tensor:
        """Offsets 0, 1, ..., ids; FBGEMM's pooled kernels are its fastest, also without pooling."""
        if self._offsets.numel() <= ids:
            # On CUDA a pending kernel of another stream may still read the old ones.
            if self._offsets.is_cuda:
                self._offsets.record_stream(torch.cuda.current_stream())
            with torch.inference_mode(False):  # they outlive an inference
                self._offsets = torch.arange(
                    2 * ids + 1, dtype=torch.int32, device=self._offsets.device
                )
        return self._offsets[: ids + 1]

    def forward(self, rows_R: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        # FBGEMM updates a table in backward: what no gradient comes back from stays as it is.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.table.frozen):
            return self.emb_module(indices=rows_R, offsets=self.one_id_per_bag(rows_R.numel()))


class FusedLookup(GroupedPooledEmbeddingsLookup):
    """Local rows in the order of arrival to a flat buffer of rows in the same order.

    Args:
        frozen: names of tables that are looked up, but not trained.
        **kwargs: those of ``GroupedPooledEmbeddingsLookup``.
    """

    def __init__(self, *, frozen: Collection[str] = (), **kwargs: Any) -> None:
        self._frozen = frozenset(frozen)  # the kernels are made by the next line
        super().__init__(**kwargs)

    hot: "HotRows | None" = None
    """Rows whose current values are not in these tables, but in replicas."""
    shared: "SharedUpdates | None" = None
    """Updates that these tables make together with their replicas in other groups."""

    @property
    def kernels(self) -> list[BucketKernel]:
        return list(self._emb_modules)  # type: ignore[arg-type]

    def register_optim_state_tracker_fn(self, record_fn: Any) -> None:
        refuse_tracker(t.name for config in self.grouped_configs for t in config.embedding_tables)

    def flush(self) -> None:
        """TorchRec calls it before a state dict is made."""
        if self.hot is not None:
            self.hot.flush()
        if self.shared is not None:
            self.shared.finish()
        super().flush()

    def purge(self) -> None:
        """TorchRec calls it before a state dict is loaded."""
        if self.hot is not None:
            self.hot.purge()
        if self.shared is not None:
            self.shared.finish()
        super().purge()

    def _create_embedding_kernel(  # type: ignore[override]
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        *_: Any,
    ) -> BaseEmbedding:
        frozen = config.embedding_tables[0].name in self._frozen
        return BucketKernel(config, pg, device, frozen)

    def forward(self, sparse_features: ReceivedRows) -> torch.Tensor:  # type: ignore[override]
        with stage("lookup"):
            return self._look_up(sparse_features)

    def _look_up(self, sparse_features: ReceivedRows) -> torch.Tensor:
        counts = sparse_features.counts_in
        if sparse_features.hot is not None:
            sparse_features.hot.enter()
        rows_per_bucket = bucket_major(sparse_features.rows_R, counts)
        if self.shared is not None:
            found = self.shared.look_up(rows_per_bucket)
        else:
            found = [
                kernel(rows_R)
                for kernel, rows_R in zip(self._emb_modules, rows_per_bucket, strict=True)
            ]
        elements = [
            [n * rows_RD.size(1) for n, rows_RD in zip(row, found, strict=True)] for row in counts
        ]
        return rank_major([rows_RD.view(-1) for rows_RD in found], elements)

    def prefetch(  # type: ignore[override]
        self, sparse_features: ReceivedRows, forward_stream: torch.Stream | None = None
    ) -> None:
        """Brings rows of host memory into the device's cache ahead of the lookup."""
        rows_per_bucket = bucket_major(sparse_features.rows_R, sparse_features.counts_in)
        for kernel, rows_R in zip(self._emb_modules, rows_per_bucket, strict=True):
            location = kernel.emb_module.embedding_specs[0][2]
            if location == EmbeddingLocation.MANAGED_CACHING:
                kernel.emb_module.prefetch(
                    indices=rows_R,
                    offsets=kernel.one_id_per_bag(rows_R.numel()),
                    forward_stream=forward_stream,
                )
