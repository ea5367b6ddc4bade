"""Decides which samples make which batch.

A batch is made of lanes, independent streams of samples, and a rank takes some of the lanes of
every batch.  So batches are the same for every number of ranks that divides the number of lanes,
each rank reads only its own samples, and any batch can be found without reading those before it.

Training order: the source's blocks are permuted anew in each epoch, the lanes share the result in
equal contiguous shares, and a lane's samples are shuffled within each chunk of several batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Order", "Piece"]


@dataclass(frozen=True)
class Piece:
    """Samples ``start`` to ``stop`` of the source."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """Is the order of the samples ``first`` to ``first + samples`` of a source.

    What does not fill a batch at the end of an epoch is left out; with shuffling that is something
    else in each epoch.

    Attributes:
        first: number of the first sample.
        blocks: sizes of the blocks that the samples are best read in.
        batch_size: samples of a batch, all lanes together.
        lanes: lanes of a batch.
        chunk_batches: batches that are read and shuffled together.
        shuffle: if not, samples keep their order.
        seed: of the shuffling.
    """

    first: int
    blocks: tuple[int, ...]
    batch_size: int
    lanes: int
    chunk_batches: int
    shuffle: bool
    seed: int = 0

    @property
    def samples(self) -> int:
        """Number of samples of all blocks."""
        return sum(self.blocks)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self.samples // self.batch_size

    @property
    def chunks(self) -> int:
        """Number of chunks in an epoch; the last one may have fewer batches."""
        return -(-self.batches // self.chunk_batches)

    def chunk_sizes(self, chunk: int) -> int:
        """Returns the number of batches in a chunk."""
        return min(self.chunk_batches, self.batches - chunk * self.chunk_batches)

    def pieces(self, epoch: int, chunk: int, lane: int) -> list[Piece]:
        """Returns the pieces that a lane reads for a chunk, in the order in which to join them."""
        share = self.batch_size // self.lanes  # of a lane, in a batch
        batches = self.chunk_sizes(chunk)
        if not self.shuffle:
            starts = self.batch_size * (chunk * self.chunk_batches + np.arange(batches))
            return [
                Piece(self.first + start + lane * share, self.first + start + (lane + 1) * share)
                for start in starts.tolist()
            ]
        start = lane * self.batches * share + chunk * self.chunk_batches * share
        return list(self._runs(epoch, start, start + batches * share))

    def permutation(self, epoch: int, chunk: int, lane: int) -> NDArray[np.int64] | None:
        """Returns how a lane shuffles its samples of a chunk; None if it does not."""
        if not self.shuffle:
            return None
        share = self.batch_size // self.lanes * self.chunk_sizes(chunk)
        return _generator(self.seed, epoch, 1 << 63 | lane << 40 | chunk).permutation(share)

    def _runs(self, epoch: int, start: int, stop: int) -> Iterator[Piece]:
        """Yields the pieces of permuted blocks between two positions of an epoch's order."""
        begins, ends, firsts = self._permuted(epoch)
        at = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            run = min(stop, int(ends[at])) - start
            begin = int(firsts[at]) + start - int(begins[at])
            yield Piece(begin, begin + run)
            start += run
            at += 1

    def _permuted(
        self, epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        return _permuted_blocks(self.first, self.blocks, self.seed, epoch)


def _generator(seed: int, epoch: int, place: int) -> np.random.Generator:
    # As an array: numpy would make floats of a list with a number beyond 2^63, and lose bits.
    key = np.array([seed << 32 | epoch, place], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


@lru_cache(8)
def _permuted_blocks(
    first: int, blocks: tuple[int, ...], seed: int, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns where each block begins and ends in the epoch's order, and its first sample."""
    sizes = np.array(blocks, dtype=np.int64)
    order = _generator(seed, epoch, 0).permutation(len(sizes))
    ends = np.cumsum(sizes[order])
    firsts = first + (np.cumsum(sizes) - sizes)[order]
    return ends - sizes[order], ends, firsts
