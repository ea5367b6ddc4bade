"""What our own kernels compute: values of the C++ operators, in the shapes of the device."""

from itertools import accumulate
from typing import Any

import torch

from fusedrec_torchrec.core.gpu.messages import SLACK_ONE
from tests.emulated_cuda.oracles import LEAVE, oracle

INT32_MAX = torch.iinfo(torch.int32).max


@oracle("fusedrec::bad_lengths")
def bad_lengths(lengths: torch.Tensor, strides: list[int], counts: list[int]) -> torch.Tensor:
    sums = [int(part.sum()) for part in lengths.split(strides)]
    return torch.tensor(sums != counts or bool((lengths < 0).any()))


@oracle("fusedrec::number_rows")
def number_rows(**arguments: Any) -> Any:
    """Unique keys are as many as ids, and bags always have offsets."""
    ids, slot_ends = arguments["ids"].numel(), arguments["slot_ends"]
    starts, batch = arguments["part_starts"], arguments["batch"]
    keys_U = torch.full((ids,), int(starts[-1]), dtype=starts.dtype)
    bags = [(b - a) * batch for a, b in zip([0, *slot_ends[:-1]], slot_ends, strict=True)]
    try:
        unique, rows_N, offsets, counts_P, bad = torch.ops.fusedrec.number_rows(**arguments)
    except RuntimeError:  # of lengths that are wrong: a kernel overruns nothing, and goes on
        counts_P = torch.zeros(starts.numel() - 1, dtype=torch.int64)
        nowhere = [torch.zeros(n + 1, dtype=torch.int32) for n in bags] if batch else []
        return keys_U, torch.zeros(ids, dtype=torch.int32), nowhere, counts_P, torch.tensor(False)
    keys_U[: unique.numel()] = unique
    offsets = [
        of_bucket if of_bucket.numel() else torch.arange(n + 1, dtype=torch.int32)
        for of_bucket, n in zip(offsets, bags if batch else [], strict=True)
    ]
    return keys_U, rows_N, offsets, counts_P, bad


@oracle("fusedrec::pack_rows")
def pack_rows(**arguments: Any) -> Any:
    try:
        return torch.ops.fusedrec.pack_rows(**arguments)
    except RuntimeError:  # they do not fit: what is written means nothing
        return LEAVE


@oracle("fusedrec::write_headers")
def write_headers(
    statuses: list[torch.Tensor],
    counts: torch.Tensor,
    messages: torch.Tensor,
    capacity: int,
    granule: int,
    slack: int,
    stale: bool,
) -> None:
    ranks, buckets = messages.size(0), counts.size(0)
    words = int(counts[:, :ranks].sum(0).max())
    unit = SLACK_ONE * granule
    wanted = min((words * slack + unit - 1) // unit * granule, INT32_MAX) if slack else 0
    messages[:, :3] = torch.tensor([max(map(int, statuses)), wanted, int(words > capacity)])
    messages[:, 3 : 3 + buckets] = counts[:, :ranks].t()
    if counts.size(1) > ranks:
        messages[:, 3 + buckets] = int(stale)
        messages[:, 4 + buckets : 4 + 2 * buckets] = counts[:, ranks]


@oracle("fusedrec::collect_headers")
def collect_headers(
    messages: torch.Tensor, header: int, counts: torch.Tensor, statuses: torch.Tensor
) -> torch.Tensor:
    words_W = counts[:, : messages.size(0)].sum(0)
    parts = [messages[:, :header], counts.t(), words_W, statuses]
    return torch.cat([part.flatten().int() for part in parts])


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
