"""Reads the batches of one rank ahead in worker processes, from any position."""

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import DamagedDataError, Samples, Source
from fusedrec_torchrec.core.processes import die_with
from fusedrec_torchrec.training.data.alternation import Alternation
from fusedrec_torchrec.training.data.batch_check import BatchCheck, CheckedBatch
from fusedrec_torchrec.training.data.hot_first import HotFirst
from fusedrec_torchrec.training.data.order import Order

__all__ = ["Loader"]


class Loader:
    """Reads the batches of one rank.

    Args:
        source: the samples.
        span: first sample of the source to use, and number of samples.
        batch_size: samples of a batch, all ranks together.
        lanes: see ``Order``; must be a multiple of ``world_size``.
        rank, world_size: which share of each batch to read.
        shuffle: whether training order is wanted.
        chunk_batches: batches that are read and shuffled together.
        workers: processes that read ahead; 0 reads in this one.
        seed: of the shuffling.
        hot: forms hot and cold batches, if not None.
        check: says what is wrong with a batch, in the processes that read ahead.
    """

    def __init__(
        self,
        source: Source,
        span: tuple[int, int],
        *,
        batch_size: int,
        lanes: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        chunk_batches: int = 16,
        workers: int = 0,
        seed: int = 0,
        hot: HotFirst | None = None,
        check: BatchCheck | None = None,
    ) -> None:
        if lanes % world_size:
            raise ValueError(
                f"data.lanes is {lanes}, must be a multiple of the number of ranks, {world_size}"
            )
        if batch_size % lanes:
            raise ValueError(f"batch size is {batch_size}, must be a multiple of lanes, {lanes}")
        self._order = Order(
            first=span[0],
            blocks=_blocks(source, span),
            batch_size=batch_size,
            lanes=lanes,
            chunk_batches=chunk_batches,
            shuffle=shuffle,
            seed=seed,
        )
        lanes_per_rank = lanes // world_size
        self._source = source
        self._lanes = range(rank * lanes_per_rank, (rank + 1) * lanes_per_rank)
        self._workers = workers
        self._hot = hot
        self._check = check
        self._hot_share = 0.0 if hot is None else hot.share(source, span)
        self.features = list(source.features)
        self.waited = 0.0
        """Seconds that callers have waited for batches."""

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self._order.batches

    def read(self, start: int, stop: int | None = None) -> Iterator[Batch]:
        """Yields batches number ``start`` up to ``stop``, counted over epochs; None never ends.

        Raises:
            ValueError: there is less than one batch.
            DamagedDataError: a file of the source cannot be read.
        """
        if self.batches == 0:
            raise ValueError(
                f"{self._order.samples} samples do not fill one batch of "
                f"{self._order.batch_size}; use more data or smaller batches"
            )
        hot_set = None if self._hot is None else self._hot.hot_set
        chunks = _Chunks(self._source, self._order, self._lanes, hot_set, self._check)
        first, skip = chunks.find(start)
        sampler = _Numbers(first, None if stop is None else chunks.find(stop - 1)[0] + 1)
        loader = DataLoader(
            chunks,
            sampler=sampler,
            batch_size=None,
            num_workers=self._workers,
            prefetch_factor=2 if self._workers else None,
            multiprocessing_context=self._fork_server() if self._workers else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            pin_memory=torch.cuda.is_available(),
        )
        number = start
        with _without_main():
            iterator = iter(loader)
        while stop is None or number < stop:
            begun = time.perf_counter()
            chunk = next(iterator)
            self.waited += time.perf_counter() - begun
            if isinstance(chunk, _Unreadable):
                raise DamagedDataError(chunk.problem)
            last = len(chunk) if stop is None else min(len(chunk), skip + stop - number)
            for place in itertools.islice(self._places(number - skip, len(chunk)), skip, last):
                yield chunk.batch(place, self.features)
            number += last - skip
            skip = 0

    def _fork_server(self) -> Any:
        """Starts workers without delay, also those of each evaluation: it has their imports."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, type(self._source).__module__])
        return context

    def _places(self, first: int, batches: int) -> Iterator[int]:
        """Yields the order of a chunk's batches, the first of which is number ``first``."""
        if self._hot is None:
            yield from range(batches)
            return
        hot = int(self._hot_share * batches)
        next_place = {True: 0, False: hot}
        for is_hot in Alternation(hot, batches - hot, self._hot.rates, first):
            yield next_place[is_hot]
            next_place[is_hot] += 1


@contextmanager
def _without_main() -> Iterator[None]:
    """Lets processes start that do not import the program that is run.

    They need nothing of it, and a script that calls ``training.train`` without looking at its
    ``__name__`` would run again in each of them.
    """
    main = sys.modules["__main__"]
    names = [name for name in ("__file__", "__spec__") if hasattr(main, name)]
    hidden = {name: getattr(main, name) for name in names}
    for name in names:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _begin_worker(rank: int, _: int) -> None:
    torch.set_num_threads(1)
    die_with(rank)


def _blocks(source: Source, span: tuple[int, int]) -> tuple[int, ...]:
    """Returns the sizes of the source's blocks inside a span of it."""
    ends = np.cumsum(source.blocks)
    starts = ends - source.blocks
    inside = np.minimum(ends, span[0] + span[1]) - np.maximum(starts, span[0])
    return tuple(inside[inside > 0].tolist())


@dataclass(frozen=True)
class _Numbers:
    """Is a sampler: chunk after chunk, over all epochs."""

    first: int
    stop: int | None

    def __iter__(self) -> Iterator[int]:
        number = self.first
        while self.stop is None or number < self.stop:
            yield number
            number += 1


@dataclass(frozen=True)
class _Chunk:
    """Holds several batches in a few tensors, so that little is handed over between processes.

    Attributes:
        dense: [batches, samples, dense features].
        labels: [batches, samples].
        ids: of all batches; of each one feature by feature, sample by sample.
        lengths: [batches, features * samples].
        ends: where each batch's ids end.
        problems: of each batch; None if there is none.
        weights: of the ids, in their order; None if all count once.
    """

    dense: torch.Tensor
    labels: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    ends: list[int]
    problems: list[str | None]
    weights: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def pin_memory(self) -> "_Chunk":
        """Moves to memory from which a GPU can copy in the background; DataLoader calls it."""
        return _Chunk(
            dense=self.dense.pin_memory(),
            labels=self.labels.pin_memory(),
            ids=self.ids.pin_memory(),
            lengths=self.lengths.pin_memory(),
            ends=self.ends,
            problems=self.problems,
            weights=None if self.weights is None else self.weights.pin_memory(),
        )

    def batch(self, place: int, features: list[str]) -> Batch:
        """Returns one of the batches."""
        ids = slice(self.ends[place - 1] if place else 0, self.ends[place])
        return CheckedBatch(
            dense_features=self.dense[place],
            sparse_features=KeyedJaggedTensor(
                keys=features,
                values=self.ids[ids],
                weights=None if self.weights is None else self.weights[ids],
                lengths=self.lengths[place],
                stride=self.labels.size(1),
            ),
            labels=self.labels[place],
            problem=self.problems[place],
        )


@dataclass(frozen=True)
class _Unreadable:
    """Takes the place of a chunk that a source cannot give, and says why.

    As an exception of a reader process it would come with that process's traceback as its text.
    """

    problem: str


class _Chunks(Dataset[_Chunk | _Unreadable]):
    """Is a data set of chunks by number, counted over epochs."""

    def __init__(
        self,
        source: Source,
        order: Order,
        lanes: range,
        hot_set: HotSet | None = None,
        check: BatchCheck | None = None,
    ) -> None:
        self._source = source
        self._order = order
        self._lanes = lanes
        self._hot_set = hot_set
        self._check = check

    def find(self, batch: int) -> tuple[int, int]:
        """Returns the chunk of a batch, and the batch's place in it."""
        epoch, inside = divmod(batch, self._order.batches)
        chunk, place = divmod(inside, self._order.chunk_batches)
        return epoch * self._order.chunks + chunk, place

    def __getitem__(self, number: int) -> _Chunk | _Unreadable:
        try:
            return self._chunk(number)
        except DamagedDataError as error:
            return _Unreadable(str(error))

    def _chunk(self, number: int) -> _Chunk:
        epoch, chunk = divmod(number, self._order.chunks)
        batches = self._order.chunk_sizes(chunk)
        lane_samples = Samples.concatenate([self._lane(epoch, chunk, lane) for lane in self._lanes])
        # Samples stand lane by lane, in a lane batch by batch; they are wanted batch by batch.
        places = np.arange(len(lane_samples)).reshape(len(self._lanes), batches, -1)
        by_batch = [lane_samples.take(places[:, i].ravel()) for i in range(batches)]
        features, samples = len(self._source.features), len(by_batch[0])
        lengths = np.ones((batches, features * samples), dtype=np.int32)
        for place, batch in enumerate(by_batch):
            if batch.lengths is not None:
                lengths[place] = batch.lengths.ravel()
        weights = None
        if by_batch[0].weights is not None:
            weights = np.concatenate([b.weights for b in by_batch if b.weights is not None])
        result = _Chunk(
            dense=torch.from_numpy(np.stack([batch.dense for batch in by_batch])),
            labels=torch.from_numpy(np.stack([batch.labels for batch in by_batch])),
            ids=torch.from_numpy(np.concatenate([batch.ids for batch in by_batch])),
            lengths=torch.from_numpy(lengths),
            ends=np.cumsum([len(batch.ids) for batch in by_batch]).tolist(),
            problems=[None] * batches,
            weights=None if weights is None else torch.from_numpy(weights),
        )
        if self._check is not None:
            names = list(self._source.features)
            for place in range(batches):
                result.problems[place] = self._check(result.batch(place, names))
        return result

    def _lane(self, epoch: int, chunk: int, lane: int) -> Samples:
        """Returns the samples of one lane of a chunk, in their order."""
        pieces = self._order.pieces(epoch, chunk, lane)
        samples = Samples.concatenate([self._source.read(p.start, p.stop) for p in pieces])
        permutation = self._order.permutation(epoch, chunk, lane)
        if permutation is not None:
            samples = samples.take(permutation)
        if self._hot_set is not None:
            hot = self._hot_set.hot_samples(samples, self._source.features.values())
            samples = samples.take(np.argsort(~hot, kind="stable").astype(np.int64))
        return samples
