"""Messages and their headers: as the C++ operators and the host write them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.core import native

pytest.importorskip("triton")
from fusedrec_torchrec.exchange.capacity import Capacity
from fusedrec_torchrec.exchange.options import ExchangeOptions
from tests.core.gpu.device import kernels_of

checks, messages = kernels_of("checks"), kernels_of("messages")

EXAMPLES = settings(max_examples=30, deadline=None)
COUNTS = st.integers(1, 3).flatmap(
    lambda owners: st.lists(
        st.lists(st.integers(0, 9), min_size=owners, max_size=owners), min_size=1, max_size=3
    )
)


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@EXAMPLES
@given(COUNTS, st.booleans(), st.booleans())
def test_rows_go_where_the_cpp_operator_puts_them(
    counts: list[list[int]], replicas: bool, wide: bool
) -> None:
    ranks = max(len(counts[0]) - replicas, 1)
    starts = torch.tensor([0, *(n for row in counts for n in row)]).cumsum(0) * 3
    starts = starts.to(torch.int64 if wide else torch.int32)
    keys = torch.cat(
        [
            starts[p] + torch.arange(n)
            for p, n in enumerate(n for row in counts for n in row)
        ]
    ).to(starts)  # fmt: skip
    padding = torch.full((4,), 77, dtype=starts.dtype)
    counts_KO = torch.tensor(counts)
    room = max(sum(row[r] for row in counts) for r in range(ranks)) + 2
    places = [2 + r * (room + 5) for r in range(ranks)]
    want = torch.full((ranks * (room + 5) + 3,), -1, dtype=torch.int32)
    got = want.clone()
    torch.ops.fusedrec.pack_rows(keys, counts_KO, starts, places, want)
    messages.pack_rows(torch.cat([keys, padding]), counts_KO, starts, places, got)
    assert got.tolist() == want.tolist()


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@EXAMPLES
@given(COUNTS)
def test_messages_are_taken_apart_as_by_the_cpp_operator(sizes: list[list[int]]) -> None:
    width = max(map(sum, sizes)) + 4
    received = torch.arange(len(sizes) * width, dtype=torch.int32).view(len(sizes), width)
    flat = [n for row in sizes for n in row]
    want = torch.ops.fusedrec.unpack(received, 3, flat, len(sizes[0]))
    got = messages.unpack(received, 3, flat, len(sizes[0]))
    assert [t.tolist() for t in got] == [t.tolist() for t in want]


@EXAMPLES
@given(COUNTS, st.booleans(), st.integers(0, 30), st.sampled_from([0, 1, 2]), st.booleans())
def test_headers_are_written_and_read(
    counts: list[list[int]], replicas: bool, capacity: int, status: int, exact: bool
) -> None:
    owners, buckets = len(counts[0]), len(counts)
    ranks = max(owners - replicas, 1)
    replicas = owners > ranks
    options = ExchangeOptions(input_dist="exact_counts" if exact else "single_shot")
    rule = Capacity(options)
    header = 3 + buckets + (1 + buckets) * replicas
    sent = torch.full((ranks, header + capacity), -7, dtype=torch.int32)
    counts_KO = torch.tensor(counts)
    messages.write_headers(
        [torch.tensor(False), torch.tensor(status, dtype=torch.int32)][: 1 + bool(status)],
        counts_KO,
        sent,
        capacity,
        *rule.rule,
        True,
    )
    words = [sum(row[r] for row in counts) for r in range(ranks)]
    for rank, line in enumerate(sent.tolist()):
        want = [status, rule.wanted(max(words)), int(max(words) > capacity)]
        want += [row[rank] for row in counts]
        want += [1, *(row[-1] for row in counts)] if replicas else []
        assert line == want + [-7] * capacity
    statuses = torch.tensor([status, 0, 1], dtype=torch.int32)
    read = messages.collect_headers(sent, header, counts_KO, statuses).tolist()
    assert read == [
        *sent[:, :header].flatten().tolist(),
        *counts_KO.t().flatten().tolist(),
        *words,
        *statuses.tolist(),
    ]


@EXAMPLES
@given(st.data(), st.booleans(), st.integers(0, 60), st.booleans())
def test_headers_of_rows_and_bags_with_replicas(
    data: st.DataObject, replicas: bool, capacity: int, stale: bool
) -> None:
    """Buckets of rows come first, then those of bags, then the ids of these."""
    ranks, words_per_id = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2]))
    row_buckets = data.draw(st.integers(1 if replicas else 0, 3))
    bag_buckets = data.draw(st.integers(0 if row_buckets else 1, 3))
    numbers = st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)
    units = [data.draw(numbers) for _ in range(row_buckets + bag_buckets)]
    ids = [data.draw(numbers) for _ in range(bag_buckets)]
    of_replicas = [data.draw(st.integers(0, 9)) for _ in range(row_buckets)]
    counts = [*units, *ids]
    words = [
        sum(row[r] for row in units) + words_per_id * sum(row[r] for row in ids)
        for r in range(ranks)
    ]
    if replicas:
        behind = [*of_replicas, *[0] * (2 * bag_buckets)]
        counts = [[*row, more] for row, more in zip(counts, behind, strict=True)]
    header = 3 + len(counts) + (1 + row_buckets if replicas else 0)
    sent = torch.full((ranks, header + capacity), -7, dtype=torch.int32)
    counts_HO, rule = torch.tensor(counts), Capacity(ExchangeOptions())
    of_bags = (bag_buckets, words_per_id)
    messages.write_headers(
        [torch.tensor(False)], counts_HO, sent, capacity, *rule.rule, stale, *of_bags
    )
    for rank, line in enumerate(sent.tolist()):
        want = [0, rule.wanted(max(words)), int(max(words) > capacity)]
        want += [row[rank] for row in counts]
        want += [int(stale), *of_replicas] if replicas else []
        assert line == want + [-7] * capacity
    nobody = torch.empty(0, dtype=torch.int32)
    read = messages.collect_headers(sent, header, counts_HO, nobody, *of_bags).tolist()
    own = counts_HO[: row_buckets + bag_buckets].t().flatten().tolist()
    assert read == [*sent[:, :header].flatten().tolist(), *own, *words]


@pytest.mark.parametrize(
    ("lengths", "counts", "is_bad"),
    [
        ([1, 2, 0, 3], [3, 3], False),
        ([1, 2, 0, 3], [2, 4], True),
        ([4, -1, 0, 3], [3, 3], True),
        ([], [0, 0], False),
        ([1] * 3000, [1500, 1500], False),
        ([1] * 2999 + [2], [1500, 1500], True),
    ],
)
def test_lengths_that_do_not_fit_the_ids(
    lengths: list[int], counts: list[int], is_bad: bool
) -> None:
    strides = [len(lengths) // 2] * 2
    for dtype in (torch.int32, torch.int64):
        lengths_B = torch.tensor(lengths, dtype=dtype)
        offsets_B1 = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
        ids = sum(counts)
        bad = checks.bad_lengths(lengths_B, offsets_B1, ids, strides, counts)
        assert bool(bad) == is_bad and bad.dim() == 0 and bad.dtype == torch.bool
        uncounted = checks.bad_lengths(lengths_B, offsets_B1, ids, strides, [])
        assert bool(uncounted) == (sum(lengths) != ids or min(lengths, default=0) < 0)
        if lengths:  # offsets that begin elsewhere, or are not those of the lengths
            assert bool(checks.bad_lengths(lengths_B, offsets_B1 + 1, ids, strides, []))
            other = torch.cat([lengths_B[1:], lengths_B[:1]])
            fits = other.tolist() == lengths
            assert bool(checks.bad_lengths(other, offsets_B1, ids, strides, [])) != fits or is_bad


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("counts", "row_buckets"),
    [
        ([[0, 0, 4], [0, 0, 0]], 2),
        ([[0, 0, 4], [0, 1, 7]], 2),
        ([[3, 0, 0], [0, 0, 0]], 1),
        ([[0, 0, 9]], 0),
    ],
)
def test_what_ranks_tell_before_they_ask(
    counts: list[list[int]], row_buckets: int, stale: bool
) -> None:
    for statuses in ([False], [False, True], [False, True, False]):
        asked = messages.ask_owners(
            [torch.tensor(status) for status in statuses],
            torch.tensor(counts),
            2,
            row_buckets,
            stale,
        )
        needs_owners = any(any(row[:2]) for row in counts)
        want = [any(statuses), needs_owners, stale, *(row[2] for row in counts[:row_buckets])]
        assert asked.tolist() == want and asked.dtype == torch.int32
