"""Batches that a Python program makes itself, in the place of a source of samples."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.access.samples import Samples
from fusedrec_torchrec.training.data.batch_check import BatchCheck, CheckedBatch

__all__ = ["OwnBatch", "OwnBatches", "OwnLoader"]

OwnBatch: TypeAlias = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor] | Batch
FORM = "(dense [n, d], KeyedJaggedTensor, labels [n])"


class OwnBatches:
    """Is a ``Source`` that knows its tables and features, but cannot give samples by number.

    Args:
        train: this rank's share of the batches to train on.
        evaluation: this rank's share of the batches to evaluate on, if there are any.
        table_rows: rows of each table.
        features: the table of each feature.

    Raises:
        ValueError: there is no batch, or it is none.
    """

    samples, held_out = 0, None

    def __init__(
        self,
        train: Iterable[OwnBatch],
        evaluation: Iterable[OwnBatch] | None,
        table_rows: Mapping[str, int],
        features: Mapping[str, str],
    ) -> None:
        self.train = _Repeatable(train)
        self.evaluation = None if evaluation is None else _Repeatable(evaluation)
        self.table_rows = dict(table_rows)
        self.features = dict(features)
        for feature, table in self.features.items():
            if table not in self.table_rows:
                raise ValueError(
                    f"features says that {feature!r} is of table {table!r}, which is none of "
                    f"tables: {', '.join(self.table_rows)}"
                )
        for table in self.table_rows:
            if table not in self.features.values():
                raise ValueError(f"tables has {table!r}, which is the table of no feature")
        first = as_batch(self.train.first())
        self._check_keys(first)
        self.batch_size = first.sparse_features.stride()
        """Samples of the first batch, of this rank alone."""
        self.dense_features = first.dense_features.size(1)
        self.weighted = first.sparse_features.weights_or_none() is not None

    def _check_keys(self, batch: Batch) -> None:
        keys = batch.sparse_features.keys()
        missing = [name for name in self.features if name not in keys]
        if missing:
            raise ValueError(
                f"feature {missing[0]!r} is not in the batches, which have {', '.join(keys)}"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """Nobody can tell these batches from others."""
        return {}

    @property
    def left_out(self) -> list[str]:
        """Nothing is left out."""
        return []

    @property
    def blocks(self) -> NDArray[np.int64]:
        """There are none: samples have no numbers."""
        return np.zeros(0, np.int64)

    def read(self, start: int, stop: int) -> Samples:
        """Refuses: samples have no numbers."""
        raise ValueError("batches of a program cannot be read by the numbers of samples")


@dataclass
class _Repeatable:
    """Is an iterable from its beginning, as often as asked, if it can be.

    Attributes:
        batches: the iterable.
        peeked: the first batch, if it was taken of an iterator that gives it only once.
    """

    batches: Iterable[OwnBatch]
    peeked: list[OwnBatch] = field(default_factory=list)
    begun: bool = False

    @property
    def once(self) -> bool:
        """Whether it can be read only once."""
        return isinstance(self.batches, Iterator)

    def first(self) -> OwnBatch:
        """Returns the first batch, without taking it away."""
        for batch in self.batches:
            if self.once:
                self.peeked.append(batch)
            return batch
        raise ValueError("data has no batch")

    def __iter__(self) -> Iterator[OwnBatch]:
        if self.once and self.begun:
            raise ValueError(
                "data is an iterator, which gives its batches only once, and they are needed "
                "again (for another epoch, another evaluation or --resume): pass something that "
                "can be iterated again, such as a list, a DataLoader or an object with __iter__"
            )
        self.begun = True
        yield from self.peeked
        yield from self.batches


class OwnLoader:
    """Reads the batches of a program, as ``Loader`` reads those of a source.

    Args:
        batches: of this rank; None if there are none.
        limit: how many there are, where they cannot tell themselves.
        check: says what is wrong with a batch.
    """

    def __init__(self, batches: "_Repeatable | None", limit: int | None, check: BatchCheck) -> None:
        self._batches = batches
        self._check = check
        self.waited = 0.0
        """Seconds that callers have waited for batches."""
        self.batches = 0
        """Number of batches in an epoch."""
        if batches is not None:
            own = batches.batches
            self.batches = len(own) if isinstance(own, Sized) else limit or 0

    def read(self, start: int, stop: int | None = None) -> Iterator[Batch]:
        """Yields batches number ``start`` up to ``stop``, counted over epochs; None never ends.

        Raises:
            ValueError: there are no more, or one is none.
        """
        assert self._batches is not None
        number, epoch = 0, 0
        while stop is None or number < stop:
            before = number
            begun = time.perf_counter()
            for item in self._batches:
                if number >= start:
                    batch = as_batch(item)
                    self.waited += time.perf_counter() - begun
                    yield CheckedBatch(
                        batch.dense_features,
                        batch.sparse_features,
                        batch.labels,
                        problem=self._check(batch),
                    )
                number += 1
                if number == stop:
                    return
                begun = time.perf_counter()
            if number == before:
                raise ValueError(f"data has no batch in epoch {epoch + 1}")
            epoch += 1


def as_batch(item: object) -> Batch:
    """Returns what a program gives as a batch.

    Raises:
        ValueError: it is none.
    """
    if isinstance(item, Batch):
        return item
    if not isinstance(item, tuple | list) or len(item) != 3:
        raise ValueError(f"data gives a {type(item).__name__}, must give {FORM}")
    dense, features, labels = item
    if not isinstance(features, KeyedJaggedTensor):
        raise ValueError(
            f"data gives ({', '.join(type(i).__name__ for i in item)}), must be {FORM}"
        )
    dense, labels = torch.as_tensor(dense).float(), torch.as_tensor(labels).float()
    samples = features.stride()
    if dense.dim() != 2 or dense.size(0) != samples or labels.shape != (samples,):
        raise ValueError(
            f"a batch of {samples} samples has dense features of shape {list(dense.shape)} and "
            f"labels of shape {list(labels.shape)}, must be {FORM}"
        )
    return Batch(dense_features=dense, sparse_features=features, labels=labels)
