"""Checks whether a batch can be trained on: ids in range, no NaN or infinity."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch

__all__ = ["BatchCheck", "CheckedBatch", "stand_in"]


@dataclass
class CheckedBatch(Batch):
    """Holds a batch, and what is wrong with it; None if nothing is."""

    problem: str | None = None


@dataclass(frozen=True)
class BatchCheck:
    """Says what is wrong with a batch.

    Attributes:
        table_rows: rows of each feature's table; None if its ids are hashed and may be anything.
    """

    table_rows: Mapping[str, int | None]

    def __call__(self, batch: Batch) -> str | None:
        """Returns the first thing that is wrong; None if nothing is."""
        return (
            self._numbers(batch.dense_features)
            or _labels(batch.labels)
            or self._ids(batch.sparse_features)
            or _weights(batch.sparse_features)
        )

    def _numbers(self, dense: torch.Tensor) -> str | None:
        if bool(dense.isfinite().all()):
            return None
        sample, feature = (~dense.isfinite()).nonzero()[0].tolist()
        value = float(dense[sample, feature])
        return f"dense feature {feature} of sample {sample} is {value}, must be a finite number"

    def _ids(self, features: object) -> str | None:
        keys, values = features.keys(), features.values()  # type: ignore[attr-defined]
        lengths = features.lengths()  # type: ignore[attr-defined]
        counts = lengths.view(len(keys), -1).sum(1)
        if int(counts.sum()) != values.numel() or bool((lengths < 0).any()):
            return f"lengths add up to {int(counts.sum())}, there are {values.numel()} ids"
        limit = torch.iinfo(torch.int64).max
        rows = torch.tensor([self.table_rows.get(key) or limit for key in keys])
        raw = torch.tensor([self.table_rows.get(key) is None for key in keys])
        limits = rows.repeat_interleave(counts, output_size=values.numel())
        bad = (values >= limits) | ((values < 0) & ~raw.repeat_interleave(counts))
        if not bool(bad.any()):
            return None
        where = int(bad.nonzero()[0])
        key = keys[int(torch.searchsorted(counts.cumsum(0), where, right=True))]
        return (
            f"feature {key!r} has id {int(values[where])}, which is out of range "
            f"[0, {self.table_rows[key]})"
        )


def _labels(labels: torch.Tensor) -> str | None:
    good = (labels >= 0) & (labels <= 1)  # NaN is neither
    if bool(good.all()):
        return None
    sample = int((~good).nonzero()[0])
    return f"the label of sample {sample} is {float(labels[sample])}, must be in [0, 1]"


def _weights(features: object) -> str | None:
    weights = features.weights_or_none()  # type: ignore[attr-defined]
    if weights is None or bool(weights.isfinite().all()):
        return None
    value = float(weights[int((~weights.isfinite()).nonzero()[0])])
    return f"an id has weight {value}, must be a finite number"


def stand_in(batch: Batch) -> Batch:
    """Returns a batch of as many samples without ids, that nothing can be learned from."""
    features = batch.sparse_features
    weights = features.weights_or_none()
    return Batch(
        dense_features=torch.zeros_like(batch.dense_features),
        sparse_features=type(features)(
            keys=features.keys(),
            values=features.values()[:0],
            weights=None if weights is None else weights[:0],
            lengths=torch.zeros_like(features.lengths()),
            stride=features.stride(),
        ),
        labels=torch.zeros_like(batch.labels),
    )
