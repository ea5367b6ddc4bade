"""Buckets, key space, keys and routes, without a process group."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType, PoolingType

from fusedrec_torchrec.exchange.dedup import Dedup
from fusedrec_torchrec.exchange.keys import KeySpace
from fusedrec_torchrec.exchange.layout import ExchangeLayout, group_into_buckets
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.routing import route
from tests.exchange.tables import sharded_tables

CPU = torch.device("cpu")


def bucket_names(specs: list[dict[str, object]], **kwargs: int) -> list[list[str]]:
    buckets = group_into_buckets(sharded_tables(specs, [[0, 5, 10]] * len(specs)), **kwargs)
    assert [len(rank) for rank in buckets] == [len(buckets[0])] * 2
    return [[table.name for table in bucket.embedding_tables] for bucket in buckets[0]]


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
    return ExchangeLayout(group_into_buckets(sharded_tables(specs, rows)), CPU)


def test_key_space_is_table_after_table_in_bucket_order() -> None:
    layout = layout_of([8, 4, 8], [[0, 2, 3], [0, 5, 10], [0, 0, 7]], [["x", "y"], ["z"], ["x"]])
    assert [t.name for t in layout.tables] == ["t0", "t2", "t1"]
    assert layout.slot_names == [("x", "t0"), ("y", "t0"), ("x", "t2"), ("z", "t1")]
    assert layout.key_space == 20
    assert layout.key_dtype == torch.int32
    assert layout.slot_key_bases_S.tolist() == [0, 0, 3, 10]
    assert layout.slot_rows_S.tolist() == [3, 3, 7, 10]
    assert layout.segment_starts_G1.tolist() == [0, 2, 3, 3, 10, 15, 20]
    # Rank 1 holds one row of t0, then all of t2.
    assert layout.row_shifts_G.tolist() == [0, -2, 2 - 3, 1 - 3, -10, -15]


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


@pytest.mark.parametrize("static_shape", [False, True])
@given(problem=problems())
def test_every_id_is_routed_to_the_owner_of_its_row(
    static_shape: bool, problem: tuple[list[int], list[list[int]], list[list[int]]]
) -> None:
    """Follows each id by hand: owner, local row in its bucket, place on the wire and in matrix."""
    dims, rows, ids = problem
    layout = layout_of(dims, rows)
    order = [int(table.name[1:]) for table in layout.tables]  # bucket order
    counts = torch.tensor([len(ids[t]) for t in order])
    values = torch.tensor([i for t in order for i in ids[t]], dtype=torch.int64)
    keys, bad = KeySpace(layout, ExchangeOptions()).keys(values, counts)
    assert not bad
    unique = Dedup(layout.key_space).by_sort(keys, static_shape)
    routed = route(layout, unique)

    ranks = layout.world_size
    bucket_of = [k for k, b in enumerate(layout.buckets) for _ in range(b.first_table, b.end_table)]
    asked: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (owner, bucket) -> (table, row)
    for position, t in enumerate(order):
        for row in sorted(set(ids[t])):
            owner = next(r for r in range(ranks) if rows[t][r] <= row < rows[t][r + 1])
            asked.setdefault((owner, bucket_of[position]), []).append((t, row))
    buckets = len(layout.buckets)
    want_counts = [[len(asked.get((r, k), [])) for k in range(buckets)] for r in range(ranks)]
    assert routed.counts_WK.tolist() == want_counts

    def local_row(t: int, row: int, owner: int, bucket: int) -> int:
        before = [u for p, u in enumerate(order) if bucket_of[p] == bucket]
        before = before[: before.index(t)]
        return sum(rows[u][owner + 1] - rows[u][owner] for u in before) + row - rows[t][owner]

    wire = [
        local_row(t, row, r, k)
        for r in range(ranks)
        for k in range(buckets)
        for t, row in asked.get((r, k), [])
    ]
    used = len(wire)
    sent = torch.full((routed.wire_U.numel(),), -1, dtype=torch.int32)
    sent.scatter_(0, routed.wire_U, routed.local_rows_U)
    assert sent[:used].tolist() == wire

    matrix = [
        {entry: i for i, entry in enumerate(e for r in range(ranks) for e in asked.get((r, k), []))}
        for k in range(buckets)
    ]
    want_rows = [
        matrix[bucket_of[position]][(t, row)] for position, t in enumerate(order) for row in ids[t]
    ]
    assert routed.row_N.tolist() == want_rows


def test_hashed_tables_take_any_id_and_others_do_not() -> None:
    layout = layout_of([8, 8], [[0, 5, 10], [0, 5, 10]])
    keys = KeySpace(layout, ExchangeOptions(hash_ids=["t0"]))
    raw, counts = torch.tensor([-5, 2**60, 3, 9]), torch.tensor([2, 2])
    got, bad = keys.keys(raw, counts)
    assert not bad
    assert bool(((got[:2] >= 0) & (got[:2] < 10)).all())
    assert got[2:].tolist() == [13, 19]
    raw[3] = 10
    _, bad = keys.keys(raw, counts)
    assert bad
    assert keys.describe_bad_ids(raw, counts) == (
        "feature 'f1' of table 't1': id 10 at position 1 is out of range [0, 10)"
    )


def test_keys_and_routes_beyond_32_bits() -> None:
    layout = layout_of([4, 4], [[0, 2**30, 2**31 - 2], [0, 10, 20]])
    ids, counts = torch.tensor([2**31 - 3, 19, 0]), torch.tensor([1, 2])
    keys, bad = KeySpace(layout, ExchangeOptions()).keys(ids, counts)
    assert not bad
    assert keys.tolist() == [2**31 - 3, 2**31 - 2 + 19, 2**31 - 2]
    routed = route(layout, Dedup(layout.key_space).by_sort(keys))
    assert routed.owner_U.tolist() == [1, 0, 1]
    assert routed.local_rows_U.tolist() == [2**30 - 3, 2**30, 2**30 - 2 + 9]
