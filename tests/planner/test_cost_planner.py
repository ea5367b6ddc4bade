"""``FusedShardingPlanner`` with a cluster: its cost model decides, TorchRec's parts still work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.search.search_config import (
    GroupsConfig,
    HotSearchConfig,
    SearchConfig,
)
from fusedrec_torchrec.sharding.plan_conversion import plan_file_of, sharding_plan_of
from fusedrec_torchrec.sharding.plan_file import read_plan, write_plan
from tests.cluster import Cluster
from tests.planner.test_planner import FUSED, ROWS, Model, only, types

CLUSTER = ClusterConfig(
    device="cpu",
    ranks=2,
    ranks_per_node=2,
    memory=1.0,
    hidden=0.8,
    within_node=LinkConfig(all_to_all=0.02, all_reduce=0.5, latency=5.0),
    fused=RatesConfig(step=100.0, hot=1000.0),
    stock=RatesConfig(step=100.0),
)


def profile(skew: float = 1.2) -> AccessProfile:
    rows = {**ROWS, "s": 777}
    counts = {
        name: np.maximum(1e6 / np.arange(1, n + 1) ** skew, 1).astype(np.int64)
        for name, n in rows.items()
    }
    samples = sum(int(each.sum()) for each in counts.values()) // len(counts)  # an id of each
    return AccessProfile(
        table_rows=rows,
        samples=samples,
        accesses={name: int(each.sum()) for name, each in counts.items()},
        ids={name: np.arange(n)[::-1].copy() for name, n in rows.items()},  # popular ones last
        counts=counts,
        error=0,
        counters=1 << 20,
    )


def planned(cluster: ClusterConfig = CLUSTER, **settings: Any) -> fr.FusedShardingPlanner:
    return fr.FusedShardingPlanner(batch_size=512, cluster=cluster, **settings)


def test_the_cost_model_decides() -> None:
    planner = planned(profile=profile())
    plan = planner.plan(Model(), fr.fused_sharders())
    assert set(types(plan).values()) == {FUSED}
    assert planner.decision is not None
    table = plan.plan["bags"]["c"]
    assert table.hot_rows is not None and ROWS["c"] - 1 in table.hot_rows.ids
    cold = SearchConfig(hot=HotSearchConfig(memory=0.0))
    plan = planned(profile=profile(), search=cold).plan(Model(), fr.fused_sharders())
    table = plan.plan["bags"]["c"]
    assert table.hot_rows is None
    sizes = [shard.shard_sizes[0] for shard in table.sharding_spec.shards]
    assert sum(sizes) == ROWS["c"] and sizes[0] > 1.2 * sizes[1]  # popular rows are the last ones
    # Bags of many ids that differ are pooled where the rows are.
    many = {"c": ParameterConstraints(pooling_factors=[300.0])}
    assert types(planned(constraints=many).plan(Model(), fr.fused_sharders()))["c"] != FUSED


def test_a_plan_file_is_the_live_plan(tmp_path: Path) -> None:
    planner = planned(profile=profile())
    model, sharders = Model(), fr.fused_sharders()
    plan = planner.plan(model, sharders)
    write_plan(tmp_path / "plan.yaml", *plan_file_of(plan, 2, 2, "cpu"))
    assert sharding_plan_of(*read_plan(tmp_path / "plan.yaml"), model, sharders) == plan


def test_groups_make_a_plan_for_groups() -> None:
    far = replace(CLUSTER, ranks=8, ranks_per_node=2, between_nodes=LinkConfig(all_to_all=0.01))
    search = SearchConfig(groups=GroupsConfig(sizes=[2]))
    planner = planned(far, search=search)
    plan = planner.plan(Model(), fr.fused_sharders())
    assert isinstance(plan, fr.GridShardingPlan) and plan.sharding_group_size == 2
    assert planner.decision is not None and planner.decision.layout == "groups_adjacent"


def test_constraints_are_torchrecs() -> None:
    plan = planned(constraints=only(a="table_wise", b="row_wise")).plan(
        Model(), fr.fused_sharders()
    )
    assert (types(plan)["a"], types(plan)["b"]) == ("table_wise", "row_wise")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"constraints": only(x="row_wise")}, "constraints name 'x', which is no table"),
        ({"constraints": only(a="grid_shard")}, "ask for .'grid_shard'., which the cost model"),
        (
            {
                "constraints": only(a="row_wise"),
                "search": SearchConfig(tables={"a": ["table_wise"]}),
            },
            "they have nothing in common",
        ),
        ({"cluster": replace(CLUSTER, memory=1e-3)}, "'c' does not fit"),
        (
            {"constraints": {"a": ParameterConstraints(min_partition=8)}},
            "set min_partition, which the cost model does not know",
        ),
        (
            {"constraints": {"a": ParameterConstraints(compute_kernels=["fused_uvm"])}},
            "ask for compute_kernels .'fused_uvm'.",
        ),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        planned(**settings).plan(Model(), fr.fused_sharders())


def test_settings_that_need_a_cluster() -> None:
    with pytest.raises(ValueError, match="search is given without cluster"):
        fr.FusedShardingPlanner(search=SearchConfig())
    with pytest.raises(ValueError, match="sharding_group_size and cluster are both given"):
        fr.FusedShardingPlanner(cluster=CLUSTER, sharding_group_size=2)


def test_ids_of_a_sample_are_those_of_the_profile() -> None:
    counted = profile()
    planner = planned(profile=counted)
    planner.plan(Model(), fr.fused_sharders())
    assert planner.decision is not None
    for table in planner.decision.tables:
        assert table.pooling == counted.accesses[table.name] / counted.samples


def test_rows_are_not_hot_with_optimizers_that_cannot() -> None:
    params = {"optimizer": EmbOptimType.ADAM}
    planner = planned(replace(CLUSTER, device="cuda"), profile=profile())
    planner.plan(Model(), fr.fused_sharders(fused_params=params))
    assert planner.decision is not None and not planner.decision.hot


def test_a_topology_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"topology.world_size is 4, must be cluster.ranks, 2"):
        planned(topology=Topology(world_size=4, compute_device="cpu"))


def test_a_profile_of_other_tables() -> None:
    counted = profile()
    counted.table_rows["b"] = 77
    with pytest.raises(ValueError, match="'b' with 77 rows, the model has 5000"):
        planned(profile=counted).plan(Model(), fr.fused_sharders())
    counted.table_rows["b"] = ROWS["b"]
    del counted.table_rows["s"]
    with pytest.raises(ValueError, match="has no table 's'"):
        planned(profile=counted).plan(Model(), fr.fused_sharders())


def test_storage_is_reserved() -> None:
    size = sum(ROWS.values()) * 16 * 4 / 1e9
    # TorchRec reserves memory of devices, not of hosts.
    tight = replace(CLUSTER, device="cuda", memory=0.8 * size, host_memory=0.0)
    planned(tight).plan(Model(), fr.fused_sharders())
    with pytest.raises(ValueError, match="does not fit"):
        planned(tight, storage_reservation=FixedPercentageStorageReservation(0.5)).plan(
            Model(), fr.fused_sharders()
        )


def test_torchrecs_own_search_works_on_what_was_decided() -> None:
    seen: list[str] = []

    def look(options: list[ShardingOption]) -> list[ShardingOption]:
        seen.extend(f"{option.name} {option.sharding_type}" for option in options)
        return options

    constraints = only(a="table_wise", c=FUSED)
    planner = planned(
        profile=profile(),
        constraints=constraints,
        proposer=GreedyProposer(),
        partitioner=GreedyPerfPartitioner(),
        callbacks=[look],
        debug=False,
    )
    plan = planner.plan(Model(), fr.fused_sharders())
    assert "a table_wise" in seen and f"c {FUSED}" in seen and f"a {FUSED}" not in seen
    alone = planned(profile=profile(), constraints=constraints).plan(Model(), fr.fused_sharders())
    assert plan.plan["bags"]["c"] == alone.plan["bags"]["c"]


def plan_together(skew: float | None) -> tuple[ShardingPlan | str, Any]:
    cluster = CLUSTER if skew else replace(CLUSTER, memory=1e-3)
    planner = planned(cluster, profile=profile(skew or 1.0))
    try:
        plan = planner.collective_plan(Model(), fr.fused_sharders())
    except ValueError as error:
        return str(error), None
    return plan, planner.decision is not None


def test_all_ranks_have_one_plan(cluster_2: Cluster) -> None:
    (first, knows), (second, _) = cluster_2.run(plan_together, 1.1)
    assert first == second and knows
    failed = cluster_2.run(plan_together, None)
    assert failed[0] == failed[1] and "'c' does not fit" in failed[0][0]


def test_meta_weights_stay_meta() -> None:
    model = Model()
    planned().plan(model, fr.fused_sharders())
    assert all(p.device == torch.device("meta") for p in model.parameters())


def test_selected_options_are_the_plan() -> None:
    """TorchRec 1.9's unified planner reads memory and time of a plan from them."""
    sharding = {"a": "table_wise", "b": "row_wise", "c": FUSED, "s": FUSED}
    planner = planned(profile=profile(), constraints=only(**sharding))
    assert planner.get_selected_options() == [] and planner.get_search_space() is None
    plan = planner.plan(Model(), fr.fused_sharders())
    options = {option.name: option for option in planner.get_selected_options()}
    assert {name: option.sharding_type for name, option in options.items()} == sharding
    for module in plan.plan.values():
        for name, entry in module.items():
            shards = [(shard.size, shard.offset, shard.rank) for shard in options[name].shards]
            assert shards == [
                (shard.shard_sizes, shard.shard_offsets, shard.placement.rank())
                for shard in entry.sharding_spec.shards
            ]
    assert planner.get_search_space() is None  # the cost model lists no options
    decision = planner.decision
    assert decision is not None
    busy = [0.0, 0.0]
    memory = [0, 0]
    for option in options.values():
        for shard in option.shards:
            assert shard.perf is not None and shard.storage is not None and shard.rank is not None
            busy[shard.rank] += shard.perf.total
            memory[shard.rank] += shard.storage.ddr
    # Ranks wait for the busiest one in every stage of a step.
    assert 0.7 * decision.seconds < max(busy) / 1e3 <= 1.001 * decision.seconds
    outputs = 2 * 512 * 16 * 4  # of the table-wise table, on the rank without it
    assert 0 <= decision.memory_W.sum() - sum(memory) <= outputs + 8
    with pytest.raises(ValueError, match="does not fit"):
        planned(replace(CLUSTER, memory=1e-3)).plan(Model(), fr.fused_sharders())


def test_selected_options_of_torchrecs_own_search() -> None:
    planner = planned(
        profile=profile(), constraints=only(a="table_wise"), proposer=GreedyProposer()
    )
    plan = planner.plan(Model(), fr.fused_sharders())
    options = {option.name: option for option in planner.get_selected_options()}
    assert {name: option.sharding_type for name, option in options.items()} == types(plan)
    entry = plan.plan["bags"]["c"]
    wanted = [shard.shard_sizes for shard in entry.sharding_spec.shards]
    assert [shard.size for shard in options["c"].shards] == wanted
    searched = planner.get_search_space()
    assert searched is not None
    assert {option.name: option.sharding_type for option in searched} == types(plan)


def refused_plan() -> str:
    bad = {"none": ParameterConstraints(sharding_types=["table_wise"])}
    try:
        fr.FusedShardingPlanner(cluster=CLUSTER, constraints=bad).collective_plan(Model())
    except ValueError as error:
        return str(error)
    return "no error"


def test_constraints_that_rank_0_refuses_are_a_value_error_on_all_ranks(
    cluster_2: Cluster,
) -> None:
    first, second = cluster_2.run(refused_plan)
    assert first == second and "'none'" in first
