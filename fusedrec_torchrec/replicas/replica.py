"""The hot rows of one bucket, as every rank holds them.

They live in an FBGEMM table of their own, with the optimizer of the bucket's table.  So an update
is FBGEMM's own arithmetic, and a row trained here is bit for bit the row trained at home.
"""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

from fusedrec_torchrec.exchange.lookup import BucketKernel, BucketTable
from fusedrec_torchrec.replicas.update import update_of

__all__ = ["STATES", "Replica", "Settings", "check_replicable", "tensors_of"]

# Learning rate and FBGEMM's other settings of an optimizer.
Settings = tuple[float, Any]

# Optimizers whose update of a row depends on nothing but the row, its state and its gradient, and
# what FBGEMM calls their states.
STATES: dict[EmbOptimType, tuple[str, ...]] = {
    EmbOptimType.EXACT_SGD: (),
    EmbOptimType.EXACT_ADAGRAD: ("momentum1",),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: ("momentum1",),
}


def tensors_of(table: BucketTable) -> list[torch.Tensor]:
    """Weights and optimizer state of all rows, [rows, columns] each; views that share memory."""
    rows = max(sum(spec[0] for spec in table.embedding_specs), 1)
    tensors = []
    for name in ("weights", *STATES[table.optimizer]):
        places = [getattr(table, f"{name}_{place}") for place in ("dev", "host", "uvm")]
        (used,) = [flat for flat in places if flat.numel() >= rows]
        tensors.append(used.detach().view(rows, -1))
    return tensors


def check_replicable(kernel: BucketKernel, where: str) -> None:
    """Refuses optimizers with which replicas would not stay equal.

    Args:
        kernel: a bucket.
        where: what the error is about.

    Raises:
        ValueError: what is wrong with its optimizer.
    """
    table = kernel.table
    if table.frozen:
        raise ValueError(
            f"{where}: the table has requires_grad False, must have True: there are no gradients "
            "that replicas could share; without hot rows frozen tables are looked up like others"
        )
    if table.optimizer not in STATES:
        raise ValueError(
            f"{where}: optimizer is {table.optimizer.value!r}, must be one of "
            f"{[each.value for each in STATES]}"
        )
    if hasattr(table, "prev_iter_physical_offsets"):
        raise ValueError(
            f"{where}: weight decay (COUNTER, COWCLIP or global) counts the steps of each row, "
            "which replicas do not; weight_decay_mode must be NONE, L2 or DECOUPLE"
        )
    rounds_at_random = (
        table.optimizer_args.stochastic_rounding
        and table.weights_precision == SparseType.FP16
        and not table.weights_host.numel()  # on CUDA; on CPU FBGEMM rounds to nearest
    )
    if rounds_at_random:
        raise ValueError(
            f"{where}: stochastic_rounding is True and weights are fp16, so that replicas would "
            "differ; set stochastic_rounding to False in fused_params"
        )


class Replica:
    """A bucket's hot rows on this rank.

    Args:
        kernel: the bucket.
        capacity: number of slots.

    Attributes:
        tensors: weights and optimizer state, [slots, columns] each; one row if there are no slots.
    """

    def __init__(self, kernel: BucketKernel, capacity: int) -> None:
        self._begin(kernel, kernel.sibling(capacity), capacity)
        for tensor in self.tensors:
            tensor.zero_()

    def _begin(self, kernel: BucketKernel, table: BucketTable, capacity: int) -> None:
        self.capacity = capacity
        self.kernel = kernel
        self._table = table
        self._update = update_of(table)
        self._settings: Settings | None = None
        self.tensors = tensors_of(table)
        self.dim = self.tensors[0].size(1)

    @property
    def clips(self) -> bool:
        """Whether the optimizer clips gradients, of which each rank's own is one."""
        return bool(self.kernel.table.optimizer_args.gradient_clipping)

    def look_up(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Rows of the slots into a matrix."""
        weights = self.tensors[0]
        if weights.dtype == out.dtype:
            torch.index_select(weights, 0, slots, out=out)
        else:
            out.copy_(weights.index_select(0, slots))

    def settings(self) -> Settings:
        """The optimizer's settings as they are now at the bucket's table."""
        return self.kernel.table.get_learning_rate(), self.kernel.table.optimizer_args

    def update(self, slots: torch.Tensor, gradients: torch.Tensor, settings: Settings) -> None:
        """One step of the optimizer; gradients of a slot that comes more than once are summed."""
        if settings != self._settings:
            self._settings = settings
            self._table.set_learning_rate(settings[0])
            self._table.optimizer_args = settings[1]
            self._update = update_of(self._table)
        self._update(slots, self.kernel.one_id_per_bag(slots.numel()), gradients)
