"""What users can get wrong with 2D parallelism: errors, the same on all ranks of all groups."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import PlannerError, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import fusedrec_torchrec as fr
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.parity import local_parts, train_step

TABLES = (Table("a", 50, dim=8), Table("b", 33, dim=16))


def case_of(**options: Any) -> Case:
    grid = fr.GridOptions(sharding_group_size=2, **options)
    return Case(tables=TABLES, batch_sizes=(6, 3, 5, 4), lengths=(1, 2), grid=grid)


def bad_batch(case: Case, bad_rank: int) -> str:
    """A bad id on one rank; afterwards all ranks go on."""
    model = sharded(case)
    train_step(case, model, 0)
    model.sync()
    features = batch(case, 1, dist.get_rank())
    if dist.get_rank() == bad_rank:
        features.values()[0] = 1000
    with pytest.raises(ValueError, match="bad input") as error:
        model(features)
    train_step(case, model, 2)
    model.sync()
    return str(error.value)


@pytest.mark.parametrize("sync", ["weights", "gradients"])
@pytest.mark.parametrize("layout", ["replicas_adjacent", "groups_adjacent"])
@pytest.mark.parametrize("bad_rank", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_bad_batch_in_one_group_is_an_error_in_all(
    cluster_4: Cluster, sync: str, layout: str, bad_rank: int
) -> None:
    messages = cluster_4.run(bad_batch, case_of(sync=sync, layout=layout), bad_rank)
    assert len(set(messages)) == 1
    want = f"bad input on rank {bad_rank}: feature 'f_a' of table 'a': id 1000"
    assert messages[0].startswith(want)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"sharding_group_size": 0},
            "sharding_group_size is 0: it should be greater than or equal to 1",
        ),
        ({"sharding_group_size": "2"}, "sharding_group_size is '2': it should be a valid integer"),
        (
            {"sync_every": 1.5},
            "sync_every is 1.5: it should be a valid integer and greater than or equal to 1",
        ),
        ({"sync": "rows"}, "sync is 'rows': it should be 'weights' or 'gradients'"),
        (
            {"overlap": "yes"},
            "overlap is 'yes': it should be 'none', 'until_lookup' or 'one_step'",
        ),
        ({"rows": "all", "overlap": "one_step"}, "must be with rows 'touched'"),
        ({"sync": "gradients", "sync_every": 2}, "sync_every is 2 with sync 'gradients'"),
        ({"sync": "gradients", "overlap": "one_step"}, "overlap is 'one_step' with sync"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"must|should|setting of") as error:
        fr.GridOptions(**{"sharding_group_size": 2, **options})
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("size", "ranks", "text"),
    [
        (3, 8, "sharding_group_size is 3 with 8 ranks, must be one of [1, 2, 4]"),
        (8, 8, "with one group use DistributedModelParallel"),
        (1, 1, "at least two ranks"),
    ],
)
def test_groups_that_do_not_divide_the_ranks(size: int, ranks: int, text: str) -> None:
    with pytest.raises(ValueError, match="sharding_group_size") as error:
        fr.GridOptions(sharding_group_size=size).groups(ranks)
    assert text in str(error.value)


def message(case: Case, hot: fr.HotOptions | None = None) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        sharded(case, hot=hot)
    return str(error.value)


def test_one_group_is_refused_before_anything_is_sent(cluster_2: Cluster) -> None:
    case = dataclasses.replace(case_of(), batch_sizes=(3, 3))
    assert "at least two groups" in cluster_2.run(message, case)[0]


def test_hot_rows_are_refused(cluster_4: Cluster) -> None:
    hot = fr.HotOptions(tables={"a": fr.HotRule(ids=[1, 2])})
    for text in cluster_4.run(message, case_of(), hot):
        assert text.startswith("hot rows are not supported with 2D parallelism: their current")


def model_of(rows: int) -> nn.Module:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=["f"])
        ],
        device=torch.device("meta"),
    )


def plan_for(rows: int, size: int | None, cap: int) -> ShardingPlan:
    ranks = size or dist.get_world_size()
    topology = Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu", ddr_cap=cap)
    planner = fr.FusedShardingPlanner(topology=topology, sharding_group_size=size, batch_size=8)
    return planner.collective_plan(model_of(rows), fr.fused_sharders())


def plans(rows: int, cap: int) -> str:
    """The tables fit on all ranks, and not on the ranks of a group."""
    plan = plan_for(rows, None, cap)
    assert not isinstance(plan, fr.GridShardingPlan)
    with pytest.raises(PlannerError) as error:
        plan_for(rows, 2, cap)
    roomy = plan_for(rows, 2, 4 * cap)
    assert isinstance(roomy, fr.GridShardingPlan) and roomy.sharding_group_size == 2
    ranks = [s.placement.rank() for s in roomy.plan[""]["t"].sharding_spec.shards]
    assert ranks == [0, 1]
    with pytest.raises(ValueError, match="plan was made for groups of 2 ranks"):
        fr.GridModelParallel(model_of(rows), fr.GridOptions(sharding_group_size=1), plan=roomy)
    with pytest.raises(ValueError, match=r"shard lies on rank 2, must be on one of the 2 ranks"):
        fr.GridModelParallel(model_of(rows), fr.GridOptions(sharding_group_size=2), plan=plan)
    return str(error.value)


def test_a_group_that_does_not_fit_into_memory(cluster_4: Cluster) -> None:
    """100 MB of rows: 26 MB on each of four ranks, 51 MB in groups of two."""
    for text in cluster_4.run(plans, 400_000, 40 << 20):
        assert "no plan for a group of sharding_group_size 2 ranks" in text
        assert "try larger groups" in text


def dense_kernel() -> str:
    module = model_of(100)
    plan = construct_module_sharding_plan(
        module,
        {"t": table_wise(rank=1, compute_kernel="dense")},
        sharder=fr.FusedEmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    with pytest.raises(ValueError, match="compute_kernel is 'dense'") as error:
        fr.GridModelParallel(
            module, fr.GridOptions(sharding_group_size=2), plan=ShardingPlan({"": plan})
        )
    return str(error.value)


def test_kernels_without_an_optimizer_are_refused(cluster_4: Cluster) -> None:
    for text in cluster_4.run(dense_kernel):
        assert text.startswith("plan of table 't' (table_wise): compute_kernel is 'dense'")


def no_options() -> str:
    with pytest.raises(ValueError, match="must be GridOptions") as error:
        fr.GridModelParallel(model_of(100), 2)  # type: ignore[arg-type]
    return str(error.value)


def test_a_number_is_no_grid(cluster_2: Cluster) -> None:
    assert cluster_2.run(no_options)[0].startswith("grid is 2, must be GridOptions(")


@pytest.mark.parametrize(
    ("layout", "ranks", "local", "want"),
    [
        ("replicas_adjacent", 16, 8, 2),
        ("groups_adjacent", 16, 8, 4),
        ("replicas_adjacent", 16, 2, 1),
        ("groups_adjacent", 8, 2, 2),
    ],
)
def test_ranks_of_a_group_on_a_host(layout: Any, ranks: int, local: int, want: int) -> None:
    options = fr.GridOptions(sharding_group_size=4, layout=layout)
    assert options.ranks_per_host(ranks, local) == want


def plans_itself() -> list[int]:
    """Without a plan, one is made for the ranks of a group."""
    model = fr.GridModelParallel(model_of(1000), fr.GridOptions(sharding_group_size=2))
    return [int(s.placement.rank()) for s in model.plan.plan[""]["t"].sharding_spec.shards]


def test_without_a_plan(cluster_4: Cluster) -> None:
    assert cluster_4.run(plans_itself) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def own_weights(model: Any) -> list[torch.Tensor]:
    return [part.clone() for value in model.state_dict().values() for _, part in local_parts(value)]


def refused_calls(case: Case) -> tuple[str, str, list[torch.Tensor]]:
    """What DMPCollection has and groups cannot do, between two steps; weights afterwards."""
    model = sharded(case)
    train_step(case, model, 0)
    with pytest.raises(ValueError, match="all-reduce") as of_hook:
        model.set_all_reduce_hook(lambda *_: None)
    with pytest.raises(ValueError, match="include_optimizer_state") as of_sync:
        model.sync(include_optimizer_state=False)
    model.sync()
    train_step(case, model, 1)
    model.sync(include_optimizer_state=True)
    return str(of_hook.value), str(of_sync.value), own_weights(model)


def plain_calls(case: Case) -> list[torch.Tensor]:
    model = sharded(case)
    for step in range(2):
        train_step(case, model, step)
        model.sync()
    return own_weights(model)


def test_what_dmp_collection_has_and_groups_have_not_is_refused(cluster_4: Cluster) -> None:
    """And it changes nothing: replicas sync as if it had not been tried."""
    case = case_of(sync_every=2)
    plain = cluster_4.run(plain_calls, case)
    for (of_hook, of_sync, weights), want in zip(
        cluster_4.run(refused_calls, case), plain, strict=True
    ):
        assert of_hook.startswith("GridModelParallel has no all-reduce hook")
        assert of_sync == (
            "include_optimizer_state is False, must be True: set GridOptions.sync_optimizer_state "
            "instead"
        )
        assert want and len(want) == len(weights)
        assert all(map(torch.equal, weights, want))


def wrong_topology() -> str:
    with pytest.raises(ValueError, match="topology") as error:
        fr.FusedShardingPlanner(
            topology=Topology(world_size=4, compute_device="cpu"), sharding_group_size=2
        )
    return str(error.value)


def test_a_topology_of_all_ranks_is_refused(cluster_4: Cluster) -> None:
    text = cluster_4.run(wrong_topology)[0]
    assert text.startswith("topology.world_size is 4, must be sharding_group_size, 2")
