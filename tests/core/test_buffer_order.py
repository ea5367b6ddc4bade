"""Pieces that lie one behind another are one tensor already."""

import torch

from fusedrec_torchrec.core.buffer_order import as_one


def test_pieces_of_one_buffer_are_not_copied() -> None:
    flat = torch.arange(9)
    pieces = flat.split([0, 2, 0, 3, 4])
    for first in range(4):
        whole = as_one(pieces[first:])
        assert whole.tolist() == flat.tolist()[flat.numel() - whole.numel() :]
        assert whole.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert as_one(pieces[1:4]).tolist() == [0, 1, 2, 3, 4]


def test_other_pieces_are_copied() -> None:
    flat = torch.arange(9)
    a, b, c = flat.split([2, 3, 4])
    assert as_one([b, a]).tolist() == [2, 3, 4, 0, 1]
    assert as_one([a, c]).tolist() == [0, 1, 5, 6, 7, 8]
    assert as_one([a, torch.tensor([7, 8])]).tolist() == [0, 1, 7, 8]
    assert as_one([flat[::4], flat[1:2]]).tolist() == [0, 4, 8, 1]
    assert as_one([torch.empty(0, dtype=torch.int64), a]).tolist() == [0, 1]


def test_no_elements() -> None:
    assert as_one([torch.empty(0), torch.empty(0)]).shape == (0,)
