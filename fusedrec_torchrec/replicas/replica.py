"""Rows of one bucket that several ranks hold, and their update.

Hot rows live in an FBGEMM table of their own, with the optimizer of the bucket's table.  So an
update is FBGEMM's own arithmetic, and a row trained here is bit for bit the row trained at home.
"""

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType

from fusedrec_torchrec.compat.bucket_table import BucketKernel, BucketTable
from fusedrec_torchrec.compat.optimizers import REPLICABLE
from fusedrec_torchrec.compat.row_update import update_of

__all__ = ["Replica", "Settings", "check_replicable"]

# Learning rate and FBGEMM's other settings of an optimizer.
Settings = tuple[float, Any]


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
    if table.optimizer not in REPLICABLE:
        raise ValueError(
            f"{where}: optimizer is {table.optimizer.value!r}, must be one of "
            f"{[optimizer.value for optimizer in REPLICABLE]}"
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
    """Rows of a bucket that this rank has in common with others.

    Args:
        kernel: the bucket.
        table: holds the rows, with the bucket's optimizer.
        capacity: number of rows.

    Attributes:
        tensors: weights and optimizer state, [capacity, columns] each; one row if it is 0.
    """

    def __init__(self, kernel: BucketKernel, table: BucketTable, capacity: int) -> None:
        self.capacity = capacity
        self.kernel = kernel
        self._table = table
        self._update = update_of(table)
        self._settings: Settings | None = None
        self.tensors = table.row_tensors()
        self.dim = self.tensors[0].size(1)

    @classmethod
    def empty(cls, kernel: BucketKernel, capacity: int) -> "Replica":
        """Makes a replica in a table of its own, all zero."""
        replica = cls(kernel, kernel.sibling(capacity), capacity)
        for tensor in replica.tensors:
            tensor.zero_()
        return replica

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
