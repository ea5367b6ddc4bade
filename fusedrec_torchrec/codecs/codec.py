"""The interface of a codec, which turns rows into bytes and bytes into rows.

A codec turns the rows of one bucket, for (or from) all ranks, into streams of bytes and back.  A
stream holds a segment for each rank, one after another, whose sizes follow from the numbers of rows
alone: both sides know them from the headers of the ids, so no codec needs a collective of its own.

Shape suffixes: R rows, D columns, E entries.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedrec_torchrec.core import operators

__all__ = ["Codec", "Entries", "as_bytes", "as_numbers"]


@dataclass
class Entries:
    """The entries of a bucket's rows that travelled, if not all did.

    Attributes:
        positions_E: their positions in the flattened rows, in the order of the wire.  Room that was
            not used has the position behind the last one.
    """

    positions_E: torch.Tensor

    def take(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Returns the values of these entries; zero for unused room."""
        if self._by_kernel(rows_RD):
            taken: torch.Tensor = torch.ops.fusedrec.take_entries(
                rows_RD.contiguous(), self.positions_E
            )
            return taken
        flat = rows_RD.reshape(-1)
        if not flat.numel():
            return flat.new_zeros(self.positions_E.numel())
        values_E = flat.index_select(0, self.positions_E.clamp(max=flat.numel() - 1))
        return torch.where(self.positions_E < flat.numel(), values_E, 0)

    def put(self, values_E: torch.Tensor, out_RD: torch.Tensor) -> None:
        """Writes values to the positions of these entries, and zeros everywhere else."""
        if self._by_kernel(out_RD):
            torch.ops.fusedrec.put_entries(values_E.contiguous(), self.positions_E, out_RD)
        else:
            self.add(values_E, out_RD.view(-1).zero_())

    def _by_kernel(self, rows_RD: torch.Tensor) -> bool:
        if not rows_RD.is_cuda or rows_RD.dtype != torch.float32:
            return False
        return operators.available_on(rows_RD.device, "take_entries", "put_entries")

    def add(self, values_E: torch.Tensor, flat: torch.Tensor) -> None:
        """Adds values at the positions of these entries in the flattened rows."""
        if flat.numel():
            values_E = torch.where(self.positions_E < flat.numel(), values_E, 0)
            flat.index_add_(0, self.positions_E.clamp(max=flat.numel() - 1), values_E)


class Codec(ABC):
    """Encodes and decodes the rows of one bucket, in one direction."""

    @property
    def as_kernel(self) -> tuple[str, float] | None:
        """Format and scale by which a kernel does the same; None if there is none.

        The scale is 0 if there is none, and less if it is found anew in each step.
        """
        return None

    @property
    def encodes_rows_apart(self) -> bool:
        """Whether the bytes of a row depend on nothing but the row, now or before."""
        return False

    @abstractmethod
    def sizes(self, counts: Sequence[int]) -> list[list[int]]:
        """Returns the bytes of every stream for every rank, as [stream][rank].

        Args:
            counts: rows of each rank.
        """

    @abstractmethod
    def encode(
        self,
        rows_RD: torch.Tensor,
        counts: Sequence[int],
        training: bool,
        entries: Entries | None = None,
    ) -> tuple[list[torch.Tensor], Entries | None]:
        """Encodes rows into streams of bytes (uint8).

        Args:
            rows_RD: float32, those for (or of) rank 0 first.
            counts: rows of each rank.
            training: whether there will be a backward pass.
            entries: for gradients, the entries of the rows that had travelled; None if all had.

        Returns:
            The streams, and the entries that they hold; None if they hold all.
        """

    @abstractmethod
    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        """Decodes streams into ``out_RD``; returns the entries that they held, None if all."""


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a flat uint8 tensor."""
    return numbers.contiguous().view(-1).view(torch.uint8)


def as_numbers(stream: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a stream of bytes as the flat tensor of numbers that it was made of."""
    if stream.storage_offset() % dtype.itemsize:  # behind a stream of single bytes
        stream = stream.clone()
    return stream.view(dtype)
