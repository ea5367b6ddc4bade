"""Only the largest entries of rows travel (DCT for model parallelism, KDD 2021).

Of the rows that an owner sends, those entries travel whose magnitude is at least tau, the owner's
threshold for the bucket; the others arrive as zeros.  Backward, gradients of just these entries
travel.  There is no error feedback: an entry that does not travel is not trained.

A message has room for a fixed share of its entries, so its size follows from the number of its
rows.  Where more entries reach tau than there is room for, the largest travel: tau is higher for
this message, and is renewed in the next step.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries, as_bytes, as_numbers
from fusedrec_torchrec.codecs.numbers import Numbers, Room
from fusedrec_torchrec.codecs.threshold import Threshold
from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["LargestEntries"]

MOST_COLUMNS = (1 << 15) - 1
USED_WELL = 0.5  # share of the room that is used; of less, tau is renewed


class LargestEntries(Codec):
    """Streams are values, and where they are: a bit for each entry of the rows, or for each row
    the number of its entries and for each entry its column, whatever is fewer bytes.

    Args:
        dim: columns.
        density: share of entries that travel.
        every: steps from one renewal of tau to the next.
        values: how they travel.
        relative: whether magnitudes are in units of the largest of the row, so that every row sends
            some; if not, rows of small numbers may send nothing.
    """

    def __init__(
        self, dim: int, density: float, every: int, values: Numbers, relative: bool = False
    ) -> None:
        self._dim = dim
        self._relative = relative
        self._values = values
        self.room = Room(dim, density)
        self.threshold = Threshold(density, every)
        self._index_dtype = torch.uint8 if dim < 256 else torch.int16
        self._mask_bytes = -(-dim // 8)
        self._indexed = self._index_dtype.itemsize * (1 + self.room.per_row) < self._mask_bytes

    def sizes(self, counts: Sequence[int]) -> list[list[int]]:
        rooms = [self.room(n) for n in counts]
        size = self._index_dtype.itemsize
        where = (
            [[n * size for n in counts], [room * size for room in rooms]]
            if self._indexed
            else [[n * self._mask_bytes for n in counts]]
        )
        return [*self._values.sizes(rooms), *where]

    def encode(
        self,
        rows_RD: torch.Tensor,
        counts: Sequence[int],
        training: bool,
        entries: Entries | None = None,
    ) -> tuple[list[torch.Tensor], Entries | None]:
        deciding_RD = _relative(rows_RD) if self._relative else rows_RD
        tau = self.threshold(deciding_RD, training)
        streams, entries, used = self.encode_those(rows_RD, deciding_RD, tau, counts)
        if training and not USED_WELL <= used <= 1:
            self.threshold.expire()
        return streams, entries

    def encode_those(
        self,
        rows_RD: torch.Tensor,
        deciding_RD: torch.Tensor,
        least: torch.Tensor,
        counts: Sequence[int],
    ) -> tuple[list[torch.Tensor], Entries, float]:
        """Streams of the entries for which another number is large.

        Args:
            rows_RD: the entries.
            deciding_RD: for each of them a number whose magnitude decides.
            least: what it must be, at least; 0-dim.
            counts: rows of each rank.

        Returns:
            streams, which entries they have, and the share of the room that is used; more than 1
            if there was not enough.
        """
        rooms = [self.room(n) for n in counts]
        at_E, in_row_R, fits = self._select(deciding_RD, least, counts, rooms)
        used = float(in_row_R.sum()) / max(sum(rooms), 1) if fits else torch.inf
        entries = Entries(at_E)
        streams, _ = self._values.encode(entries.take(rows_RD)[:, None], rooms, True)
        if self._indexed:
            streams += [
                as_bytes(in_row_R.to(self._index_dtype)),
                as_bytes(at_E.remainder(self._dim).to(self._index_dtype)),
            ]
        else:
            streams.append(_to_bits(at_E, rows_RD.shape))
        return streams, entries, used

    def _select(
        self,
        deciding_RD: torch.Tensor,
        least: torch.Tensor,
        counts: Sequence[int],
        rooms: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Positions of the entries in the rooms, entries of each row, and whether all had room."""
        if native.available_on(deciding_RD.device):
            at_E, in_row_R, fits = torch.ops.fusedrec.largest(deciding_RD, least, counts, rooms)
            if fits:
                return at_E, in_row_R, True
        magnitudes_RD = deciding_RD.abs()
        keep_RD = ~(magnitudes_RD < least)  # NaN travels
        in_row_R = keep_RD.sum(1)
        totals = _per_rank(in_row_R, counts).tolist()
        fits = all(total <= room for total, room in zip(totals, rooms, strict=True))
        if not fits:
            self._cut(magnitudes_RD, keep_RD, counts, rooms, totals)
            in_row_R = keep_RD.sum(1)
        return _in_rooms(keep_RD, in_row_R, counts, rooms), in_row_R, fits

    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        entries, values_E = self.decode_those(streams, counts)
        entries.put(values_E, out_RD)
        return entries

    def decode_those(
        self, streams: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> tuple[Entries, torch.Tensor]:
        """Which entries of the rows there are, and their values."""
        rooms = [self.room(n) for n in counts]
        of_values = len(self._values.sizes(rooms))
        if self._indexed:
            in_row_R, column_E = (
                as_numbers(stream, self._index_dtype).long() for stream in streams[of_values:]
            )
            at_E = _first_in_row(in_row_R, counts, rooms, self._dim) + column_E
        else:
            at_E = _from_bits(streams[of_values], self._dim, counts, rooms)
        values_E1 = torch.empty(sum(rooms), 1, device=at_E.device)
        self._values.decode(streams[:of_values], rooms, values_E1)
        return Entries(at_E), values_E1.view(-1)

    def _cut(
        self,
        magnitudes_RD: torch.Tensor,
        keep_RD: torch.Tensor,
        counts: Sequence[int],
        rooms: Sequence[int],
        totals: Sequence[int],
    ) -> None:
        """Where there is not enough room, only the largest stay."""
        starts = accumulate(counts, initial=0)
        for start, count, room, total in zip(starts, counts, rooms, totals, strict=False):
            if total > room:
                magnitudes = magnitudes_RD[start : start + count].reshape(-1)
                magnitudes = magnitudes.nan_to_num(nan=torch.inf)
                largest = magnitudes.topk(room, sorted=False).indices
                keep = torch.zeros_like(magnitudes, dtype=torch.bool)
                keep_RD[start : start + count] = keep.index_fill_(0, largest, True).view(
                    count, self._dim
                )


def _relative(rows_RD: torch.Tensor) -> torch.Tensor:
    if not rows_RD.numel():
        return rows_RD
    largest_R1 = rows_RD.abs().amax(1, keepdim=True)
    # All entries of a row of zeros are its largest: they could not be trained if they were not.
    return torch.where(largest_R1 == 0, 1.0, rows_RD / largest_R1)


def _per_rank(in_row_R: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Sums of rows' numbers over each rank's rows."""
    ends = to_device([*accumulate(counts, initial=0)], in_row_R.device)
    sums = torch.cat([in_row_R.new_zeros(1), in_row_R.cumsum(0)]).index_select(0, ends)
    return sums[1:] - sums[:-1]


def _in_rooms(
    keep_RD: torch.Tensor, in_row_R: torch.Tensor, counts: Sequence[int], rooms: Sequence[int]
) -> torch.Tensor:
    """Positions of the entries, in the room of their rank's message each."""
    at = keep_RD.view(-1).nonzero().flatten()
    totals_W = _per_rank(in_row_R, counts)
    room_starts_W = to_device([*accumulate(rooms, initial=0)][:-1], at.device)
    shift_W = room_starts_W - (totals_W.cumsum(0) - totals_W)
    places = torch.arange(at.numel(), device=at.device) + shift_W.repeat_interleave(
        totals_W, output_size=at.numel()
    )
    return at.new_full((sum(rooms),), keep_RD.numel()).index_copy_(0, places, at)


def _first_in_row(
    in_row_R: torch.Tensor, counts: Sequence[int], rooms: Sequence[int], dim: int
) -> torch.Tensor:
    """For each entry of the rooms, where its row begins.

    Unused room is one more row of each rank, behind its others.
    """
    device, ranks, rows = in_row_R.device, len(counts), in_row_R.numel()
    ends = to_device([*accumulate(counts)], device)
    rank_R = torch.arange(ranks, device=device).repeat_interleave(
        to_device(counts, device), output_size=rows
    )
    places_R = torch.arange(rows, device=device) + rank_R
    unused_W = to_device(rooms, device) - _per_rank(in_row_R, counts)
    repeats = in_row_R.new_empty(rows + ranks)
    repeats.index_copy_(0, places_R, in_row_R)
    repeats.index_copy_(0, ends + torch.arange(ranks, device=device), unused_W)
    begins = in_row_R.new_full((rows + ranks,), rows * dim)
    begins.index_copy_(0, places_R, torch.arange(rows, device=device) * dim)
    return begins.repeat_interleave(repeats, output_size=sum(rooms))


def _bits(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _to_bits(at_E: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A bit for each entry of the rows, whole bytes for each row."""
    rows, dim = shape
    if native.available_on(at_E.device):
        bits: torch.Tensor = torch.ops.fusedrec.to_bits(at_E, rows, dim)
        return bits
    width = -(-dim // 8)
    row_E = at_E // dim
    bytes_ = torch.zeros(rows * width + 1, dtype=torch.uint8, device=at_E.device)
    column_E = at_E - row_E * dim
    # Each bit is set once, so a sum is an or; unused room sets one behind the last byte.
    bits_E = torch.ones_like(column_E, dtype=torch.uint8) << (column_E % 8).to(torch.uint8)
    bytes_.index_add_(0, row_E * width + column_E // 8, bits_E)
    return bytes_[:-1]


def _from_bits(
    stream: torch.Tensor, dim: int, counts: Sequence[int], rooms: Sequence[int]
) -> torch.Tensor:
    """Positions of the entries in the rooms."""
    if native.available_on(stream.device):
        at_E: torch.Tensor = torch.ops.fusedrec.from_bits(stream, dim, counts, rooms)
        return at_E
    bits = (stream[:, None] >> _bits(stream.device)) & 1
    keep_RD = bits.view(-1, -(-dim // 8) * 8)[:, :dim].bool().contiguous()
    return _in_rooms(keep_RD, keep_RD.sum(1), counts, rooms)
