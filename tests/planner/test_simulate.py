"""The simulator: the shape of the papers' figures, and stragglers as real draws have them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.cost.step import stock_step
from fusedrec_torchrec.planner.cost.straggle import busiest_owner
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.planning import Planning
from fusedrec_torchrec.planner.simulate import Point, simulate
from fusedrec_torchrec.training.planner_files import read_planner_files
from fusedrec_torchrec.training.planning import planning_of
from tests.cli.command import ROOT

SIZES = [8, 64, 512, 4096]


@cache
def planning() -> Planning:
    path = ROOT / "configs" / "planner" / "large_dlrm.yaml"
    return planning_of(read_planner_files(path, ["ranks=8", "dense.milliseconds=8"]))


@cache
def points() -> dict[tuple[str, str, int], Point]:
    found = simulate(planning(), SIZES, batches=2)
    return {(point.system, point.scaling, point.ranks): point for point in found}


def rate(system: str, ranks: int, scaling: str = "weak") -> float:
    return points()[system, scaling, ranks].throughput


def test_fused_beats_dedup_by_table() -> None:
    """FusedRec: fewer messages, and the more the more ranks."""
    gains = [rate("fused", size) / rate("dedup by table", size) for size in SIZES]
    assert min(gains) > 1.2 and gains == sorted(gains)


def test_groups_scale_on_where_one_group_stops() -> None:
    """2D: near linear to thousands of ranks."""
    from_node = rate("fused + 2D", 4096) / rate("fused + 2D", 64) / 64
    assert from_node > 0.85 > rate("fused", 4096) / rate("fused", 64) / 64
    assert "groups of" in points()["fused + 2D", "weak", 4096].how


def test_more_freedom_is_never_slower() -> None:
    for size in SIZES:
        for system in ("fused + hot rows", "fused + 2D"):
            assert rate(system, size) >= 0.999 * rate("fused", size)


def test_hot_rows_pay_without_dedup() -> None:
    """P2RES: on Criteo-like skew, and the more ranks the more."""
    path = ROOT / "configs" / "planner" / "criteo_like.yaml"
    found = {
        (point.system, point.ranks): point
        for point in simulate(
            planning_of(read_planner_files(path)),
            [8, 32],
            ["weak"],
            ["TorchRec", "hot rows, no dedup", "fused"],
            2,
        )
    }
    for ranks in (8, 32):
        stock, hot = found["TorchRec", ranks], found["hot rows, no dedup", ranks]
        assert hot.throughput > 1.5 * stock.throughput
        assert int(hot.how.split()[0].replace(",", "")) > 1000
        assert found["fused", ranks].throughput > hot.throughput  # dedup leaves little to gain


def test_torchrec_is_priced_as_the_planner_prices_it() -> None:
    """Its busiest rank is in its own amounts; only looking up rows of all ranks has stragglers."""
    plan = planning()
    for ranks in (8, 64):
        point = points()["TorchRec", "weak", ranks]
        cluster = replace(plan.cluster, ranks=ranks)
        loads = plan.loads
        alike = stock_step("table_wise", loads, plan.batch, ranks).seconds(cluster) + 8e-3
        assert point.seconds is not None and point.seconds <= alike * 1.0001


def test_torchrec_has_the_choice() -> None:
    hows = {points()["TorchRec", "weak", size].how for size in SIZES}
    assert len(hows) > 1 and hows <= {
        *("table_wise", "row_wise", "column_wise", "table_row_wise", "columns of 32"),
    }


def test_strong_scaling_divides_the_batch() -> None:
    assert points()["fused", "strong", 64].batch == points()["fused", "weak", 8].batch // 8
    assert rate("fused", 64, "strong") < rate("fused", 64, "weak")


def test_a_cluster_that_is_too_small() -> None:
    plan = planning()
    small = replace(plan, cluster=replace(plan.cluster, memory=1.0, host_memory=0.0))
    found = next(simulate(small, [8], ["weak"], ["fused"]))
    assert found.seconds is None and found.throughput == 0.0 and found.how == "does not fit"


def test_the_same_seed_the_same_figures() -> None:
    first, second = (
        list(simulate(planning(), [64], ["weak"], ["TorchRec", "fused"], 2, 7)) for _ in range(2)
    )
    assert first == second


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
