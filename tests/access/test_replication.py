"""The arithmetic of replicas: as draws, collectives and common sense have it."""

import numpy as np
import pytest

from fusedrec_torchrec.access.replication import (
    Line,
    Links,
    chance_in_batch,
    cheapest,
    likeliest_first,
    step_seconds,
    sync_bytes,
    sync_of,
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


def test_likely_rows_come_first_then_the_first_table_then_the_lowest_id() -> None:
    chances = np.array([0.5, 0.9, 0.5, 0.5, 1.0])
    tables, ids = np.array([1, 0, 0, 1, 2]), np.array([7, 3, 8, 2, 0])
    assert likeliest_first(chances, tables, ids).tolist() == [4, 1, 2, 3, 0]


LINKS = Links(Line(1.0, 0.1), Line(2.0, 0.01), hidden=0.75)


def test_a_sync_sends_the_rows_that_all_its_batches_touch() -> None:
    asked = []

    def touched(batches: int) -> float:
        asked.append(batches)
        return 10.0 * batches

    sync = sync_of(touched, 1000.0, ranks=4, every=8)
    assert asked == [8]
    assert (float(sync.sent), bool(sync.is_sparse), sync.every) == (240.0, True, 8)


def test_a_step_by_hand() -> None:
    few = sync_of(lambda _: 10.0, 100.0, ranks=4, every=5)
    many = sync_of(lambda _: 90.0, 100.0, ranks=4, every=5)
    exchange = 3 * 1.0 + 0.1 * 500
    assert step_seconds(500.0, 3, None, LINKS) == pytest.approx(exchange)
    by_rows = (1.0 + 0.1 * 30) * 0.25 / 5
    assert step_seconds(500.0, 3, few, LINKS) == pytest.approx(exchange + by_rows)
    by_sum = (2.0 + 0.01 * 150) * 0.25 / 5
    assert step_seconds(500.0, 3, many, LINKS) == pytest.approx(exchange + by_sum)
    seldom = step_seconds(500.0, 3, many, LINKS, needed=0.5, other=7.0)
    assert seldom == pytest.approx(7.0 + exchange / 2 + by_sum)


def test_steps_with_more_and_more_replicas() -> None:
    sync = sync_of(lambda _: np.array([0.0, 10.0, 90.0]), np.array([0.0, 100.0, 100.0]), 4, 5)
    assert sync.is_sparse.tolist() == [True, True, False]
    few, many = sync_of(lambda _: 10.0, 100.0, 4, 5), sync_of(lambda _: 90.0, 100.0, 4, 5)
    one_by_one = [
        float(step_seconds(sent, 3, one, LINKS))
        for sent, one in ((500.0, None), (300.0, few), (0.0, many))
    ]
    seconds = step_seconds(np.array([500.0, 300.0, 0.0]), 3, sync, LINKS)
    assert seconds.tolist() == pytest.approx(one_by_one)


def test_the_cheapest_is_the_first_that_is_worth_it() -> None:
    assert cheapest([3.0, 2.0, 1.0, 1.0]) == 2
    assert cheapest([1.0, 1.0]) == 0
    assert cheapest([1.0, 0.999, 0.98], saving=0.01) == 2
    assert cheapest([1.0, 0.995, 0.991], saving=0.01) == 0
