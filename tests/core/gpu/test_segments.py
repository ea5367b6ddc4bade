"""Kernels take as many ids as they can count, and no more."""

import pytest
import torch

from fusedrec_torchrec.core.gpu import segments
from fusedrec_torchrec.core.gpu.segments import MOST_IDS, PIECE, check_ids, most_pieces, places_for
from fusedrec_torchrec.exchange.checks import check_number_of_ids

INT32_MAX = torch.iinfo(torch.int32).max


def test_places_of_the_most_ids_are_int32() -> None:
    assert 540e6 < MOST_IDS < 550e6
    for ids in range(MOST_IDS - 200, MOST_IDS + 1):
        assert ids + most_pieces(ids) * PIECE <= INT32_MAX
        assert -2 - places_for(ids) >= -INT32_MAX
    check_ids(MOST_IDS)
    with pytest.raises(AssertionError, match="must be at most 545"):
        check_ids(MOST_IDS + 1)


def test_a_batch_of_more_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_IDS", 10)
    check_number_of_ids(10, 1)
    check_number_of_ids(5, 2)
    with pytest.raises(ValueError, match="the batch has 11 ids, must have at most 10: on CUDA"):
        check_number_of_ids(11, 1)
    with pytest.raises(ValueError, match="the batch has 6 ids, must have at most 5"):
        check_number_of_ids(6, 2)


def test_kernels_refuse_more_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fusedrec_torchrec.core.gpu import row_numbers, slots

    monkeypatch.setattr(segments, "MOST_IDS", 10)
    with pytest.raises(AssertionError, match="there are 11 ids on this rank"):
        row_numbers._Table(11, torch.zeros(2, dtype=torch.int32), grouped=True)
    ids, offsets, places = torch.arange(6), torch.tensor([0, 6]), torch.tensor([[1, 2], [0, 0]])
    with pytest.raises(AssertionError, match="there are 12 ids on this rank"):
        slots.take_slots(ids, None, offsets, places, 2, 12)
