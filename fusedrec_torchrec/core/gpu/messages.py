"""Local rows into messages to their owners, and out of them, on CUDA: ``messages.h`` on CPU.

Headers are written and read here, too: on CPU that is a few numbers, which are on the host already.

Shape suffixes: U unique keys, K buckets, O owners, W ranks, P = K * O parts, H lines of counts:
units of all buckets, ids of those with bags.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.gpu.starts import starts_on_device
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["ask_owners", "collect_headers", "pack_rows", "unpack", "write_headers"]

BLOCK = 512
SLACK_ONE = 1 << 16  # what a slack of 1.0 is, in whole numbers


@kernel(numbers="size spare")
def _pack(
    keys, counts, part_starts, starts, words, size, buckets, owners, ranks, spare,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes keys as rows of their part to where the words for its owner are.

    Keys behind the last one that is counted, and rows that do not fit, go nowhere.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part, before, total = (at * 0).to(tl.int32), at * 0, at * 0
    for p in range(buckets * owners):
        count = tl.load(counts + p)
        is_behind = at >= total + count
        before = tl.where(is_behind, total + count, before)
        part += is_behind.to(tl.int32)
        total += count
    owner, bucket = part % owners, part // owners
    live = (at < total) & (at < size) & (owner < ranks)
    to = tl.load(starts + owner, mask=live, other=0) + at - before
    for k in range(buckets):
        count = tl.load(counts + k * owners + owner, mask=live & (k < bucket), other=0)
        to += count
    key = tl.load(keys + at, mask=live, other=0)
    row = key - tl.load(part_starts + part, mask=live, other=0)
    tl.store(words + to, row.to(tl.int32), mask=live & (to < spare))


@kernel(numbers="width capacity stale", addresses="status other")
def _write_headers(
    status, other, counts, messages, width, lines, buckets, row_buckets, owners, ranks,
    capacity, granule, slack, one, stale, words_per_id,
    EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes [status | wanted capacity | overflow | counts] before each rank's words."""
    rank = tl.arange(0, BLOCK)
    live = rank < ranks
    line = rank.to(tl.int64) * width
    words = tl.zeros([BLOCK], tl.int64)
    for k in range(lines):
        count = tl.load(counts + k * owners + rank, mask=live, other=0)
        words += count * tl.where(k < buckets, 1, words_per_id)
        tl.store(messages + line + 3 + k, count.to(tl.int32), mask=live)
    if owners > ranks:
        tl.store(messages + line + 3 + lines, rank * 0 + stale, mask=live)
        for k in range(row_buckets):
            replicas = tl.load(counts + k * owners + ranks).to(tl.int32)
            tl.store(messages + line + 4 + lines + k, rank * 0 + replicas, mask=live)
    largest = tl.max(words, 0)
    wanted = largest * 0
    if not EXACT:
        wanted = (largest * slack + one * granule - 1) // (one * granule) * granule
    own = tl.maximum(tl.load(status).to(tl.int32), tl.load(other).to(tl.int32))
    tl.store(messages + line, rank * 0 + own, mask=live)
    wanted = tl.minimum(wanted, 2147483647).to(tl.int32)
    tl.store(messages + line + 1, rank * 0 + wanted, mask=live)
    tl.store(messages + line + 2, rank * 0 + (largest > capacity).to(tl.int32), mask=live)


@kernel(numbers="stale", addresses="status other")
def _ask_owners(
    status, other, counts, out, buckets, row_buckets, owners, ranks, stale, BLOCK: tl.constexpr
):
    """Writes [status | whether any rank is asked | stale | replicated rows of each bucket]."""
    rank = tl.arange(0, BLOCK)
    asked = tl.zeros([BLOCK], tl.int64)
    for k in range(buckets):
        asked += tl.load(counts + k * owners + rank, mask=rank < ranks, other=0)
    own = tl.maximum(tl.load(status).to(tl.int32), tl.load(other).to(tl.int32))
    tl.store(out, own)
    tl.store(out + 1, (tl.max(asked, 0) > 0).to(tl.int32))
    tl.store(out + 2, stale)
    for k in range(row_buckets):
        tl.store(out + 3 + k, tl.load(counts + k * owners + ranks).to(tl.int32))


@kernel(numbers="width", addresses="statuses")
def _collect_headers(
    messages, counts, statuses, out, width, header, lines, buckets, owners, ranks, everyone,
    words_per_id, BLOCK: tl.constexpr,
):  # fmt: skip
    """Brings together all that the host reads: headers, own counts and words, statuses."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    headers = ranks * header
    is_header = at < headers
    line = (at // header).to(tl.int64) * width
    word = tl.load(messages + line + at % header, mask=is_header, other=0)
    at -= headers
    is_count = (at >= 0) & (at < owners * buckets)
    of_part = (at % buckets) * owners + at // buckets
    word += tl.load(counts + of_part, mask=is_count, other=0).to(tl.int32)
    at -= owners * buckets
    is_sum = (at >= 0) & (at < ranks)
    for k in range(lines):
        count = tl.load(counts + k * owners + at, mask=is_sum, other=0).to(tl.int32)
        word += count * tl.where(k < buckets, 1, words_per_id)
    at -= ranks
    is_status = (at >= 0) & (at < everyone)
    word += tl.load(statuses + at, mask=is_status, other=0)
    to = at + headers + owners * buckets + ranks
    tl.store(out + to, word, mask=is_header | is_count | is_sum | is_status)


@kernel()
def _unpack(messages, pieces, out, BLOCK: tl.constexpr):
    """Copies a piece, ``program_id(1)``: from a place of a rank's message to one of the output."""
    piece = tl.program_id(1)
    source = tl.load(pieces + 3 * piece)
    target = tl.load(pieces + 3 * piece + 1)
    size = tl.load(pieces + 3 * piece + 2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(messages + source + at, mask=at < size, other=0)
    tl.store(out + target + at, word, mask=at < size)


def pack_rows(
    keys_U: torch.Tensor,
    counts_KO: torch.Tensor,
    part_starts_P1: torch.Tensor,
    starts_W: Sequence[int],
    words: torch.Tensor,
) -> None:
    """Writes the local rows of the unique keys for each owner; see ``messages.h``.

    Rows that do not fit run over the words of the next owner: a header tells that, later.
    """
    if not keys_U.numel():
        return
    buckets, owners = counts_KO.shape
    _pack[(triton.cdiv(keys_U.numel(), BLOCK),)](
        keys_U, counts_KO, part_starts_P1, starts_on_device(starts_W, words.device), words,
        keys_U.numel(), buckets, owners, len(starts_W), words.numel(), BLOCK=BLOCK,
    )  # fmt: skip


def unpack(
    messages: torch.Tensor, header: int, sizes_WK: Sequence[int], segments: int
) -> list[torch.Tensor]:
    """Returns what is behind the headers of all messages, segment by segment."""
    ranks, width = messages.shape
    totals = [sum(sizes_WK[k::segments]) for k in range(segments)]
    out = torch.empty(sum(totals), dtype=torch.int32, device=messages.device)
    pieces, targets = [], [0, *accumulate(totals)]
    for rank in range(ranks):
        source = rank * width + header
        for k in range(segments):
            size = sizes_WK[rank * segments + k]
            pieces += [source, targets[k], size]
            source += size
            targets[k] += size
    if out.numel():
        _unpack[(triton.cdiv(max(sizes_WK), BLOCK), ranks * segments)](
            messages, to_device(pieces, messages.device), out, BLOCK=BLOCK
        )
    return list(out.split(totals))


def write_headers(
    statuses: Sequence[torch.Tensor],
    counts_HO: torch.Tensor,
    messages: torch.Tensor,
    capacity: int,
    granule: int,
    slack: int,
    stale: bool,
    bag_buckets: int = 0,
    words_per_id: int = 1,
) -> None:
    """Writes the headers of messages; see ``exchange/messages.py``.

    Args:
        statuses: of this rank's batch, the largest of which counts.
        counts_HO: units asked of each owner in each bucket, and ids in the buckets with bags.
        messages: one line for each rank.
        capacity: words that a message has room for.
        granule, slack: of the capacity that is asked for; no slack asks for none.
        stale: whether replicas must be loaded anew.
        bag_buckets: how many of the buckets have bags; they come last.
        words_per_id: of the ids in them.
    """
    (ranks, width), (lines, owners) = messages.shape, counts_HO.shape
    buckets = lines - bag_buckets
    statuses = _at_most_two(statuses)
    _write_headers[(1,)](
        statuses[0], statuses[-1], counts_HO, messages, width, lines, buckets,
        buckets - bag_buckets, owners, ranks,
        capacity, granule, slack, SLACK_ONE, int(stale), words_per_id,
        EXACT=slack == 0, BLOCK=triton.next_power_of_2(ranks),
    )  # fmt: skip


def ask_owners(
    statuses: Sequence[torch.Tensor],
    counts_KO: torch.Tensor,
    ranks: int,
    row_buckets: int,
    stale: bool,
) -> torch.Tensor:
    """Returns what ranks tell each other before they ask owners; see ``all_replicated.py``.

    Args:
        statuses: of this rank's batch, the largest of which counts.
        counts_KO: units asked of each owner in each bucket, replicas behind the ranks.
        ranks: how many there are.
        row_buckets: buckets that may have replicated rows; they come first.
        stale: whether replicas must be loaded anew.
    """
    buckets, owners = counts_KO.shape
    out = torch.empty(3 + row_buckets, dtype=torch.int32, device=counts_KO.device)
    statuses = _at_most_two(statuses)
    _ask_owners[(1,)](
        statuses[0], statuses[-1], counts_KO, out, buckets, row_buckets, owners, ranks, int(stale),
        BLOCK=triton.next_power_of_2(ranks),
    )  # fmt: skip
    return out


def _at_most_two(statuses: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns as many statuses as a kernel looks at, the largest of them among these."""
    if len(statuses) <= 2:
        return statuses
    return [torch.stack([status.int() for status in statuses]).amax()]


def collect_headers(
    messages: torch.Tensor,
    header: int,
    counts_HO: torch.Tensor,
    statuses: torch.Tensor,
    bag_buckets: int = 0,
    words_per_id: int = 1,
) -> torch.Tensor:
    """Returns all that the host reads of a batch: headers, units, words of each rank, statuses."""
    (ranks, width), (lines, owners) = messages.shape, counts_HO.shape
    buckets = lines - bag_buckets
    everyone = statuses.numel()
    out = messages.new_empty(ranks * header + buckets * owners + ranks + everyone)
    _collect_headers[(triton.cdiv(out.numel(), BLOCK),)](
        messages, counts_HO, statuses, out, width, header, lines, buckets, owners, ranks,
        everyone, words_per_id, BLOCK=BLOCK,
    )  # fmt: skip
    return out
