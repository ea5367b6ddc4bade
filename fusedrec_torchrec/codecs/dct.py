"""The codec ``dct``: only entries of rows that reach a threshold travel.

This is dynamic communication thresholding (DCT, KDD 2021) for model parallelism.  Of the rows that
an owner sends, those entries travel whose magnitude is at least tau, the owner's threshold for the
bucket; the others arrive as zeros.  Backward, gradients of just these entries
travel.  There is no error feedback: an entry that does not travel is not trained.

A message has room for a fixed share of its entries, so its size follows from the number of its
rows.  Where more entries reach tau than there is room for, the largest travel: tau is higher for
this message, and is renewed in the next step.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries, as_bytes, as_numbers
from fusedrec_torchrec.codecs.numbers import NumberCodec, Room
from fusedrec_torchrec.codecs.threshold import Threshold
from fusedrec_torchrec.core import native, operators
from fusedrec_torchrec.core.transfer import ToHost, to_device

__all__ = ["MOST_COLUMNS", "DctCodec", "relative_to_largest"]

MOST_COLUMNS = (1 << 15) - 1
MOST_OF_KERNEL = 4096  # columns that a program on CUDA can have in hand
LEAST_USE = 0.5  # share of the room; if less is used, tau is renewed


class DctCodec(Codec):
    """Sends the entries of rows that reach a threshold, and where they are.

    The streams are the values, and then a bit for each entry of the rows, or for each row the
    number of its entries and for each entry its column, whatever is fewer bytes.

    Args:
        dim: columns of the rows.
        density: share of entries that travel.
        every: steps from one renewal of tau to the next.
        values: the codec of the entries' values.
        relative: whether entries are compared in units of the largest of their row, so that every
            row sends some; if not, rows of small numbers may send nothing.
    """

    def __init__(
        self, dim: int, density: float, every: int, values: NumberCodec, relative: bool = False
    ) -> None:
        self._dim = dim
        self._relative = relative
        self._values = values
        self.room = Room(dim, density)
        self.threshold = Threshold(density, every)
        self._index_dtype = torch.uint8 if dim < 256 else torch.int16
        self._mask_bytes = -(-dim // 8)
        self._indexed = self._index_dtype.itemsize * (1 + self.room.per_row) < self._mask_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of a column on the wire; 0 if there is a bit for each entry."""
        return self._index_dtype.itemsize if self._indexed else 0

    def _by_kernel(self, rows_RD: torch.Tensor) -> bool:
        if not rows_RD.is_cuda or rows_RD.dtype != torch.float32 or self._dim > MOST_OF_KERNEL:
            return False
        return operators.available_on(rows_RD.device, "encode_entries", "decode_entries")

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
        by_kernel = self._by_kernel(rows_RD)
        # The kernel finds scores itself; who looks for a new threshold needs them, too.
        scored = self._relative and (not by_kernel or self.threshold.is_due(training))
        scores_RD = relative_to_largest(rows_RD) if scored else rows_RD
        tau = self.threshold(scores_RD, training)
        if by_kernel:
            return self._encode_by_kernel(rows_RD, tau, counts, training)
        streams, entries, used = self.encode_entries(rows_RD, scores_RD, tau, counts)
        if training and not LEAST_USE <= used <= 1:
            self.threshold.expire()
        return streams, entries

    def _encode_by_kernel(
        self, rows_RD: torch.Tensor, tau: torch.Tensor, counts: Sequence[int], training: bool
    ) -> tuple[list[torch.Tensor], Entries | None]:
        """Encodes on CUDA, without waiting: the host looks at how much was used a step later."""
        rooms = [self.room(n) for n in counts]
        positions_E, values_E, where, columns, totals_W = torch.ops.fusedrec.encode_entries(
            rows_RD.contiguous(), tau, counts, rooms, self._relative, self.index_bytes
        )
        if training and rows_RD.numel():
            self.threshold.expire_unless(ToHost(totals_W), lambda totals: _is_fine(totals, rooms))
        streams, _ = self._values.encode(values_E[:, None], rooms, True)
        streams += [where, columns] if self._indexed else [where]
        return streams, Entries(positions_E)

    def encode_entries(
        self,
        rows_RD: torch.Tensor,
        scores_RD: torch.Tensor,
        threshold: torch.Tensor,
        counts: Sequence[int],
    ) -> tuple[list[torch.Tensor], Entries, float]:
        """Encodes the entries whose scores reach a threshold.

        Args:
            rows_RD: the entries.
            scores_RD: a number for each entry, whose magnitude is compared with the threshold.
            threshold: 0-dim.
            counts: rows of each rank.

        Returns:
            The streams, the entries that they hold, and the share of the room that is used; more
            than 1 if there was not enough.
        """
        rooms = [self.room(n) for n in counts]
        positions_E, in_row_R, fits = self._select(scores_RD, threshold, counts, rooms)
        used = float(in_row_R.sum()) / max(sum(rooms), 1) if fits else torch.inf
        entries = Entries(positions_E)
        streams, _ = self._values.encode(entries.take(rows_RD)[:, None], rooms, True)
        if self._indexed:
            streams += [
                as_bytes(in_row_R.to(self._index_dtype)),
                as_bytes(positions_E.remainder(self._dim).to(self._index_dtype)),
            ]
        else:
            streams.append(_to_bits(positions_E, rows_RD.shape))
        return streams, entries, used

    def _select(
        self,
        scores_RD: torch.Tensor,
        threshold: torch.Tensor,
        counts: Sequence[int],
        rooms: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Returns positions of the entries, number of entries of each row, and whether all fit."""
        if native.available_on(scores_RD.device):
            positions_E, in_row_R, fits = torch.ops.fusedrec.select_entries(
                scores_RD, threshold, counts, rooms
            )
            if fits:
                return positions_E, in_row_R, True
        absolute_RD = scores_RD.abs()
        keep_RD = ~(absolute_RD < threshold)  # NaN travels
        in_row_R = keep_RD.sum(1)
        totals = _per_rank(in_row_R, counts).tolist()
        fits = all(total <= room for total, room in zip(totals, rooms, strict=True))
        if not fits:
            self._keep_largest(absolute_RD, keep_RD, counts, rooms, totals)
            in_row_R = keep_RD.sum(1)
        return _in_rooms(keep_RD, in_row_R, counts, rooms), in_row_R, fits

    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        if self._by_kernel(out_RD):
            rooms = [self.room(n) for n in counts]
            values_E = self._decode_values(streams, rooms, out_RD.device)
            where, columns = streams[-2:] if self._indexed else (streams[-1], streams[-1][:0])
            if self._indexed:  # behind streams of single bytes
                where, columns = (as_numbers(s, self._index_dtype) for s in (where, columns))
            positions_E = torch.ops.fusedrec.decode_entries(
                values_E,
                where.view(torch.uint8),
                columns.view(torch.uint8),
                counts,
                rooms,
                self.index_bytes,
                out_RD,
            )
            return Entries(positions_E)
        entries, values_E = self.decode_entries(streams, counts)
        entries.put(values_E, out_RD)
        return entries

    def decode_entries(
        self, streams: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> tuple[Entries, torch.Tensor]:
        """Returns the entries that the streams hold, and their values."""
        rooms = [self.room(n) for n in counts]
        value_streams = len(self._values.sizes(rooms))
        if self._indexed:
            in_row_R, column_E = (
                as_numbers(stream, self._index_dtype).long() for stream in streams[value_streams:]
            )
            positions_E = _first_in_row(in_row_R, counts, rooms, self._dim) + column_E
        else:
            positions_E = _from_bits(streams[value_streams], self._dim, counts, rooms)
        return Entries(positions_E), self._decode_values(streams, rooms, positions_E.device)

    def _decode_values(
        self, streams: Sequence[torch.Tensor], rooms: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        own = streams[: len(self._values.sizes(rooms))]
        if self._values.as_kernel == ("fp32", 0.0):
            return as_numbers(own[0], torch.float32)
        values_E1 = torch.empty(sum(rooms), 1, device=device)
        self._values.decode(own, rooms, values_E1)
        return values_E1.view(-1)

    def _keep_largest(
        self,
        absolute_RD: torch.Tensor,
        keep_RD: torch.Tensor,
        counts: Sequence[int],
        rooms: Sequence[int],
        totals: Sequence[int],
    ) -> None:
        """Keeps only the largest entries for ranks whose message has no room for all."""
        starts = accumulate(counts, initial=0)
        for start, count, room, total in zip(starts, counts, rooms, totals, strict=False):
            if total > room:
                absolute = absolute_RD[start : start + count].reshape(-1)
                absolute = absolute.nan_to_num(nan=torch.inf)
                largest = absolute.topk(room, sorted=False).indices
                keep = torch.zeros_like(absolute, dtype=torch.bool)
                keep_RD[start : start + count] = keep.index_fill_(0, largest, True).view(
                    count, self._dim
                )


def _is_fine(totals: Sequence[int], rooms: Sequence[int]) -> bool:
    """Returns whether entries have used much of the room, and had enough."""
    fits = all(total <= room for total, room in zip(totals, rooms, strict=True))
    return fits and sum(totals) >= LEAST_USE * sum(rooms)


def relative_to_largest(rows_RD: torch.Tensor) -> torch.Tensor:
    """Returns entries in units of the largest of their row."""
    if not rows_RD.numel():
        return rows_RD
    largest_R1 = rows_RD.abs().amax(1, keepdim=True)
    # All entries of a row of zeros are its largest: they could not be trained if they were not.
    return torch.where(largest_R1 == 0, 1.0, rows_RD / largest_R1)


def _per_rank(in_row_R: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the sum of the rows' numbers for each rank."""
    ends = to_device([*accumulate(counts, initial=0)], in_row_R.device)
    sums = torch.cat([in_row_R.new_zeros(1), in_row_R.cumsum(0)]).index_select(0, ends)
    return sums[1:] - sums[:-1]


def _in_rooms(
    keep_RD: torch.Tensor, in_row_R: torch.Tensor, counts: Sequence[int], rooms: Sequence[int]
) -> torch.Tensor:
    """Returns the positions of the kept entries, each in the room of its rank's message."""
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
    """Returns for each entry of the rooms where its row begins.

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


def _to_bits(positions_E: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns a bit for each entry of the rows, in whole bytes for each row."""
    rows, dim = shape
    if native.available_on(positions_E.device):
        bits: torch.Tensor = torch.ops.fusedrec.to_bits(positions_E, rows, dim)
        return bits
    width = -(-dim // 8)
    row_E = positions_E // dim
    bytes_ = torch.zeros(rows * width + 1, dtype=torch.uint8, device=positions_E.device)
    column_E = positions_E - row_E * dim
    # Each bit is set once, so a sum is an or; unused room sets one behind the last byte.
    bits_E = torch.ones_like(column_E, dtype=torch.uint8) << (column_E % 8).to(torch.uint8)
    bytes_.index_add_(0, row_E * width + column_E // 8, bits_E)
    return bytes_[:-1]


def _from_bits(
    stream: torch.Tensor, dim: int, counts: Sequence[int], rooms: Sequence[int]
) -> torch.Tensor:
    """Returns the positions of the entries whose bit is set, each in the room of its rank."""
    if native.available_on(stream.device):
        positions_E: torch.Tensor = torch.ops.fusedrec.from_bits(stream, dim, counts, rooms)
        return positions_E
    bits = (stream[:, None] >> _bits(stream.device)) & 1
    keep_RD = bits.view(-1, -(-dim // 8) * 8)[:, :dim].bool().contiguous()
    return _in_rooms(keep_RD, keep_RD.sum(1), counts, rooms)
