"""Rows of one bucket that several ranks hold, and their update.

Hot rows live in an FBGEMM table of their own, with the optimizer of the bucket's table.  So an
update is FBGEMM's own arithmetic, and a row trained here is bit for bit the row trained at home.
"""

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel, BucketTable, OptimizerSettings
from fusedrec_torchrec.compat.optimizers import REPLICABLE
from fusedrec_torchrec.compat.row_update import distinct_update_of, update_of

__all__ = ["Replica", "check_replicable"]


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
    if table.optimizer_type not in REPLICABLE:
        raise ValueError(
            f"{where}: optimizer is {table.optimizer_type.value!r}, must be one of "
            f"{[optimizer.value for optimizer in REPLICABLE]}"
        )
    if table.counts_steps_of_rows:
        raise ValueError(
            f"{where}: weight decay (COUNTER, COWCLIP or global) counts the steps of each row, "
            "which replicas do not; weight_decay_mode must be NONE, L2 or DECOUPLE"
        )
    if table.rounds_at_random:
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
        spare: whether the table has a row behind them, which stands for none.

    Attributes:
        tensors: weights and optimizer state, [capacity, columns] each; one row if it is 0.
        with_spare: the same with the spare row, if there is one.
    """

    def __init__(
        self, kernel: BucketKernel, table: BucketTable, capacity: int, spare: bool = False
    ) -> None:
        self.capacity = capacity
        self.kernel = kernel
        self._table = table
        self._spare = spare
        self._settings: OptimizerSettings | None = None
        self.with_spare = table.row_tensors()
        self.tensors = [tensor[: max(capacity, 1)] for tensor in self.with_spare]
        self._make_updates()
        self.dim = self.tensors[0].size(1)

    @classmethod
    def empty(cls, kernel: BucketKernel, capacity: int) -> "Replica":
        """Makes a replica in a table of its own, all zero."""
        replica = cls(kernel, kernel.sibling(capacity + 1), capacity, spare=True)
        for tensor in replica.with_spare:
            tensor.zero_()
        return replica

    @property
    def clips(self) -> bool:
        """Whether the optimizer clips gradients, of which each rank's own is one."""
        return self.kernel.table.clips_gradients

    def look_up(self, places: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the rows of places into a matrix."""
        weights = self.tensors[0]
        if weights.dtype == out.dtype:
            torch.index_select(weights, 0, places, out=out)
        else:
            out.copy_(weights.index_select(0, places))

    def settings(self) -> OptimizerSettings:
        """Returns the optimizer's settings as they are now at the bucket's table."""
        return self.kernel.table.optimizer_settings

    def update(
        self, places: torch.Tensor, gradients: torch.Tensor, settings: OptimizerSettings
    ) -> None:
        """Does one step of the optimizer; gradients of a place that comes twice are summed."""
        self._use(settings)
        self._update(places, self.kernel.one_id_per_bag(places.numel()), gradients)

    @property
    def updates_distinct(self) -> bool:
        """Whether there is a faster update for places that come once."""
        return self._distinct_update is not None

    def update_distinct(
        self, places: torch.Tensor, gradients: torch.Tensor, settings: OptimizerSettings
    ) -> None:
        """Does one step of the optimizer.

        Args:
            places: int64, each once, but for ``capacity``, which is none.
            gradients: float32; those of none are zero.
            settings: of the optimizer.
        """
        self._use(settings)
        assert self._distinct_update is not None
        self._distinct_update(places, gradients)

    def _use(self, settings: OptimizerSettings) -> None:
        if settings != self._settings:
            self._settings = settings
            self._table.optimizer_settings = settings
            self._make_updates()

    def _make_updates(self) -> None:
        self._update = update_of(self._table)
        self._distinct_update = distinct_update_of(self._table) if self._spare else None
