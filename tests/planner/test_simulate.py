"""The simulator: the shape of the papers' figures."""

from dataclasses import replace
from functools import cache

from fusedrec_torchrec.planner.cost.step import stock_step
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
