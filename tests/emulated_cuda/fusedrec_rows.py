"""What our own kernels compute of rows that travel or are replicated: see ``fusedrec``."""

from itertools import accumulate

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries
from fusedrec_torchrec.codecs.dct import DctCodec, relative_to_largest
from fusedrec_torchrec.codecs.int8 import Int8Codec
from fusedrec_torchrec.codecs.numbers import NumberCodec
from fusedrec_torchrec.codecs.wire import Wire
from fusedrec_torchrec.core.gpu import FORMATS
from tests.emulated_cuda.oracles import oracle


@oracle("fusedrec::row_addresses")
def row_addresses(like: torch.Tensor, counts: list[int], dims: list[int]) -> torch.Tensor:
    buckets = len(dims)
    sizes = [count * dims[i % buckets] for i, count in enumerate(counts)]
    firsts = [0, *accumulate(sizes)]
    pieces = [
        firsts[i] + torch.arange(counts[i]) * dims[k]
        for k in range(buckets)
        for i in range(k, len(counts), buckets)
    ]
    return torch.cat(pieces)


def wire_of(dims: list[int], formats: list[int], scales: list[float]) -> Wire:
    """Returns the codecs that kernels stand for."""
    codecs: list[Codec] = [
        Int8Codec(dim)
        if FORMATS[form] == "int8"
        else NumberCodec.of(FORMATS[form], dim, scale if scale > 0 else None)
        for dim, form, scale in zip(dims, formats, scales, strict=True)
    ]
    return Wire(codecs, dims)


def _by_rank(counts: list[int], buckets: int) -> list[list[int]]:
    return [counts[i : i + buckets] for i in range(0, len(counts), buckets)]


@oracle("fusedrec::encode_rows")
def encode_rows(
    flat: torch.Tensor,
    counts: list[int],
    dims: list[int],
    formats: list[int],
    scales: list[float],
) -> torch.Tensor:
    wire = wire_of(dims, formats, scales)
    return wire.encode(flat, _by_rank(counts, len(dims)), True)[0]


@oracle("fusedrec::decode_rows")
def decode_rows(
    wire: torch.Tensor,
    counts: list[int],
    dims: list[int],
    formats: list[int],
    scales: list[float],
    out: torch.Tensor,
) -> None:
    wire_of(dims, formats, scales).decode(wire, _by_rank(counts, len(dims)), out)


def _dct(dim: int, rooms: list[int], relative: bool, index_bytes: int) -> DctCodec:
    """Returns a codec whose messages have this room, and are indexed in this way."""
    codec = DctCodec(dim, 0.5, 1, NumberCodec.of("fp32", 1), relative)
    left = iter(rooms)
    codec.room = lambda _: next(left)  # type: ignore[assignment]
    codec._indexed = index_bytes > 0
    return codec


@oracle("fusedrec::encode_entries")
def encode_entries(
    rows: torch.Tensor,
    threshold: torch.Tensor,
    counts: list[int],
    rooms: list[int],
    relative: bool,
    index_bytes: int,
) -> tuple[torch.Tensor, ...]:
    scores = relative_to_largest(rows) if relative else rows
    codec = _dct(rows.size(1), rooms, relative, index_bytes)
    streams, entries, _ = codec.encode_entries(rows, scores, threshold, counts)
    totals = torch.stack([part.sum() for part in (~(scores.abs() < threshold)).split(counts)])
    values, where, *columns = streams
    columns = columns or [where[:0]]
    return entries.positions_E, values.view(torch.float32), where, columns[0], totals


@oracle("fusedrec::decode_entries")
def decode_entries(
    values: torch.Tensor,
    where: torch.Tensor,
    columns: torch.Tensor,
    counts: list[int],
    rooms: list[int],
    index_bytes: int,
    out: torch.Tensor,
) -> torch.Tensor:
    codec = _dct(out.size(1), rooms, False, index_bytes)
    streams = [values.view(torch.uint8), where, columns][: 3 if index_bytes else 2]
    entries = codec.decode(streams, counts, out)
    assert entries is not None
    return entries.positions_E


@oracle("fusedrec::take_entries")
def take_entries(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return Entries(positions).take(rows)


@oracle("fusedrec::put_entries")
def put_entries(values: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    Entries(positions).put(values, out)


@oracle("fusedrec::sum_replicas")
def sum_replicas(
    messages: torch.Tensor,
    place_starts: list[int],
    counts: list[int],
    rows: torch.Tensor,
    row_starts: list[int],
    dim: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rank that names a place has the sum."""
    flat, sums = rows.reshape(-1), torch.zeros(capacity, dim)
    is_named = torch.zeros(capacity, dtype=torch.bool)
    of_ranks = []
    for start, count, first in zip(place_starts, counts, row_starts, strict=True):
        own = messages[start : start + count].long()
        sums[own] += flat[first : first + count * dim].view(count, dim).float()
        of_ranks.append(torch.where(is_named[own], capacity, own))
        is_named[own] = True
    places = torch.cat(of_ranks)
    return places, torch.cat([sums, torch.zeros(1, dim)])[places]


def _message(flags: torch.Tensor, ends: torch.Tensor, room: int) -> torch.Tensor:
    """Returns how many flags are set up to each end, and which; zeros behind them."""
    listed = flags.nonzero().flatten().int()[:room]
    header = torch.cat([torch.zeros(1), flags.cumsum(0)])[ends.long()].int()
    return torch.cat([header, listed, torch.zeros(room - listed.numel(), dtype=torch.int32)])


@oracle("fusedrec::list_flags")
def list_flags(flags: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _message(flags, ends, flags.numel())


@oracle("fusedrec::list_touched")
def list_touched(
    numbers: list[torch.Tensor], first_rows: list[int], ends: torch.Tensor, rows: int, room: int
) -> torch.Tensor:
    flags = torch.zeros(rows, dtype=torch.bool)
    for own, first in zip(numbers, first_rows, strict=True):
        flags[own.long() + first] = True
    return _message(flags, ends, max(room, min(sum(n.numel() for n in numbers), rows)))


@oracle("fusedrec::unite_touched")
def unite_touched(
    messages: torch.Tensor, ends: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    headers, listed = messages.split([ends.numel(), messages.size(1) - ends.numel()], dim=1)
    flags = torch.zeros(rows, dtype=torch.bool)
    for header, own in zip(headers, listed, strict=True):
        flags[own[: int(header[-1])].long()] = True
    union = _message(flags, ends, min(listed.numel(), rows))
    return torch.cat([headers.flatten(), union[: ends.numel()]]), union[ends.numel() :]


@oracle("fusedrec::write_means")
def write_means(
    sums: torch.Tensor, rows: torch.Tensor, first_row: int, replicas: int, table: torch.Tensor
) -> None:
    table[rows.long() - first_row] = (sums.float() / replicas).to(table.dtype)
