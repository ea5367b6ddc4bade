"""Stragglers are as real draws have them."""

import numpy as np
import pytest

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.cost.straggle import busiest_owner
from fusedrec_torchrec.planner.cost.table_load import TableLoad


def drawn(dedup: bool, rows: int, zipf: float, batch: int, ranks: int, tables: int) -> float:
    """The busiest owner of batches that are really drawn, rows anywhere."""
    random = np.random.default_rng(5)
    shares = 1 / np.arange(1, rows + 1) ** zipf
    shares /= shares.sum()
    found = []
    for _ in range(6):
        load = np.zeros(ranks)
        for _ in range(tables):
            owner = random.integers(0, ranks, rows)
            for _ in range(ranks):
                ids = random.choice(rows, batch, p=shares)
                np.add.at(load, owner[np.unique(ids) if dedup else ids], 1)
        found.append(load.max() / load.mean())
    return float(np.mean(found))


@pytest.mark.parametrize("dedup", [True, False])
def test_stragglers_are_those_of_real_draws(dedup: bool) -> None:
    rows, batch, ranks, number = 3000, 200, 8, 3
    shares = 1 / np.arange(1, rows + 1) ** 1.2
    law = RowClasses(np.ones(rows), shares / shares.sum())
    tables = [TableLoad(f"t{t}", rows, 16, 1.0, law) for t in range(number)]
    sampled = [
        busiest_owner(tables, batch, ranks, dedup, batches=4, seed=seed) for seed in range(12)
    ]
    wanted = drawn(dedup, rows, 1.2, batch, ranks, number)
    assert np.mean(sampled) == pytest.approx(wanted, rel=0.12)


def test_dedup_and_hot_rows_spare_the_busiest_owner() -> None:
    tables = [TableLoad("t", 10_000, 16, 1.0, RowClasses.zipf(10_000, 1.2))]
    often = busiest_owner(tables, 1000, 64, dedup=False)
    once = busiest_owner(tables, 1000, 64, dedup=True)
    cold = busiest_owner(tables, 1000, 64, dedup=True, hot_T=np.array([500]))
    assert often > 3 * once > 0 and once >= cold >= 1.0
    assert busiest_owner(tables, 1000, 1, dedup=True) == 1.0
