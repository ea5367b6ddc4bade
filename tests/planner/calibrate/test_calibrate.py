"""Calibration: known rates are found again, and a real cluster gets a file."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.core.config import from_mapping, to_yaml
from fusedrec_torchrec.planner.calibrate import measure as module
from fusedrec_torchrec.planner.calibrate.fit import Timed, fit, fit_link, non_negative
from fusedrec_torchrec.planner.calibrate.measure import Shape
from fusedrec_torchrec.planner.calibrate.stage_times import GROUPS
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.step import HotUse, fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.owners import FUSED_MIXED, owners_in_turn
from fusedrec_torchrec.planner.topology import topology_of
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
)
from tests.cli.command import ROOT
from tests.cluster import Cluster


def test_a_line_through_the_measurements() -> None:
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
    latency, bandwidth = fit_link(sizes, [50e-6 + size / 2e9 for size in sizes])
    assert latency == pytest.approx(50.0) and bandwidth == pytest.approx(2.0)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=3, max_size=8),
    st.lists(st.floats(0.05, 5), min_size=3, max_size=3),
)
def test_least_squares_without_negative_solutions(
    rows: list[list[float]], truth: list[float]
) -> None:
    matrix = np.array(rows)
    wanted = matrix @ np.array(truth)
    found = non_negative(matrix, wanted)
    assert (found >= 0).all()
    # No worse than the truth, which is one of the candidates.
    error = np.abs((matrix @ found - wanted) / wanted).max()
    assert error < 1e-2


def known_cluster() -> ClusterConfig:
    return ClusterConfig(
        ranks=4,
        hidden=0.5,
        within_node=LinkConfig(all_to_all=3.0, all_reduce=3.0, latency=40.0),
        between_nodes=LinkConfig(all_to_all=3.0, all_reduce=3.0, latency=40.0),
        fused=RatesConfig(
            step=700.0,
            table=3.0,
            bucket=200.0,
            ids=20.0,
            lookup=4.0,
            pooling=6.0,
            hot=50.0,
            bag_ids=40.0,
            bag_lookup=9.0,
            owner_ids=25.0,
        ),
        stock=RatesConfig(step=2000.0, table=30.0, ids=8.0, lookup=2.0, pooling=5.0, hot=1e6),
    )


def steps_of(cluster: ClusterConfig, shapes: Sequence[Shape]) -> list[Timed]:
    """As long as the cluster says."""
    measured = []
    for shape in shapes:
        classes = RowClasses.zipf(shape.rows, shape.zipf)
        tables = [
            TableLoad(f"t{i}", shape.rows, shape.dim, shape.pooling, classes)
            for i in range(shape.tables)
        ]
        hot = HotUse(np.full(shape.tables, shape.hot // shape.tables)) if shape.hot else None
        step = fused_step(tables, shape.batch, 4, hot=hot)
        measured.append(Timed(step, step.seconds(cluster)))
        for system in () if shape.hot else ("table_wise", "row_wise", "column_wise"):
            step = stock_step(system, tables, shape.batch, 4)
            measured.append(Timed(step, step.seconds(cluster)))
    return measured


def all_steps_of(cluster: ClusterConfig) -> list[Timed]:
    """Those of a calibration, as long as the cluster says."""
    measured = steps_of(cluster, (*module.SHAPES, *module.HOT_SHAPES))
    for system, shape in module.OWNED_SHAPES:
        step = module.predicted(system, shape, 4)
        measured.append(Timed(step, step.seconds(cluster)))
    return measured


def with_stages(timed: Timed, cluster: ClusterConfig) -> Timed:
    """Adds the seconds of groups of stages, each of which has a start of its own."""
    if timed.step.system != FUSED or timed.step.sync is not None:
        return timed
    seconds = timed.step.seconds_of_stages(cluster)
    of_rates: dict[str, float] = {}
    for stage, took in zip(timed.step.stages, seconds, strict=True):
        of_rates[stage.kind] = of_rates.get(stage.kind, 0.0) + took
    of_stages = {
        name: 1e-4 + sum(of_rates.get(rate, 0.0) for rate in group.rates)
        for name, group in GROUPS.items()
    }
    return Timed(timed.step, timed.seconds, of_stages=of_stages)


def curve_of(cluster: ClusterConfig) -> list[tuple[float, float]]:
    return [(size, cluster.all_to_all(size)) for size in (1e4, 1e5, 1e6, 1e7)]


def test_rates_are_found_again() -> None:
    cluster = known_cluster()
    measured = all_steps_of(cluster)
    link = LinkConfig(all_reduce=3.0)  # all-reduces are known by their own curve
    begin = ClusterConfig(ranks=4, within_node=link, between_nodes=link)
    found = fit(begin, curve_of(cluster), measured)
    for each in measured:
        assert each.step.seconds(found) == pytest.approx(each.seconds, rel=0.02)
    assert found.within_node.all_to_all == pytest.approx(3.0, rel=0.02)
    for kind in ("fused", "table_wise", "row_wise", "column_wise"):
        wanted = cluster.fused if kind == "fused" else cluster.stock
        for name in ("step", "table", "ids", "lookup", "pooling"):
            assert getattr(getattr(found, kind), name) == pytest.approx(
                getattr(wanted, name), rel=0.05
            ), (kind, name)
    # The latency of a sync that is half hidden goes to its bytes.
    assert found.hidden == pytest.approx(0.5, abs=0.1)
    assert found.fused.hot == pytest.approx(50.0, rel=0.25)
    for name in ("bucket", "bag_ids", "bag_lookup", "owner_ids"):
        wanted = getattr(cluster.fused, name)
        assert getattr(found.fused, name) == pytest.approx(wanted, rel=0.1), name


def test_stages_tell_rates_apart_that_steps_cannot() -> None:
    """A few noisy shapes suffice if groups of stages are timed, and do not if steps are alone."""
    cluster = known_cluster()
    chosen = [
        timed
        for timed in all_steps_of(cluster)
        if timed.step.system == FUSED and timed.step.sync is None
    ][::4]
    curve, random = curve_of(cluster), np.random.default_rng(0)
    names = ("ids", "lookup", "pooling", "bag_ids")

    def largest_error(stages: bool) -> float:
        errors = []
        for _ in range(10):
            noise = np.exp(0.05 * random.standard_normal(len(chosen)))
            noisy = [
                Timed(t.step, t.seconds * f, of_stages=with_stages(t, cluster).of_stages)
                if stages
                else Timed(t.step, t.seconds * f)
                for t, f in zip(chosen, noise, strict=True)
            ]
            rates = fit(cluster, curve, noisy).fused
            errors += [abs(np.log(rates.rate(n) / cluster.fused.rate(n))) for n in names]
        return float(max(errors))

    assert largest_error(stages=True) < 0.5 < largest_error(stages=False)


def test_what_steps_do_not_tell_is_as_usual() -> None:
    """No stage is for nothing because no step had any of it."""
    cluster = known_cluster()
    steps = [timed for timed in steps_of(cluster, module.SHAPES) if timed.step.system == FUSED]
    rates = fit(cluster, curve_of(cluster), steps).fused
    assert rates.hot == pytest.approx(RatesConfig().hot)
    assert rates.rate("owner_ids") == pytest.approx(RatesConfig().rate("owner_ids"))


def test_rates_of_owners_are_told_apart_in_noisy_steps() -> None:
    cluster = known_cluster()
    exact, curve = all_steps_of(cluster), curve_of(cluster)
    random = np.random.default_rng(0)
    names = ("bucket", "bag_ids", "bag_lookup")
    found = []
    for _ in range(20):
        noise = np.exp(0.03 * random.standard_normal(len(exact)))
        noisy = [Timed(t.step, t.seconds * f) for t, f in zip(exact, noise, strict=True)]
        fused = fit(cluster, curve, noisy).fused
        found.append([getattr(fused, name) / getattr(cluster.fused, name) for name in names])
    for name, ratios in zip(names, np.array(found).T, strict=True):
        low, middle, high = np.percentile(ratios, [10, 50, 90])
        assert 0.8 < middle < 1.25 and low > 0.4 and high < 2.5, (name, ratios)


def test_every_fused_sharding_is_measured() -> None:
    columns = owners_in_turn(FUSED_COLUMN_WISE, 0, 64, 4)
    by_turns = [owners_in_turn(FUSED_MIXED, table, 64, 4) for table in range(6)]
    assert columns == (0, 1, 2, 3)
    assert by_turns == [(), (0,), columns, (), (1,), columns]
    assert owners_in_turn(FUSED_COLUMN_WISE, 3, 4, 2) == (1,)  # too few columns to split
    assert module.predicted(FUSED_MIXED, Shape(batch=16), 4).buckets == 3


def test_links_are_found_with_rates_that_are_known() -> None:
    machines = known_cluster()
    slow = LinkConfig(all_to_all=0.1, latency=300.0)
    cluster = replace(machines, within_node=slow, between_nodes=slow)
    measured = steps_of(cluster, module.LINK_SHAPES)
    found = fit(ClusterConfig(ranks=4), curve_of(cluster), measured, rates=machines)
    assert found.within_node.all_to_all == pytest.approx(0.1, rel=0.02)
    assert found.within_node.latency == pytest.approx(300.0, rel=0.05)
    assert (found.fused, found.stock) == (machines.fused, machines.stock)


def test_links_between_nodes_are_apart_from_those_within() -> None:
    near, far = LinkConfig(all_to_all=9.0, latency=20.0), LinkConfig(all_to_all=0.5, latency=200.0)
    machines = replace(known_cluster(), ranks_per_node=2, within_node=near, between_nodes=far)
    measured = steps_of(machines, module.SHAPES)
    begin = replace(ClusterConfig(ranks=4, ranks_per_node=2), within_node=near)
    curve = [(size * 2 / 3, machines.all_to_all(size)) for size in (1e4, 1e5, 1e6, 1e7)]
    found = fit(begin, curve, measured)
    assert found.within_node == near
    assert found.between_nodes.all_to_all == pytest.approx(0.5, rel=0.02)
    assert found.between_nodes.latency == pytest.approx(200.0, rel=0.1)


OWNED_SYSTEMS = (FUSED_TABLE_WISE, FUSED_COLUMN_WISE, FUSED_MIXED)


def calibrated(shapes: tuple[Shape, ...]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHAPES", shapes)
        patch.setattr(module, "HOT_SHAPES", (dataclasses.replace(shapes[-1], hot=60),))
        owned = tuple((system, shapes[-1]) for system in OWNED_SYSTEMS)
        patch.setattr(module, "OWNED_SHAPES", owned)
        patch.setattr(module, "COLLECTIVE_SIZES", [1 << 10, 1 << 14])
        patch.setattr(module, "REPEATS", 2)
        ranks = dist.get_world_size()
        cluster, measured = module.calibrate(
            "here", torch.device("cpu"), ranks, lambda function: function(), progress=False
        )
    module.report(cluster, measured)
    return {"yaml": to_yaml(cluster), "steps": len(measured)}


def test_a_cluster_of_two_ranks(cluster_2: Cluster, tmp_path: Path) -> None:
    shapes = tuple(
        Shape(tables=3, rows=200, dim=8, batch=batch, pooling=pooling)
        for batch, pooling in ((16, 1.0), (64, 1.0), (64, 3.0))
    )
    first, second = cluster_2.run(calibrated, shapes)
    assert first == second and first["steps"] == 16
    found = from_mapping(ClusterConfig, yaml.safe_load(first["yaml"]))
    assert (found.name, found.device, found.ranks, found.ranks_per_node) == ("here", "cpu", 2, 2)
    assert found.within_node.latency >= 0 and found.memory > 0.1


def test_ranks_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 12, must be a multiple of ranks_per_node, 8"):
        from_mapping(ClusterConfig, {"ranks": 12, "ranks_per_node": 8})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "clusters").glob("*.yaml")), ids=lambda path: path.stem
)
def test_ready_clusters(path: Path) -> None:
    cluster = from_mapping(ClusterConfig, yaml.safe_load(path.read_text()), path.name)
    topology = topology_of(cluster)
    assert topology.world_size == cluster.ranks
    assert topology.local_world_size == cluster.local_ranks
    assert cluster.all_to_all(1e9) > cluster.all_to_all(1e6) > 0
