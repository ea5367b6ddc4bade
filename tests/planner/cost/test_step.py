"""The cost model's bytes, against what benchmarks have counted; its arithmetic, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig
from fusedrec_torchrec.planner.cost.memory import (
    Placement,
    buffer_bytes,
    owner_bytes,
    replica_bytes,
    table_bytes_W,
)
from fusedrec_torchrec.planner.cost.step import (
    Groups,
    HotUse,
    Step,
    fused_step,
    stock_step,
    with_sync,
)
from fusedrec_torchrec.planner.cost.table_load import TableLoad, even_ranges
from tests.cli.command import ROOT

MEASURED = ROOT / "benchmarks" / "results"
STOCK = ("table_wise", "row_wise", "column_wise")
HOT_EVERY = {"fused_hot": 1, "fused_hot_every_8": 8}


def tables_of(workload: WorkloadFigures) -> list[TableLoad]:
    config = workload.config
    classes = RowClasses.zipf(config.rows, config.zipf)
    dims = [config.dims[i % len(config.dims)] for i in range(config.tables)]
    return [
        TableLoad(f"t{i}", config.rows, dim, config.pooling, classes) for i, dim in enumerate(dims)
    ]


def most_used(tables: list[TableLoad], rows: int) -> NDArray[np.int64]:
    """Hot rows of tables that are all alike."""
    return np.array([rows // len(tables) + (t < rows % len(tables)) for t in range(len(tables))])


@pytest.mark.parametrize("suite", ["workloads", "growth", "requester_pooling", "hot"])
def test_bytes_are_what_was_counted(suite: str) -> None:
    """Within 2 %; the data is only known by its law."""
    checked = set()
    for result in load_results(MEASURED / suite / RESULTS)["results"]:
        workload = WorkloadFigures(result)
        config = workload.config
        if (config.data, config.module, config.batches) != ("zipf", "ebc", "all"):
            continue
        tables = tables_of(workload)
        for name, system in workload.systems.items():
            if name == "fused_row_wise":
                step = fused_step(tables, config.batch_size, config.ranks)
            elif name in HOT_EVERY:
                hot = HotUse(most_used(tables, config.hot_rows), HOT_EVERY[name])
                step = fused_step(tables, config.batch_size, config.ranks, hot=hot)
            elif name in STOCK:
                step = stock_step(name, tables, config.batch_size, config.ranks)
            else:
                continue
            what = f"{workload.title}: {name}"
            assert step.bytes_sent == pytest.approx(system.bytes_sent, rel=0.02), what
            if name not in HOT_EVERY:  # in which sends to single ranks are counted, too
                assert step.collectives == system.collectives, what
            checked.add(name)
    assert "fused_row_wise" in checked and len(checked) > 1


def two_tables() -> list[TableLoad]:
    return [
        TableLoad("a", 10, 8, 1.0, RowClasses.uniform(10)),
        TableLoad("b", 1000, 16, 2.0, RowClasses.uniform(1000)),
    ]


def test_fused_by_hand() -> None:
    tables = two_tables()
    unique_a, unique_b = 10 * (1 - 0.9**4), 1000 * (1 - 0.999**8)
    step = fused_step(tables, 4, 2, exact_counts=True)
    stages = {stage.name: stage.amount_W for stage in step.stages}
    rows = (unique_a * 8 + unique_b * 16) * 4
    assert stages["dedup"].tolist() == [12.0, 12.0]
    np.testing.assert_allclose(stages["ids"], (unique_a + unique_b) / 2 * 4)
    np.testing.assert_allclose(stages["rows"], rows / 2)
    np.testing.assert_allclose(stages["gradients"], rows / 2)
    np.testing.assert_allclose(stages["lookup"], rows)
    np.testing.assert_allclose(stages["pooling"], (4 * 8 + 8 * 16) * 4)
    assert step.collectives == 4
    padded = fused_step(tables, 4, 2)
    ids = next(stage for stage in padded.stages if stage.name == "ids")
    # 5.7 rows of each owner fit into the smallest message, 64.
    assert ids.amount_W.tolist() == [(3 + 2 + 64) * 4.0] * 2


def test_uneven_ranges_show_in_the_busiest_rank() -> None:
    tables = two_tables()
    ranges = [np.array([0, 10, 10]), np.array([0, 250, 1000])]
    even, uneven = fused_step(tables, 4, 2), fused_step(tables, 4, 2, ranges)
    cluster = ClusterConfig(ranks=2)
    assert uneven.seconds(cluster) > even.seconds(cluster)
    rows = next(stage for stage in uneven.stages if stage.name == "rows").amount_W
    unique_a, unique_b = (t.unique(4) for t in tables)
    np.testing.assert_allclose(rows, [unique_a * 32 + unique_b * 16, unique_b * 48])


@pytest.mark.parametrize(("rows", "ranks"), [(10, 4), (3, 8), (100, 1)])
def test_rows_are_split_as_torchrec_splits_them(rows: int, ranks: int) -> None:
    sizes = np.diff(even_ranges(rows, ranks))
    block = -(-rows // ranks)
    assert sizes.sum() == pytest.approx(rows)
    assert sizes.max() == pytest.approx(block)


def stages_of(step: Step) -> dict[str, float]:
    """The busiest rank's amounts."""
    return {stage.name: float(stage.amount_W.max()) for stage in step.stages}


def test_hot_rows_by_hand() -> None:
    tables = two_tables()
    step = fused_step(tables, 4, 2, hot=HotUse(np.array([10, 0])), exact_counts=True)
    stages, unique_b = stages_of(step), 1000 * (1 - 0.999**8)
    assert stages["hot_lookup"] == 12.0  # all ids are looked for
    assert stages["rows"] == pytest.approx(unique_b * 64 / 2)  # table a needs no exchange
    met_a = 10 * (1 - 0.9**4)
    assert stages["hot_sync"] == pytest.approx(met_a * (8 + 1) * 4)
    assert stages["pooling_backward"] == 4 * (8 + 16) * 4
    # Of many ranks, an all-reduce over all hot rows is less.
    many = fused_step(tables, 4, 64, hot=HotUse(np.array([10, 0])))
    sync = next(stage for stage in many.stages if stage.name == "hot_sync")
    assert sync.kind == "all_reduce"
    assert sync.amount_W[0] == pytest.approx(2 * 63 / 64 * 10 * (8 + 1) * 4)


@pytest.mark.parametrize("every", [1, 3, 49])
def test_the_sync_of_hot_rows_is_that_of_its_stage(every: int) -> None:
    for ranks, is_sparse in ((2, True), (64, False)):
        hot = HotUse(np.array([10, 0]), every)
        step = fused_step(two_tables(), 4, ranks, hot=hot)
        assert step.sync is not None and step.sync.every == every
        assert bool(step.sync.is_sparse) == is_sparse
        sync = step.stages[-1]
        assert float(step.sync.sent) == sync.amount_W.max()
        doubled = replace(step, stages=[replace(sync, amount_W=2 * sync.amount_W)])
        assert doubled.sync is not None and doubled.sync.sent == 2 * step.sync.sent
        assert replace(step, stages=step.stages[:-1]).sync is None


def test_groups_by_hand() -> None:
    tables = two_tables()
    step = fused_step(tables, 4, 2)
    weights = with_sync(step, tables, 4, Groups(2, 3, sync_every=2))
    used = [10 * (1 - 0.9**16), 1000 * (1 - 0.999**32)]  # by a group in two steps
    anywhere = [10 * (1 - 0.9**48), 1000 * (1 - 0.999**96)]
    stages = {stage.name: stage for stage in weights.stages}
    np.testing.assert_allclose(stages["sync_ids"].amount_W, 2 * sum(used) / 2 * 4 * 1.125)
    row_bytes = [8 * 4 + 4, 16 * 4 + 4]
    rows = sum(n * size for n, size in zip(anywhere, row_bytes, strict=True)) / 2
    np.testing.assert_allclose(stages["sync_rows"].amount_W, 2 * 2 / 3 * rows)
    assert stages["sync_rows"].times == 0.5 and not stages["sync_rows"].can_hide
    assert (stages["sync_rows"].ranks, stages["rows"].ranks) == (3, 2)
    shared = with_sync(step, tables, 4, Groups(2, 3, sync="gradients"))
    once = [10 * (1 - 0.9**8), 1000 * (1 - 0.999**16)]
    sent = (once[0] * 9 + once[1] * 17) * 4 / 2
    assert stages_of(shared)["sync_gradients"] == pytest.approx(2 * sent)


@pytest.mark.parametrize("system", ["fused_row_wise", "row_wise", "column_wise", "table_wise"])
def test_tables_in_host_memory_are_slower(system: str) -> None:
    tables = two_tables()

    def step(on_host: list[bool]) -> Step:
        if system == "fused_row_wise":
            return fused_step(tables, 4, 2, on_host=on_host)
        return stock_step(system, tables, 4, 2, on_host=on_host)

    device, host = stages_of(step([False, False])), stages_of(step([False, True]))
    both = host["lookup"] + host["lookup_on_host"]
    assert host["lookup_on_host"] > 0 and both >= device["lookup"] * 0.999
    cluster = ClusterConfig(ranks=2, host_lookup=0.001)
    assert step([False, True]).seconds(cluster) > 1.5 * step([False, False]).seconds(cluster)


def test_half_precision_is_half_the_lookup() -> None:
    whole = two_tables()
    half = [replace(table, element_bytes=2) for table in whole]
    for make in (lambda t: fused_step(t, 4, 2), lambda t: stock_step("row_wise", t, 4, 2)):
        a, b = stages_of(make(whole)), stages_of(make(half))
        assert b["lookup"] == a["lookup"] / 2 and b["rows"] == a["rows"]


def test_memory_by_hand() -> None:
    a, b = two_tables()
    on = {
        name: table_bytes_W(b, Placement(name, (1,)), 2).tolist()
        for name in ("fused_row_wise", "table_wise", "column_wise", "data_parallel")
    }
    assert on["fused_row_wise"] == [500 * 68, 500 * 68]
    assert on["table_wise"] == [0, 1000 * 68] and on["data_parallel"] == [1000 * 68] * 2
    assert on["column_wise"] == [1000 * (8 * 4 + 4)] * 2  # each half has a state of its own
    ranges = np.array([0, 100, 1000])
    uneven = table_bytes_W(b, Placement("fused_row_wise", (), ranges), 2)
    assert uneven.tolist() == [100 * 68, 900 * 68]
    output = 4 * 16 * 4
    unique = b.unique(4)
    assert buffer_bytes(b, "fused_row_wise", 4, 2) == pytest.approx(
        8 * 40 + 2 * (2 * unique * 64 + output)
    )
    assert buffer_bytes(b, "table_wise", 4, 2) == 2 * output
    assert owner_bytes(b, 4, 2) == 2 * (8 * 24 + 2 * output)
    assert buffer_bytes(b, "row_wise", 4, 2) == 8 * 24 + 2 * (2 * output + output)
    assert replica_bytes([a, b], HotUse(np.array([3, 5]))) == 3 * (36 + 16) + 5 * (68 + 16)


def test_collectives_by_hand() -> None:
    near = LinkConfig(all_to_all=100.0, all_reduce=200.0, latency=10.0)
    far = LinkConfig(all_to_all=10.0, all_reduce=20.0, latency=30.0)
    cluster = ClusterConfig(ranks=16, ranks_per_node=8, within_node=near, between_nodes=far)
    # 7 of 15 other ranks are on the node.
    assert cluster.all_to_all(15e9) == pytest.approx(8.0 / 10 + 40e-6)
    assert cluster.all_to_all(7e9, 8) == pytest.approx(7.0 / 100 + 10e-6)
    assert cluster.all_to_all(1e9, 1) == 0.0
    within, between = 2 * 7 / 8 * 8 / 200, 2 * 1 / 2 * 1 / 20
    assert cluster.all_reduce(8e9) == pytest.approx(within + between + 40e-6)


def test_table_wise_goes_to_the_least_loaded_rank() -> None:
    tables = [
        TableLoad(f"t{i}", 100, dim, 1.0, RowClasses.uniform(100))
        for i, dim in enumerate([8, 64, 8, 32, 16])
    ]
    rows = next(p for p in stock_step("table_wise", tables, 10, 2).stages if p.name == "rows")
    assert sorted(rows.amount_W.tolist()) == [64 * 40.0, 64 * 40.0]


def test_ranks_wait_for_each_other_in_collectives_only() -> None:
    """Between two collectives the busiest rank in all stages together counts, not in each."""
    cluster = ClusterConfig(ranks=2, between_nodes=LinkConfig(all_to_all=1.0, latency=0.0))
    cluster = replace(cluster, within_node=cluster.between_nodes)
    rates = replace(cluster.fused, step=0.0, table=0.0, ids=1.0, lookup=1.0, pooling=1.0)
    cluster = replace(cluster, fused=rates)
    step = Step("fused_row_wise", tables=1, ranks=2)
    step.add("dedup", "ids", np.array([1e6, 0.0]))  # seconds: 1, 0
    step.add("lookup", "lookup", np.array([0.0, 3e9]))  # 0, 3
    step.add("rows", "all_to_all", np.array([2e9, 1e9]))  # 2, 1
    step.add("pooling", "pooling", np.array([4e9, 0.0]))  # 4, 0
    assert step.seconds_of_stages(cluster) == pytest.approx([0, 3, 2, 4])
    assert step.seconds(cluster) == pytest.approx(9.0)
