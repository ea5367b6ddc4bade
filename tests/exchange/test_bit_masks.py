"""Bits of masks: as many bytes as promised, and the same mask on the other side."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.exchange.bit_masks import pack, sizes_of, unpack


def test_every_rank_has_bytes_of_its_own() -> None:
    mask = torch.tensor([True, False, True] + [False] * 8 + [True])
    packed = pack(mask, [3, 0, 9])
    assert sizes_of([3, 0, 9]) == [1, 0, 2]
    assert packed.tolist() == [0b10100000, 0b00000000, 0b10000000]


@given(st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=5))
def test_what_is_unpacked_is_what_was_packed(ranks: list[list[bool]]) -> None:
    counts = [len(rank) for rank in ranks]
    mask = torch.tensor([bit for rank in ranks for bit in rank], dtype=torch.bool)
    packed = pack(mask, counts)
    assert packed.dtype == torch.uint8
    assert packed.numel() == sum(sizes_of(counts))
    assert torch.equal(unpack(packed, counts), mask)
