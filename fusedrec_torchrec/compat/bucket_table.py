"""One FBGEMM table for all tables of a bucket, which looks like separate tables to TorchRec.

FBGEMM's table-batched embedding is built with a single table of all the bucket's local rows, so a
lookup needs no grouping by table: local row numbers are the ids.  Weights and optimizer state are
shown as views under TorchRec's own names, so state dicts and optimizer keys are those of stock
shardings.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
    SplitState,
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
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    compute_kernel_to_embedding_location,
)
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from fusedrec_torchrec.compat.fbgemm_table import is_cached
from fusedrec_torchrec.compat.joint_table import JointPart
from fusedrec_torchrec.compat.momentum_scale import scale_table
from fusedrec_torchrec.compat.optimizers import OPTIMIZERS, STATE_PREFIXES
from fusedrec_torchrec.compat.table_layout import TableLayout

__all__ = [
    "BucketKernel",
    "BucketTable",
    "LookupListener",
    "OptimizerSettings",
    "settings_of_tables",
]

MOST_LAYOUTS = 64  # of groups of tables that are remembered

LookupListener = Callable[[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
"""Called before a lookup, like a hook of torch's: with the table, and what it is given."""


def settings_of_tables(config: GroupedEmbeddingConfig, device: torch.device) -> dict[str, Any]:
    """Returns the settings of FBGEMM's table of some tables, but for its shape and its place."""
    weights_precision = data_type_to_sparse_type(config.data_type)
    fused_params = dict(config.fused_params or {})
    fused_params.setdefault("cache_precision", weights_precision)
    # Ids are checked on the requester, with an error instead of a silent row 0.
    fused_params.setdefault("bounds_check_mode", BoundsCheckMode.NONE)
    return {"weights_precision": weights_precision, "device": device, **fused_params}


class OptimizerSettings(NamedTuple):
    """The settings of a table's optimizer at one time, to be compared and set as a whole.

    Attributes:
        learning_rate: as the user has it.
        others: FBGEMM's other settings, eps and weight decay among them.
    """

    learning_rate: float
    others: Any


class BucketTable(SplitTableBatchedEmbeddingBagsCodegen):
    """A single FBGEMM table that shows itself as the tables it is made of.

    FBGEMM finds tables in its buffers through ``embedding_specs`` and lists of physical offsets,
    and uses these only where it hands out views (``split_embedding_weights``,
    ``split_optimizer_states``).  Setting them per table after construction is all it takes.

    Args:
        table_rows: rows of each table on this rank.
        dim: columns of all of them.
        location: the memory they are in.
        compute_device: the device that looks them up.
        frozen: whether they are looked up, but not trained.
        part: of a joint table, whose memory they are in; None if they have memory of their own.
        **kwargs: those of ``SplitTableBatchedEmbeddingBagsCodegen``.

    Attributes:
        shown_tables: during a lookup of some tables, with row numbers of theirs, which these are;
            of none if rows are numbered in the bucket.
    """

    def __init__(
        self,
        table_rows: list[int],
        dim: int,
        location: EmbeddingLocation,
        compute_device: ComputeDevice,
        frozen: bool = False,
        part: JointPart | None = None,
        **kwargs: Any,
    ) -> None:
        self._part = part  # FBGEMM asks for memory in the next line
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
        if part is not None:
            part.share_steps(self)
        self._listeners: list[LookupListener] = []
        self.shown_tables: tuple[int, ...] = ()
        self.frozen = frozen
        if frozen:  # the views that TorchRec shows as parameters take it from here
            for name in ("weights_dev", "weights_host", "weights_uvm"):
                getattr(self, name).requires_grad_(False)
        scale_table(self)

    def _apply_split(self, split: SplitState, prefix: str, **kwargs: Any) -> None:
        """Makes weights or a state of the optimizer; a joint table has the memory already."""
        if self._part is None:
            super()._apply_split(split, prefix, **kwargs)
            return
        memory = self._part.memory(prefix)
        assert (memory.numel(), split.host_size, split.uvm_size) == (split.dev_size, 0, 0)
        nothing = SplitState(0, 0, 0, split.placements, split.offsets)
        super()._apply_split(nothing, prefix, **kwargs)
        setattr(self, f"{prefix}_dev", memory)

    def listen(self, listener: LookupListener) -> None:
        """Has a function called before every lookup of rows, also by a joint table."""
        self._listeners.append(listener)
        self.register_forward_pre_hook(listener, with_kwargs=True)

    def announce(self, rows_R: torch.Tensor) -> None:
        """Tells listeners of rows that a joint table is about to look up."""
        for listener in self._listeners:
            listener(self, (), {"indices": rows_R})

    @property
    def rows(self) -> int:
        """The number of rows of all tables on this rank."""
        return sum(spec[0] for spec in self.embedding_specs)

    @property
    def is_cached(self) -> bool:
        """Whether rows are in host memory, and the device has a cache of them."""
        return is_cached(self)

    @property
    def prefetches(self) -> bool:
        """Whether rows of a batch stay in the device's cache while those of the next come in."""
        return self.prefetch_pipeline

    @property
    def optimizer_type(self) -> EmbOptimType:
        """Which of FBGEMM's optimizers updates the rows."""
        return self.optimizer

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        """The optimizer's settings as they are now."""
        return OptimizerSettings(self.get_learning_rate(), self.optimizer_args)

    @optimizer_settings.setter
    def optimizer_settings(self, settings: OptimizerSettings) -> None:
        self.set_learning_rate(settings.learning_rate)
        self.optimizer_args = settings.others

    @property
    def clips_gradients(self) -> bool:
        """Whether the optimizer clips gradients."""
        return bool(self.optimizer_args.gradient_clipping)

    @property
    def counts_steps_of_rows(self) -> bool:
        """Whether the optimizer's weight decay counts the steps of each row."""
        return hasattr(self, "prev_iter_physical_offsets")

    @property
    def rounds_at_random(self) -> bool:
        """Whether an update rounds at random: on CUDA; on CPU FBGEMM rounds to nearest."""
        return (
            self.optimizer_args.stochastic_rounding
            and self.weights_precision == SparseType.FP16
            and not self.weights_host.numel()
        )

    @property
    def zero_gradients_change_rows(self) -> bool:
        """Whether a gradient of zero changes a row: by weight decay, or by 0 / 0 without eps."""
        return self.decays_weights or not self.optimizer_args.eps

    @property
    def decays_weights(self) -> bool:
        """Whether the optimizer has a weight decay."""
        return bool(self.optimizer_args.weight_decay)

    def forget_cache(self) -> None:
        """Forgets rows in the device's cache, if there is one: those in host memory are newer."""
        if self.lxu_cache_weights.numel():
            self.reset_cache_states()

    def row_tensors(self) -> list[torch.Tensor]:
        """Returns weights and optimizer state of all rows, [rows, columns] each.

        They share the table's memory.  Only for optimizers with ``replicated_states``.
        """
        states = OPTIMIZERS[self.optimizer].replicated_states
        assert states is not None, self.optimizer
        rows = max(self.rows, 1)
        tensors = []
        for name in ("weights", *states):
            places = [getattr(self, f"{name}_{place}") for place in ("dev", "host", "uvm")]
            (used,) = [flat for flat in places if flat.numel() >= rows]
            tensors.append(used.detach().view(rows, -1))
        return tensors


class BucketOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's view of FBGEMM's optimizer, which tells before somebody looks at its state."""

    def __init__(self, *args: Any) -> None:
        self._state_hooks: list[Callable[[], None]] = []
        super().__init__(*args)

    def register_state_hook(self, hook: Callable[[], None]) -> None:
        """Has a function called before anybody reads the state."""
        self._state_hooks.append(hook)

    @property
    def state(self) -> Mapping[Any, Any]:
        for hook in self._state_hooks:
            hook()
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        self._state = state


class BucketKernel(BatchedFusedEmbeddingBag):
    """TorchRec's embedding kernel around a ``BucketTable``.

    Args:
        config: the tables of the bucket on this rank; there may be none.
        dim: columns of the bucket's tables.
        compute_kernel: that of the bucket's tables.
        pg: the process group.
        device: of the tables.
        frozen: whether the tables are looked up, but not trained.
        part: of a joint table, whose memory they are in; None if they have memory of their own.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        dim: int,
        compute_kernel: EmbeddingComputeKernel,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        frozen: bool = False,
        part: JointPart | None = None,
    ) -> None:
        # Not BatchedFusedEmbeddingBag.__init__: it would build an FBGEMM table per table.
        BaseBatchedEmbeddingBag.__init__(self, config, pg, device)
        device = device or torch.device("cpu")
        on_cuda = device.type == "cuda"
        self._names = [table.name for table in config.embedding_tables]
        self._settings: dict[str, Any] = {
            "dim": dim,
            "compute_device": ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU,
            **settings_of_tables(config, device),
        }
        self._location = EmbeddingLocation.HOST
        if on_cuda:
            self._location = compute_kernel_to_embedding_location(compute_kernel)
        self._emb_module = BucketTable(
            table_rows=self._local_rows,
            location=self._location,
            table_names=["+".join(self._names)],
            frozen=frozen,
            part=part,
            **self._settings,
        )
        self._optim = BucketOptimizer(config, self._emb_module, pg)
        self._offsets = torch.empty(0, dtype=torch.int32, device=device)
        self._layouts: dict[tuple[int, ...], TableLayout] = {}
        self.init_parameters()

    @property
    def table(self) -> BucketTable:
        """The FBGEMM table of the bucket."""
        return self._emb_module

    @property
    def dim(self) -> int:
        """The columns of the bucket's tables."""
        dim: int = self._settings["dim"]
        return dim

    @cached_property
    def table_starts_T(self) -> torch.Tensor:
        """The first row of each of the bucket's tables on this rank."""
        return torch.tensor([0, *accumulate(self._local_rows[:-1])])

    @property
    def has_cache(self) -> bool:
        """Whether the device has a cache of rows in host memory, on all ranks alike."""
        return self._location == EmbeddingLocation.MANAGED_CACHING

    @property
    def can_show_tables(self) -> bool:
        """Whether ``look_up_tables`` does the same in several calls: if no step is counted."""
        return self._location == EmbeddingLocation.HOST and not self.table.counts_steps_of_rows

    @property
    def optimizer(self) -> BucketOptimizer:
        """TorchRec's view of the table's optimizer."""
        return self._optim

    def sibling(self, rows: int) -> BucketTable:
        """Makes another table of the same kind and optimizer, in the memory of the device."""
        on_cuda = self._settings["compute_device"] == ComputeDevice.CUDA
        return BucketTable(
            table_rows=[rows],
            location=EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST,
            **self._settings,
        )

    def one_id_per_bag(self, ids: int) -> torch.Tensor:
        """Returns offsets 0, 1, ..., ids, for FBGEMM's pooled kernels, which are its fastest."""
        if self._offsets.numel() <= ids:
            with torch.inference_mode(False):  # they outlive an inference
                self._offsets = torch.arange(
                    2 * ids + 1, dtype=torch.int32, device=self._offsets.device
                )
            if self._offsets.is_cuda:
                self._offsets_written = torch.cuda.current_stream(
                    self._offsets.device
                ).record_event()
        if self._offsets.is_cuda:
            # Another stream may have written them just now, or may grow them while kernels of this
            # one still read the old ones.
            stream = torch.cuda.current_stream(self._offsets.device)
            stream.wait_event(self._offsets_written)
            self._offsets.record_stream(stream)
        return self._offsets[: ids + 1]

    def forward(
        self,
        rows_R: torch.Tensor,
        offsets_U1: torch.Tensor | None = None,
        weights_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Looks up rows, or sums of rows.

        Args:
            rows_R: row numbers.
            offsets_U1: where the bags begin that are summed; None if every row is one.
            weights_R: weights of the rows in these sums; None if there are none.
        """
        if offsets_U1 is None:
            offsets_U1 = self.one_id_per_bag(rows_R.numel())
        # FBGEMM updates a table in backward: what no gradient comes back from stays as it is.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.table.frozen):
            return self.emb_module(indices=rows_R, offsets=offsets_U1, per_sample_weights=weights_R)

    def look_up_tables(
        self,
        tables: Sequence[int],
        rows_R: torch.Tensor,
        offsets_V1: torch.Tensor | None,
        weights_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """Looks up sums of rows of some tables, [bag, columns of all these tables].

        Args:
            tables: their numbers in the bucket; each must have rows.
            rows_R: row numbers, each in its table.
            offsets_V1: where the bags begin that are summed, as many of each table.
            weights_R: weights of the rows in these sums; None if there are none.
        """
        key = tuple(tables)
        if key not in self._layouts:
            if len(self._layouts) == MOST_LAYOUTS:
                self._layouts.clear()
            with torch.inference_mode(False):  # they outlive an inference
                self._layouts[key] = TableLayout(self.table, tables)
        with self._layouts[key].shown():
            return self(rows_R, offsets_V1, weights_R)

    def prefetch(
        self,
        rows_R: torch.Tensor,
        offsets_U1: torch.Tensor | None,
        forward_stream: torch.Stream | None,
    ) -> None:
        """Brings rows of host memory into the device's cache, if the table has one.

        Raises:
            ValueError: FBGEMM was not told that rows of two batches are in the cache.
        """
        if not self.has_cache:
            return
        if not self.table.prefetches:
            raise ValueError(
                "fused_params['prefetch_pipeline'] is False, must be True with a pipeline that "
                f"prefetches rows, for tables {self._names} "
                "with compute_kernel 'fused_uvm_caching': else the rows of one batch may take the "
                "places of those of the batch before, whose gradients would go to wrong rows"
            )
        if offsets_U1 is None:
            offsets_U1 = self.one_id_per_bag(rows_R.numel())
        self.emb_module.prefetch(indices=rows_R, offsets=offsets_U1, forward_stream=forward_stream)
