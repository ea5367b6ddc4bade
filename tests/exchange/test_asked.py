"""Some of the units that an owner is asked for."""

import torch

from fusedrec_torchrec.exchange.asked import Asked


def test_some_rows() -> None:
    asked = Asked(torch.tensor([5, 3, 9]))
    assert asked.units == 3
    kept = asked.only(torch.tensor([True, False, True]))
    assert kept.rows_R.tolist() == [5, 9]
    assert kept.units == 2


def test_some_bags_with_their_rows_and_weights() -> None:
    asked = Asked(
        torch.tensor([5, 3, 9, 1]), torch.tensor([2, 0, 1, 1]), torch.tensor([0.5, 1.0, 2.0, 4.0])
    )
    assert asked.units == 4
    kept = asked.only(torch.tensor([True, True, False, True]))
    assert kept.rows_R.tolist() == [5, 3, 1]
    assert kept.lengths_U is not None and kept.lengths_U.tolist() == [2, 0, 1]
    assert kept.weights_R is not None and kept.weights_R.tolist() == [0.5, 1.0, 4.0]
    assert kept.units == 3
