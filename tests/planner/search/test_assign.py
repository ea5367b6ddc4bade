"""Prices of single tables add up to the price of a step."""

import numpy as np
import pytest

from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.step import Groups, fused_step, stock_step, with_sync
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.prices import LOADS, Prices
from fusedrec_torchrec.sharding.sharding_type import FUSED
from tests.planner.search.test_decide import BATCH, table

CLUSTER = ClusterConfig(
    device="cpu",
    ranks=4,
    ranks_per_node=2,
    within_node=LinkConfig(all_to_all=3.0, latency=40.0, peer=2.0),
    between_nodes=LinkConfig(all_to_all=1.0, latency=70.0, peer=3.0),
    fused=RatesConfig(step=300.0, table=2.0, ids=30.0, lookup=3.0, pooling=7.0),
    stock=RatesConfig(step=500.0, table=9.0, ids=20.0, lookup=2.0, pooling=5.0),
    row_wise=RatesConfig(step=800.0, table=1.0, ids=25.0, lookup=2.5, pooling=4.0),
)


def tables() -> list[TableLoad]:
    return [
        table(f"t{t}", rows, dim, pooling, zipf)
        for t, (rows, dim, pooling, zipf) in enumerate(
            [(4000, 64, 1.0, 1.1), (80_000, 16, 5.0, 0.0), (400, 128, 1.0, 0.8), (1000, 32, 2.0, 0)]
        )
    ]


def prices(exact: bool = False, groups: Groups | None = None) -> Prices:
    loads = tables()
    systems = [FUSED, "table_wise", "row_wise", "column_wise", "data_parallel"]
    on_host = [False] * len(loads)
    return Prices(loads, BATCH, CLUSTER, groups or Groups(4), systems, on_host, exact)


@pytest.mark.parametrize("system", ["row_wise", "column_wise", "data_parallel"])
def test_stock_prices_add_up(system: str) -> None:
    of = prices()
    total = of.of_use[system] + of.of_tables[system].sum()
    assert total == pytest.approx(stock_step(system, tables(), BATCH, 4).seconds(CLUSTER))


@pytest.mark.parametrize("owners", [[0, 1, 2, 3], [0, 0, 1, 1], [2, 2, 2, 2]])
def test_prices_of_whole_tables(owners: list[int]) -> None:
    of = prices()
    loads = np.zeros((LOADS, 4))
    for t, owner in enumerate(owners):
        loads[:, owner] += of.load_of("table_wise", t, 1)
    total = of.of_use["table_wise"] + of.of_tables["table_wise"].sum()
    total += of.of_owned("table_wise", loads)
    wanted = stock_step("table_wise", tables(), BATCH, 4, owners).seconds(CLUSTER)
    assert total == pytest.approx(wanted)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_fused_prices_add_up(exact: bool, number: int) -> None:
    """But for the rounding of messages, and for whether touched rows are synced or all."""
    groups = Groups(4, number, 2, 1)
    of = prices(exact, groups)
    step = fused_step(tables(), BATCH, 4, exact_counts=exact)
    wanted = with_sync(step, tables(), BATCH, groups).seconds(CLUSTER)
    assert of.of_use[FUSED] + of.of_tables[FUSED].sum() == pytest.approx(
        wanted, rel=5e-3 if number == 1 else 0.05
    )
