"""Dedup: both methods give the unique keys of each part, the inverse and the counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange.dedup import Dedup, Unique

METHODS = [
    "by_sort",
    pytest.param(
        "by_hash",
        marks=pytest.mark.skipif(not native.available(), reason="needs a C++ compiler"),
    ),
]


def parts(*starts: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(starts, dtype=dtype)


def by_hash(keys: torch.Tensor, starts: torch.Tensor) -> Unique:
    """What the C++ operator makes of a slot whose ids are keys."""
    one = torch.zeros(1, 1, dtype=torch.int64)
    lengths = torch.empty(0, dtype=torch.int32)
    rows = starts[-1:].long()
    keys_U, inverse_N, offsets, counts_P, bad = torch.ops.fusedrec.number_rows(
        keys, lengths, [keys.numel()], rows, one, one, starts, None, [1], 0
    )
    assert not bad and not offsets
    return Unique(keys_U, inverse_N, counts_P)


def deduplicate(method: str, keys: torch.Tensor, starts: torch.Tensor) -> Unique:
    return by_hash(keys, starts) if method == "by_hash" else Dedup(starts).by_sort(keys)


def check(keys: torch.Tensor, starts: torch.Tensor, unique: Unique) -> None:
    assert unique.keys_U.dtype == keys.dtype
    assert unique.inverse_N.dtype == torch.int32
    assert unique.keys_U[unique.inverse_N.long()].equal(keys)
    assert unique.keys_U.sort().values.equal(keys.unique())
    part_of_key = torch.bucketize(unique.keys_U, starts[1:-1], right=True)
    assert part_of_key.equal(part_of_key.sort().values), "parts must come one after another"
    assert unique.counts_P.equal(part_of_key.bincount(minlength=starts.numel() - 1))
    if unique.occurrences is not None:
        starts_U1, order_N = unique.occurrences.starts_U1, unique.occurrences.order_N
        for u in range(unique.keys_U.numel()):
            ids = order_N[int(starts_U1[u]) : int(starts_U1[u + 1])].tolist()
            assert ids == (keys == unique.keys_U[u]).nonzero().flatten().tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(
    keys=st.lists(st.integers(0, 49), max_size=200),
    inner=st.lists(st.integers(0, 50), max_size=5).map(sorted),
)
def test_unique_keys_of_each_part(
    method: str, dtype: torch.dtype, keys: list[int], inner: list[int]
) -> None:
    starts = parts(0, *inner, 50, dtype=dtype)
    tensor = torch.tensor(keys, dtype=dtype)
    check(tensor, starts, deduplicate(method, tensor, starts))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stride", [1, 4096, 65537])
def test_batches_of_all_sizes_do_not_disturb_each_other(method: str, stride: int) -> None:
    """Also many more unique keys than the batch before, and keys that are far apart."""
    starts = parts(0, 5000 * stride, 10_000 * stride, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for size in (300, 0, 1, 60_000, 17, 9000):
        keys = torch.randint(10_000, (size,), generator=generator) * stride
        unique = deduplicate(method, keys, starts)
        assert unique.keys_U[unique.inverse_N.long()].equal(keys)
        assert unique.keys_U.sort().values.equal(keys.unique())
        assert unique.counts_P.tolist() == [
            int((keys.unique() < 5000 * stride).sum()),
            int((keys.unique() >= 5000 * stride).sum()),
        ]


def test_sort_gives_ascending_keys() -> None:
    keys = torch.tensor([7, 3, 7, 7, 0, 3], dtype=torch.int32)
    assert Dedup(parts(0, 10)).by_sort(keys).keys_U.tolist() == [0, 3, 7]


def test_static_shapes_pad_with_the_key_space() -> None:
    """What CUDA does, on CPU: the same numbers, with a padded tail instead of a cut."""
    keys = torch.tensor([7, 3, 7, 7, 0, 3], dtype=torch.int32)
    dedup = Dedup(parts(0, 5, 10))
    unique = dedup.by_sort(keys, static_shape=True)
    assert unique.keys_U.tolist() == [0, 3, 7, 10, 10, 10]
    assert unique.counts_P.tolist() == [2, 1]
    exact = dedup.by_sort(keys)
    assert unique.inverse_N.equal(exact.inverse_N)
    assert unique.occurrences is not None and exact.occurrences is not None
    assert unique.occurrences.order_N.equal(exact.occurrences.order_N)
    assert unique.occurrences.starts_U1.tolist() == [0, 1, 3, 6, 6, 6, 6]
    assert exact.occurrences.starts_U1.tolist() == [0, 1, 3, 6]
