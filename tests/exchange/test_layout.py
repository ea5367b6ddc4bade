"""Buckets, key space, keys and routes, without a process group."""

from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType, PoolingType

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange.buckets import BucketedTables, group_into_buckets
from fusedrec_torchrec.exchange.dedup import Dedup
from fusedrec_torchrec.exchange.keys import KeySpace
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.routing import Route
from fusedrec_torchrec.exchange.row_numbers import NumberedRows, RowNumbers, rows_of_buckets
from tests.exchange.tables import sharded_tables

CPU = torch.device("cpu")


def bucket_names(specs: list[dict[str, object]], **kwargs: Any) -> list[list[str]]:
    buckets = group_into_buckets(sharded_tables(specs, [[0, 5, 10]] * len(specs)), **kwargs)
    names = [[table.name for table in bucket.config.embedding_tables] for bucket in buckets]
    for rank in range(2):
        own = [bucket.per_rank[rank].embedding_tables for bucket in buckets]
        assert [[table.name for table in tables] for tables in own] == names
    return names


def test_one_bucket_whatever_the_pooling() -> None:
    specs: list[dict[str, object]] = [
        {"name": "a"},
        {"name": "b", "pooling": PoolingType.MEAN},
        {"name": "c"},
    ]
    assert bucket_names(specs) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "difference",
    [
        {"dim": 16},
        {"data_type": DataType.FP16},
        {"optimizer": EmbOptimType.EXACT_ADAGRAD},
        {"lr": 0.2},
        {"kernel": EmbeddingComputeKernel.FUSED_UVM},
    ],
    ids=str,
)
def test_what_keeps_tables_apart(difference: dict[str, object]) -> None:
    specs: list[dict[str, object]] = [
        {"name": "a"},
        {"name": "b", **difference},
        {"name": "c"},
        {"name": "d", **difference},
    ]
    assert bucket_names(specs) == [["a", "c"], ["b", "d"]]


def test_buckets_split_where_row_numbers_would_overflow() -> None:
    specs: list[dict[str, object]] = [{"name": name} for name in "abcde"]  # five rows on each rank
    assert bucket_names(specs, max_rows=10) == [["a", "b"], ["c", "d"], ["e"]]
    with pytest.raises(ValueError, match=r"table 'a' has 5 rows on one rank, must be at most 4"):
        bucket_names(specs, max_rows=4)


def layout_of(
    dims: list[int], rows: list[list[int]], features: list[list[str]] | None = None
) -> ExchangeLayout:
    specs: list[dict[str, object]] = [
        {"name": f"t{i}", "dim": dim, "features": features[i] if features else [f"f{i}"]}
        for i, dim in enumerate(dims)
    ]
    return ExchangeLayout(BucketedTables(group_into_buckets(sharded_tables(specs, rows))), CPU)


def test_key_space_runs_through_buckets_owners_and_tables() -> None:
    layout = layout_of([8, 4, 8], [[0, 2, 3], [0, 5, 10], [0, 0, 7]], [["x", "y"], ["z"], ["x"]])
    assert [t.name for t in layout.tables] == ["t0", "t2", "t1"]
    assert layout.slot_names == [("x", "t0"), ("y", "t0"), ("x", "t2"), ("z", "t1")]
    assert layout.key_space == 20
    assert layout.key_dtype == torch.int32
    assert layout.slot_rows_S.tolist() == [3, 3, 7, 10]
    assert layout.slot_starts_SW.tolist() == [[0, 2], [0, 2], [0, 0], [0, 5]]
    # Bucket 0: rank 0 has two rows of t0, rank 1 one of t0 and seven of t2.  Bucket 1: five each.
    assert layout.part_starts_P1.tolist() == [0, 2, 10, 15, 20]
    assert layout.slot_shifts_SW.tolist() == [[0, 0], [0, 0], [2, 3], [10, 10]]
    assert layout.slot_blocks_S is None


def test_even_ranges_are_known_as_such() -> None:
    layout = layout_of([8, 8], [[0, 5, 10], [0, 2, 3]])
    assert layout.slot_blocks_S is not None
    assert layout.slot_blocks_S.tolist() == [5, 2]


def test_large_key_spaces_use_64_bits() -> None:
    layout = layout_of([4, 4], [[0, 2**30, 2**31 - 2], [0, 10, 20]])
    assert layout.key_dtype == torch.int64


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Dimensions, row ranges and ids of some tables on some ranks."""
    ranks = draw(st.integers(1, 4))
    tables = draw(st.integers(1, 5))
    dims = draw(st.lists(st.sampled_from([4, 8, 16]), min_size=tables, max_size=tables))
    sizes = [
        draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks)) for _ in range(tables)
    ]
    for size in sizes:
        size[0] += 1  # at least one row
    rows = [[sum(size[:r]) for r in range(ranks + 1)] for size in sizes]
    ids = [draw(st.lists(st.integers(0, r[-1] - 1), max_size=12)) for r in rows]
    return dims, rows, ids


def number(
    layout: ExchangeLayout,
    method: str,
    ids: torch.Tensor,
    counts: list[int],
    options: ExchangeOptions | None = None,
) -> NumberedRows:
    """The rows of ids: by the C++ operator, or by a sort, of which CUDA's has a static shape."""
    options = options or ExchangeOptions()
    if method == "by_hash":
        return RowNumbers(layout, options)(ids, counts)
    keys, bad = KeySpace(layout, options).keys(ids, counts)
    assert keys.dtype == layout.key_dtype
    unique = Dedup(layout.part_starts_P1).by_sort(keys, static_shape=method == "static")
    ids_per_bucket = [sum(counts[b.first_slot : b.end_slot]) for b in layout.buckets]
    buckets = list(rows_of_buckets(unique, len(layout.buckets), ids_per_bucket))
    return NumberedRows(unique.keys_U, unique.counts_P, buckets, False, bad)


def keys_of(numbered: NumberedRows) -> list[int]:
    """The key of every id."""
    rows_K = numbered.counts_P.view(len(numbered.buckets), -1).sum(1).tolist()
    found, first = [], 0
    for rows, bucket in zip(rows_K, numbered.buckets, strict=True):
        found += numbered.keys_U[first + bucket.rows_N.long()].tolist()
        first += rows
    return found


METHODS = [
    "by_sort",
    "static",
    pytest.param(
        "by_hash",
        marks=pytest.mark.skipif(not native.available(), reason="needs a C++ compiler"),
    ),
]
NATIVE = [
    False,
    pytest.param(
        True, marks=pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
    ),
]


@pytest.mark.parametrize("use_native", NATIVE)
@pytest.mark.parametrize("method", METHODS)
@given(problem=problems(), equally_many=st.booleans())
def test_every_id_is_routed_to_the_owner_of_its_row(
    method: str,
    use_native: bool,
    problem: tuple[list[int], list[list[int]], list[list[int]]],
    equally_many: bool,
) -> None:
    """Follows each id by hand: owner, local row, place on the wire and among the rows received."""
    dims, rows, ids = problem
    if equally_many:  # of every table: a path of its own
        ids = [[i % r[-1] for i in range(3)] for r in rows]
    layout = layout_of(dims, rows)
    order = [int(table.name[1:]) for table in layout.tables]  # bucket order
    counts = [len(ids[t]) for t in order]
    values = torch.tensor([i for t in order for i in ids[t]], dtype=torch.int64)
    numbered = number(layout, method, values, counts)
    assert not numbered.bad and not numbered.in_bag_order
    assert numbered.keys_U.dtype == layout.key_dtype
    routed = Route(layout, numbered.keys_U, numbered.counts_P)
    routed._packs = use_native

    ranks, buckets = layout.world_size, len(layout.buckets)
    bucket_of = {
        order[p]: k for k, b in enumerate(layout.buckets) for p in range(b.first_table, b.end_table)
    }

    def place(t: int, row: int) -> tuple[int, int, int]:
        """(bucket, owner, row in the owner's bucket)."""
        owner = next(r for r in range(ranks) if rows[t][r] <= row < rows[t][r + 1])
        before = [u for u in order[: order.index(t)] if bucket_of[u] == bucket_of[t]]
        base = sum(rows[u][owner + 1] - rows[u][owner] for u in before)
        return bucket_of[t], owner, base + row - rows[t][owner]

    wanted = [place(t, row) for t in order for row in ids[t]]
    want_counts = [
        [len({w for w in wanted if w[:2] == (k, r)}) for r in range(ranks)] for k in range(buckets)
    ]
    assert routed.counts_KW.tolist() == want_counts

    # Rows come back bucket by bucket, owner by owner: each id finds its own.
    answers = [
        (k, r) for k in range(buckets) for r in range(ranks) for _ in range(want_counts[k][r])
    ]
    local_rows = routed.local_rows_U.tolist()
    first, got = 0, []
    for k, bucket in enumerate(numbered.buckets):
        row_N, occurrences = bucket.rows_N, bucket.occurrences
        rows_of_ids = [first + row for row in row_N.tolist()]
        got += [(*answers[row], local_rows[row]) for row in rows_of_ids]
        if occurrences is not None:
            for row in range(sum(want_counts[k])):
                start, end = occurrences.starts_U1[row : row + 2].tolist()
                positions = occurrences.order_N[start:end].tolist()
                assert positions == (row_N == row).nonzero().flatten().tolist()
        first += sum(want_counts[k])
    assert got == wanted

    # On the wire: owner by owner, bucket by bucket.
    sizes = [sum(want_counts[k][r] for k in range(buckets)) for r in range(ranks)]
    words = torch.full((sum(sizes) + 1,), -1, dtype=torch.int32)
    routed.write(words, [sum(sizes[:r]) for r in range(ranks)])
    sent = iter(words.tolist())
    for r in range(ranks):
        for k in range(buckets):
            own = [local_rows[i] for i, answer in enumerate(answers) if answer == (k, r)]
            assert [next(sent) for _ in own] == own
    # Keys behind the last one of a static shape go to the spare word.
    assert next(sent) == -1 or method == "static"

    # In messages: the same, each owner's behind a header.
    room = max(sum(want_counts[k][r] for k in range(buckets)) for r in range(ranks))
    flat = torch.full((ranks * (2 + room) + 1,), -1, dtype=torch.int32)
    routed.write(flat, [r * (2 + room) + 2 for r in range(ranks)])
    for r, message in enumerate(flat[:-1].view(ranks, 2 + room).tolist()):
        own = [local_rows[i] for k in range(buckets) for i, a in enumerate(answers) if a == (k, r)]
        assert message == [-1, -1, *own, *([-1] * (room - len(own)))]


@pytest.mark.parametrize("method", METHODS)
def test_hashed_tables_take_any_id_and_others_do_not(method: str) -> None:
    layout = layout_of([8, 8], [[0, 5, 10], [0, 5, 10]])
    options = ExchangeOptions(hash_ids=["t0"])
    raw, counts = torch.tensor([-5, 2**60, 3, 9]), [2, 2]
    numbered = number(layout, method, raw, counts, options)
    assert not numbered.bad
    # Keys 0-9 are rank 0's: five rows of t0, then five of t1; 10-19 are rank 1's.
    keys = keys_of(numbered)
    assert {key % 10 for key in keys[:2]} <= set(range(5))
    assert keys[2:] == [5 + 3, 10 + 5 + 4]
    raw[3] = 10
    numbered = number(layout, method, raw, counts, options)
    assert numbered.bad
    in_bounds = all(0 <= key < layout.key_space for key in keys_of(numbered))
    assert in_bounds, "what follows must stay in bounds"
    assert RowNumbers(layout, options).describe_bad_ids(raw, counts) == (
        "feature 'f1' of table 't1': id 10 at position 1 is out of range [0, 10)"
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 9, 12])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad_id", [-1, 40, -(2**31), 2**31 - 1])
def test_bad_ids_are_seen_wherever_they_are(
    method: str, ranks: int, id_dtype: torch.dtype, bad_id: int
) -> None:
    starts = [min(r * -(-40 // ranks), 40) for r in range(ranks + 1)]
    layout = layout_of([8, 8], [starts, starts])
    ids = torch.arange(6, dtype=id_dtype) * 6
    counts = [3, 3]
    good = number(layout, method, ids, counts)
    assert not good.bad
    assert len(set(keys_of(good))) == 6
    for position in range(6):
        broken = ids.clone()
        broken[position] = bad_id
        numbered = number(layout, method, broken, counts)
        assert numbered.bad
        assert all(0 <= key < layout.key_space for key in keys_of(numbered))
        assert int(numbered.counts_P.sum()) <= 6


@pytest.mark.parametrize("method", METHODS)
def test_keys_and_routes_beyond_32_bits(method: str) -> None:
    layout = layout_of([4, 4], [[0, 2**30, 2**31 - 2], [0, 10, 20]])
    ids, counts = torch.tensor([2**31 - 3, 19, 0]), [1, 2]
    numbered = number(layout, method, ids, counts)
    assert not numbered.bad
    # Rank 0 has 2^30 rows of t0 and 10 of t1; rank 1 has 2^30 - 2 of t0 and 10 of t1.
    assert keys_of(numbered) == [2**31 - 3 + 10, 2**31 - 2 + 10 + 9, 2**30]
    routed = Route(layout, numbered.keys_U, numbered.counts_P)
    assert routed.counts_KW.tolist() == [[1, 2]]
    assert sorted(routed.local_rows_U.tolist()) == [2**30 - 3, 2**30, 2**30 - 2 + 9]


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@given(
    problem=problems(),
    batch=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
    one_each=st.booleans(),
    index_type=st.sampled_from([torch.int32, torch.int64]),
)
def test_ids_in_the_order_in_which_they_are_pooled(
    problem: tuple[list[int], list[list[int]], list[list[int]]],
    batch: int,
    random: Random,
    one_each: bool,
    index_type: torch.dtype,
) -> None:
    """The same rows as in the order of the batch, moved bag by bag to (sample, slot)."""
    dims, rows, _ = problem
    layout = layout_of(dims, rows)
    order = [int(table.name[1:]) for table in layout.tables]
    bags = [
        [[random.randrange(rows[t][-1]) for _ in range(1 if one_each else random.randrange(4))]
         for _ in range(batch)]
        for t in order
    ]  # fmt: skip
    counts = [sum(map(len, slot)) for slot in bags]
    ids = torch.tensor([i for slot in bags for bag in slot for i in bag], dtype=index_type)
    lengths = torch.tensor([len(bag) for slot in bags for bag in slot], dtype=index_type)
    numbers = RowNumbers(layout, ExchangeOptions())
    plain, moved = numbers(ids, counts), numbers(ids, counts, None, lengths)
    assert moved.in_bag_order and moved.keys_U.equal(plain.keys_U)
    assert moved.counts_P.equal(plain.counts_P)
    for bucket, before, after in zip(layout.buckets, plain.buckets, moved.buckets, strict=True):
        left = iter(before.rows_N.tolist())
        slots = range(bucket.first_slot, bucket.end_slot)
        own = {s: [[next(left) for _ in bag] for bag in bags[s]] for s in slots}
        in_order = [own[s][b] for b in range(batch) for s in slots]
        assert after.rows_N.tolist() == [row for bag in in_order for row in bag]
        if all(len(bag) == 1 for bag in in_order):
            assert after.offsets_B1 is None
        else:
            assert after.offsets_B1 is not None
            assert after.offsets_B1.tolist() == list(accumulate(map(len, in_order), initial=0))
