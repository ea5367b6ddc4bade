"""Dedup: both methods give ascending unique keys and the inverse; the choice is by threshold."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.exchange import dedup
from fusedrec_torchrec.exchange.dedup import Dedup, Unique, choose_method

METHODS = ["by_sort", "by_direct_addressing"]


def check(keys: torch.Tensor, unique: Unique) -> None:
    want, inverse = torch.unique(keys, return_inverse=True)
    assert unique.keys_U.equal(want)
    assert unique.keys_U.dtype == keys.dtype
    assert unique.inverse_N.long().equal(inverse)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(keys=st.lists(st.integers(0, 49), max_size=200))
def test_equals_torch_unique(method: str, dtype: torch.dtype, keys: list[int]) -> None:
    tensor = torch.tensor(keys, dtype=dtype)
    check(tensor, getattr(Dedup(50), method)(tensor))


@pytest.mark.parametrize("method", METHODS)
def test_batches_do_not_disturb_each_other(method: str) -> None:
    deduplicate = getattr(Dedup(1000), method)
    generator = torch.Generator().manual_seed(0)
    for size in (300, 0, 1, 1000, 17):
        keys = torch.randint(1000, (size,), generator=generator, dtype=torch.int32)
        check(keys, deduplicate(keys))


def test_static_shapes_pad_with_the_key_space() -> None:
    """What CUDA does, on CPU: the same numbers, with a padded tail instead of a cut."""
    keys = torch.tensor([7, 3, 7, 7, 0, 3], dtype=torch.int32)
    unique = Dedup(10).by_sort(keys, static_shape=True)
    assert unique.keys_U.tolist() == [0, 3, 7, 10, 10, 10]
    assert unique.keys_U[unique.inverse_N.long()].equal(keys)


@pytest.mark.parametrize(
    ("ids", "share"), [(100, 0.6), ((1 << 15) - 1, 0.6), (1 << 15, 0.12), (1 << 18, 0.3)]
)
def test_direct_addressing_only_where_it_pays(ids: int, share: float) -> None:
    space = dedup.DIRECT_MAX_KEY_SPACE
    assert choose_method(ids, space, share) == "direct"
    assert choose_method(ids, space + 1, share) == "sort"
    assert choose_method(ids, space, share + 0.01) == "sort"


def test_method_follows_the_share_of_unique_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    deduplicate, used = Dedup(1000), []

    def recording(method: str) -> Callable[[torch.Tensor], Unique]:
        original = getattr(deduplicate, method)

        def call(keys: torch.Tensor) -> Unique:
            used.append(method)
            return original(keys)

        return call

    for method in METHODS:
        monkeypatch.setattr(deduplicate, method, recording(method))
    repeated = torch.zeros(1000, dtype=torch.int32)
    check(repeated, deduplicate(repeated))  # nothing known yet
    check(repeated, deduplicate(repeated))
    assert used == METHODS
