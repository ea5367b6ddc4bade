"""Looks rows of several buckets up in one call of FBGEMM, and updates them in one.

The buckets' own tables go on to say what the optimizer's settings are.  Somebody may give buckets
different settings while they are trained, and there may be fewer rows to look up than buckets, for
which FBGEMM divides by zero: then each bucket is called by itself, with the same result.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.joint_table import JointTable

__all__ = ["JointKernel", "Lookup"]

Lookup = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Rows, where the bags of rows begin, and weights of rows, as ``BucketKernel`` takes them."""


class JointKernel:
    """The kernels of several buckets, whose tables are parts of one joint table.

    Args:
        table: the joint table.
        kernels: for each feature of a call the kernel of its table.
    """

    def __init__(self, table: JointTable, kernels: Sequence[BucketKernel]) -> None:
        self._table = table
        self._kernels = kernels
        self._frozen = kernels[0].table.frozen
        assert all(kernel.table.frozen == self._frozen for kernel in kernels)

    def can_take(self, units_FW: list[list[int]]) -> bool:
        """Returns whether one call can look up so many rows, or sums of rows, with the settings.

        The optimizers of all buckets must have the same.  FBGEMM divides the number of all rows by
        that of features, and then by what comes out.
        """
        if sum(map(sum, units_FW)) < len(units_FW):
            return False
        first, *others = (kernel.table.optimizer_settings for kernel in self._kernels)
        return all(settings == first for settings in others)

    def __call__(
        self, of_all: Lookup, ids_F: Sequence[int], units_FW: list[list[int]]
    ) -> torch.Tensor:
        """Looks up rows and sums of rows of all features; it ``can_take`` them.

        Args:
            of_all: those of all features, feature after feature, each requester after requester.
            ids_F: how many rows there are of each feature.
            units_FW: how many rows, or sums of rows, each requester gets of each feature.

        Returns:
            a flat tensor in the order (requester, feature).
        """
        rows_R, offsets_U1, weights_R = of_all
        if offsets_U1 is None:
            offsets_U1 = self._kernels[0].one_id_per_bag(rows_R.numel())
        for kernel, own_rows in zip(self._kernels, rows_R.split(list(ids_F)), strict=True):
            kernel.table.announce(own_rows)
        first = self._kernels[0].table
        self._table.learning_rate_tensor = first.learning_rate_tensor
        self._table.optimizer_args = first.optimizer_args
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            flat: torch.Tensor = self._table(
                indices=rows_R,
                offsets=offsets_U1,
                per_sample_weights=weights_R,
                batch_size_per_feature_per_rank=units_FW,
            )
        return flat

    def apart(self, lookups: Sequence[Lookup]) -> list[torch.Tensor]:
        """Looks up the same in a call for each feature, which are one step of the optimizer.

        Args:
            lookups: those of each feature.

        Returns:
            [rows or sums of rows, columns] of each feature.
        """
        steps = self._table.iter, self._table.iter_cpu
        before = [count.clone() for count in steps]
        looked_up = []
        for kernel, lookup in zip(self._kernels, lookups, strict=True):
            for count, value in zip(steps, before, strict=True):
                count.copy_(value)
            looked_up.append(kernel(*lookup))
        return looked_up
