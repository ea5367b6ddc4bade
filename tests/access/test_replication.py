"""The arithmetic of replicas: as draws, collectives and common sense have it."""

import numpy as np
import pytest

from fusedrec_torchrec.access.replication import (
    chance_in_batch,
    cheapest,
    sync_bytes,
)


def test_the_chance_of_a_row_is_that_of_draws() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    draws = np.random.default_rng(0).choice(4, p=shares, size=(20_000, 6))
    drawn = [(draws == row).any(1).mean() for row in range(4)]
    assert chance_in_batch(shares, 6.0) == pytest.approx(drawn, abs=0.01)
    assert chance_in_batch(np.array([0.0, 1.0]), 6.0) == pytest.approx([0.0, 1.0])


def test_with_many_ids_only_the_mean_number_of_uses_counts() -> None:
    uses = np.array([0.01, 1.0, 5.0])
    assert chance_in_batch(uses / 1e6, 1e6) == pytest.approx(1 - np.exp(-uses), rel=1e-4)


def test_few_touched_rows_go_to_everybody_and_many_are_summed() -> None:
    sparse, dense = sync_bytes(10.0, 1000.0, 4)
    assert (sparse, dense) == (30.0, 1500.0)
    sparse, dense = sync_bytes(900.0, 1000.0, 4)
    assert dense < sparse
    assert sync_bytes(10.0, 1000.0, 1) == (0.0, 0.0)


def test_the_cheapest_is_the_first_that_is_worth_it() -> None:
    assert cheapest([3.0, 2.0, 1.0, 1.0]) == 2
    assert cheapest([1.0, 1.0]) == 0
    assert cheapest([1.0, 0.999, 0.98], saving=0.01) == 2
    assert cheapest([1.0, 0.995, 0.991], saving=0.01) == 0
