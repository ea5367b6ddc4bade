"""The planner: fused and stock tables together, constraints obeyed, storage right."""

import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.estimators import optimizer_bytes
from fusedrec_torchrec.planner.report.stats import FusedEmbeddingStats
from tests.case import parallel
from tests.cluster import Cluster

FUSED = fr.FusedShardingType.FUSED_ROW_WISE.value
ROOT = Path(__file__).parents[2]
ROWS = {"a": 10, "b": 5_000, "c": 300_000}


class Model(nn.Module):
    def __init__(self, data_type: DataType = DataType.FP32) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=n,
                    num_embeddings=r,
                    embedding_dim=16,
                    feature_names=[f"f_{n}"],
                    data_type=data_type,
                )
                for n, r in ROWS.items()
            ],
            device=torch.device("meta"),
        )
        self.sequences = EmbeddingCollection(
            [EmbeddingConfig(name="s", num_embeddings=777, embedding_dim=8, feature_names=["f_s"])],
            device=torch.device("meta"),
        )


def planner(world_size: int = 2, device: str = "cpu", **kwargs: Any) -> fr.FusedShardingPlanner:
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device=device)
    return fr.FusedShardingPlanner(topology=topology, **kwargs)


def types(plan: ShardingPlan) -> dict[str, str]:
    return {
        name: sharding.sharding_type
        for module in plan.plan.values()
        for name, sharding in module.items()
    }


def only(**tables: str) -> dict[str, ParameterConstraints]:
    return {name: ParameterConstraints(sharding_types=[t]) for name, t in tables.items()}


def test_constraints_are_obeyed() -> None:
    wanted = {"a": FUSED, "b": "table_wise", "c": "column_wise", "s": FUSED}
    plan = planner(constraints=only(**wanted)).plan(Model(), fr.fused_sharders())
    assert types(plan) == wanted


@pytest.mark.parametrize("sharding_type", [FUSED, "table_wise"])
def test_one_type_for_all(sharding_type: str) -> None:
    constraints = only(**dict.fromkeys([*ROWS, "s"], sharding_type))
    plan = planner(constraints=constraints).plan(Model(), fr.fused_sharders())
    assert set(types(plan).values()) == {sharding_type}


def test_tables_that_repeat_many_ids_are_fused_without_being_told() -> None:
    plan = planner(batch_size=4096).plan(Model(), fr.fused_sharders())
    assert types(plan)["a"] == types(plan)["b"] == FUSED


@pytest.mark.parametrize(("pooling", "is_fused"), [(1.0, True), (2.0, True), (20.0, False)])
def test_tables_with_many_ids_in_a_bag_and_few_repetitions_stay_stock(
    pooling: float, is_fused: bool
) -> None:
    """Then pooling at the owner sends less: one row for a bag."""
    constraints = {"b": ParameterConstraints(pooling_factors=[pooling])}
    plan = planner(batch_size=4096, constraints=constraints).plan(Model(), fr.fused_sharders())
    assert (types(plan)["b"] == FUSED) == is_fused
    assert (types(plan)["a"] == FUSED) == is_fused, "all tables of a module in one way"
    constraints["b"] = ParameterConstraints(pooling_factors=[pooling], sharding_types=[FUSED])
    plan = planner(batch_size=4096, constraints=constraints).plan(Model(), fr.fused_sharders())
    assert types(plan)["b"] == FUSED, "what is asked for is done"


def test_sequences_pay_whatever_their_length() -> None:
    constraints = {"s": ParameterConstraints(pooling_factors=[50.0])}
    plan = planner(batch_size=64, constraints=constraints).plan(Model(), fr.fused_sharders())
    assert types(plan)["s"] == FUSED


def print_options() -> None:
    """The search space in its order, with constraints that leave a choice."""
    choice = ParameterConstraints(sharding_types=[FUSED, "table_wise", "column_wise"])
    one = planner(constraints=dict.fromkeys([*ROWS, "s"], choice))
    options = one._enumerator.enumerate(Model(), fr.fused_sharders())
    print("OPTIONS", [(option.name, option.sharding_type) for option in options])


def test_search_space_does_not_depend_on_the_order_of_sets() -> None:
    """Python orders sets of strings differently in every process, unless told the seed."""
    script = "from tests.planner.test_planner import print_options; print_options()"
    plans = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        plans.add(done.stdout[done.stdout.index("OPTIONS") :])
    assert len(plans) == 1


def test_tables_that_cannot_be_fused_are_not_offered_as_fused() -> None:
    def plan_of(dim: int, data_type: DataType, **kwargs: Any) -> dict[str, str]:
        config = EmbeddingBagConfig(
            name="t",
            num_embeddings=10,
            embedding_dim=dim,
            feature_names=["f"],
            data_type=data_type,
        )
        model = nn.Module()
        model.bags = EmbeddingBagCollection([config], device=torch.device("meta"))
        constraints = kwargs.pop("constraints", None)
        return types(planner(constraints=constraints).plan(model, fr.fused_sharders(**kwargs)))

    assert plan_of(8, DataType.FP32) == {"t": FUSED}
    assert plan_of(6, DataType.FP32) != {"t": FUSED}
    assert plan_of(8, DataType.BF16) != {"t": FUSED}
    assert plan_of(8, DataType.FP32, fused_params={"optimizer": EmbOptimType.ADAM}) != {"t": FUSED}
    # Asked for by name it stays, and sharding says what is wrong.
    assert plan_of(6, DataType.FP32, constraints=only(t=FUSED)) == {"t": FUSED}


def options_of(table: str, device: str = "cpu", **kwargs: Any) -> ShardingOption:
    constraints = kwargs.pop("constraints", only(**dict.fromkeys([*ROWS, "s"], FUSED)))
    fused_params = kwargs.pop("fused_params", {})
    one = planner(device=device, constraints=constraints, **kwargs)
    one.plan(Model(), fr.fused_sharders(fused_params=fused_params))
    assert one._best_plan is not None
    return next(option for option in one._best_plan if option.name == table)


def test_selected_options_and_search_space_of_the_last_plan() -> None:
    """TorchRec 1.9's unified planner asks for both."""
    one = planner(constraints=only(a="table_wise"), debug=False)
    assert one.get_selected_options() == [] and one.get_search_space() is None
    plan = one.plan(Model(), fr.fused_sharders())
    selected = {option.name: option.sharding_type for option in one.get_selected_options()}
    assert selected == types(plan)
    searched = [(option.name, option.sharding_type) for option in one.get_search_space() or []]
    assert set(selected.items()) <= set(searched) and len(searched) > len(selected)
    with pytest.raises(PlannerError):
        one.plan(nn.Sequential(Model(), huge_table()), fr.fused_sharders())
    assert one.get_selected_options() == [] and one.get_search_space() is None


def huge_table() -> nn.Module:
    config = EmbeddingBagConfig(
        name="huge", num_embeddings=10**10, embedding_dim=128, feature_names=["f_huge"]
    )
    return EmbeddingBagCollection([config], device=torch.device("meta"))


def test_pooling_factors_of_constraints_count() -> None:
    constraints = only(**dict.fromkeys([*ROWS, "s"], FUSED))
    small = options_of("c", constraints=constraints, batch_size=100)
    constraints["c"] = ParameterConstraints(sharding_types=[FUSED], pooling_factors=[50.0])
    large = options_of("c", constraints=constraints, batch_size=100)
    assert large.total_storage.ddr > small.total_storage.ddr
    assert large.total_perf > 10 * small.total_perf


def test_a_single_rank_sends_nothing() -> None:
    def comms(world_size: int) -> list[float]:
        option = options_of("c", world_size=world_size, batch_size=1000)
        return [shard.perf.fwd_comms for shard in option.shards]

    assert comms(1) == [0]
    # Every rank sends half of the distinct rows of the other's batch: 64 bytes each.
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    bandwidth = topology.comms_bandwidths.get_bw(2, 2, CollectiveType.ALL_TO_ALL)
    rows = expected_unique(300_000, 1000) / 2
    assert comms(2) == pytest.approx([rows * 64 / bandwidth] * 2)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_storage_by_kernel_on_cuda(kernel: str) -> None:
    """Per-row optimizer state stays on the device, as FBGEMM has it."""
    constraints = {
        name: ParameterConstraints(
            sharding_types=[FUSED],
            compute_kernels=[kernel],
            cache_params=CacheParams(load_factor=0.25),
        )
        for name in ROWS
    }
    optimizer = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    option = options_of("c", "cuda", constraints=constraints, fused_params=optimizer, batch_size=1)
    weights, state = 300_000 * 16 * 4, 300_000 * 4
    total = option.total_storage
    hbm, ddr = {
        "fused": (weights + state, 0),
        "fused_uvm": (state, weights),
        "fused_uvm_caching": (weights // 4 + state, weights),
    }[kernel]
    assert total.ddr == ddr
    assert hbm <= total.hbm <= hbm + 10_000


def test_takes_the_arguments_of_torchrecs_planner_in_their_order() -> None:
    ours = inspect.signature(fr.FusedShardingPlanner.__init__).parameters.values()
    theirs = inspect.signature(EmbeddingShardingPlanner.__init__).parameters.values()
    assert [p.name for p in ours if p.kind is not p.KEYWORD_ONLY] == [p.name for p in theirs]
    own = {p.name: p.default for p in ours if p.kind is p.KEYWORD_ONLY}
    names = ("sharding_group_size", "cluster", "search", "profile", "zipf")
    assert own == dict.fromkeys(names)
    with pytest.raises(TypeError, match="unexpected keyword argument 'clusters'"):
        planner(clusters=None)
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    stats = FusedEmbeddingStats()
    one = fr.FusedShardingPlanner(topology, 8, None, None, None, None, None, stats)
    assert one._stats == [stats]


def test_unknown_type_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="No available sharding type"):
        planner(constraints=only(a="fused_rowise")).plan(Model(), fr.fused_sharders())


HINT = (
    r"TorchRec's own planner does not know the sharding type fused_row_wise\. Pass a plan to "
    r"DistributedModelParallel, plan=fr\.FusedShardingPlanner\(\)\.collective_plan\(model, "
    r"sharders\)"
)


def error_without_a_plan() -> str:
    try:
        DistributedModelParallel(Model(), sharders=fr.fused_sharders())
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def test_a_model_without_a_plan_says_how_to_get_one(cluster_1: Cluster) -> None:
    (text,) = cluster_1.run(error_without_a_plan)
    assert re.match(HINT, text)


@pytest.mark.parametrize("constraints", [None, only(a=FUSED, b="table_wise", c="row_wise")])
def test_the_stock_planner_says_which_planner_knows_fused_tables(
    constraints: dict[str, ParameterConstraints] | None,
) -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    stock = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    with pytest.raises(ValueError, match=HINT):
        stock.plan(Model(), fr.fused_sharders())


def test_the_stock_planner_plans_stock_tables_with_our_sharders() -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    constraints = only(**dict.fromkeys([*ROWS, "s"], "table_wise"))
    stock = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = stock.plan(Model(), fr.fused_sharders()).plan
    kinds = {p.sharding_type for tables in plan.values() for p in tables.values()}
    assert kinds == {"table_wise"}


def test_kernels_of_fused_tables() -> None:
    sharder = fr.FusedEmbeddingBagCollectionSharder()
    assert sharder.compute_kernels(FUSED, "cpu") == ["fused"]
    assert sharder.compute_kernels(FUSED, "cuda") == ["fused", "fused_uvm", "fused_uvm_caching"]
    assert FUSED in sharder.sharding_types("cpu")
    constraints = {
        name: ParameterConstraints(sharding_types=[FUSED], compute_kernels=["fused_uvm_caching"])
        for name in ROWS
    }
    plan = planner(device="cuda", constraints=constraints).plan(Model(), fr.fused_sharders())
    kernels = {p.compute_kernel for p in plan.plan["bags"].values()}
    assert kernels == {"fused_uvm_caching"}


def test_statistics_are_printed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchrec.distributed.planner.stats")
    constraints = only(a=FUSED, b="table_wise", c=FUSED, s="table_wise")
    planner(constraints=constraints).plan(Model(), fr.fused_sharders())
    lines = caplog.text.splitlines()
    assert any("bags.a" in line and "FRW" in line for line in lines)
    assert any("bags.b" in line and "TW" in line and "FRW" not in line for line in lines)
    assert any("FRW: 2 TW: " in line for line in lines)


@pytest.mark.parametrize(
    ("optimizer", "state_elements"),
    [
        (EmbOptimType.EXACT_SGD, 0),
        (EmbOptimType.EXACT_ADAGRAD, 300_000 * 16),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 300_000),
    ],
)
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("in_backward", [False, True])
def test_storage_is_weights_and_optimizer_state_and_buffers(
    optimizer: EmbOptimType, state_elements: int, data_type: DataType, in_backward: bool
) -> None:
    model, params = Model(data_type), {"optimizer": optimizer}
    if in_backward:
        classes = {
            EmbOptimType.EXACT_SGD: torch.optim.SGD,
            EmbOptimType.EXACT_ADAGRAD: torch.optim.Adagrad,
            EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
        }
        apply_optimizer_in_backward(classes[optimizer], model.parameters(), {"lr": 0.1})
        params = {}
    constraints = only(**dict.fromkeys([*ROWS, "s"], FUSED))

    def storage(batch_size: int) -> list[int]:
        one = planner(constraints=constraints, batch_size=batch_size)
        one.plan(model, fr.fused_sharders(fused_params=params))
        options = one._best_plan
        assert options is not None
        option = next(o for o in options if o.name == "c")
        assert all(shard.storage is not None and shard.storage.hbm == 0 for shard in option.shards)
        return [shard.storage.ddr for shard in option.shards]

    element = 4 if data_type == DataType.FP32 else 2
    table = 300_000 * 16 * element + state_elements * 4
    small, large = storage(1), storage(1000)
    assert table <= sum(small) <= table + 10_000
    # 1000 samples with one id each: at the least a received row and an output row of 64 bytes
    # with their gradients, on each of two ranks.
    assert sum(large) - table >= 2 * 1000 * 64 * 4


def test_what_does_not_fit_is_refused() -> None:
    topology = Topology(
        world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=15 * 1024 * 1024
    )
    model, fused = Model(), only(**dict.fromkeys([*ROWS, "s"], FUSED))
    sgd = fr.fused_sharders(fused_params={"optimizer": EmbOptimType.EXACT_SGD})
    fr.FusedShardingPlanner(topology=topology, constraints=fused, batch_size=8).plan(model, sgd)
    # The weights fit, the state of a full AdaGrad with them does not.
    adagrad = fr.fused_sharders(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD})
    with pytest.raises(PlannerError):
        fr.FusedShardingPlanner(topology=topology, constraints=fused, batch_size=8).plan(
            model, adagrad
        )


def expected_unique(rows: int, ids: float) -> float:
    """What is expected where nothing is known of the access distribution."""
    return RowClasses.uniform(rows).unique(ids)


def test_expected_unique() -> None:
    assert expected_unique(10, 0) == 0
    assert expected_unique(1, 100) == pytest.approx(1)
    assert expected_unique(10**9, 1000) == pytest.approx(1000, rel=1e-4)
    assert expected_unique(2, 2) == pytest.approx(1.5)
    draws = torch.randint(500, (200, 1000), generator=torch.Generator().manual_seed(0))
    seen = sum(len(set(row.tolist())) for row in draws) / len(draws)
    assert expected_unique(500, 1000) == pytest.approx(seen, rel=0.01)


def test_optimizer_bytes() -> None:
    wanted = {
        EmbOptimType.EXACT_SGD: (0, 0),
        EmbOptimType.EXACT_ADAGRAD: (320, 0),
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: (0, 40),
        EmbOptimType.ADAM: (640, 0),
        EmbOptimType.PARTIAL_ROWWISE_ADAM: (320, 40),
        EmbOptimType.LAMB: (640, 0),
        EmbOptimType.PARTIAL_ROWWISE_LAMB: (320, 40),
        EmbOptimType.LARS_SGD: (320, 0),
    }
    assert {o: optimizer_bytes(o, 10, 8) for o in wanted} == wanted


def plan_and_shard() -> tuple[str, list[tuple[int, ...]]]:
    group = dist.group.WORLD
    assert group is not None
    model = Model()
    constraints = only(a=FUSED, b="table_wise", c=FUSED, s=FUSED)
    sharders = fr.fused_sharders(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD})
    # The default topology asks the environment, as TorchRec's planner does.
    plan = fr.FusedShardingPlanner(constraints=constraints).collective_plan(model, sharders, group)
    # Without sharders it plans for ours.
    same = fr.FusedShardingPlanner(constraints=constraints).collective_plan(model, pg=group)
    assert types(same) == types(plan)
    weights = parallel(model, plan, sharders).state_dict()["bags.embedding_bags.c.weight"]
    return str(plan), [tuple(shard.tensor.shape) for shard in weights.local_shards()]


def test_collective_plan_is_the_same_on_all_ranks_and_shards(cluster_2: Cluster) -> None:
    (plan_0, shape_0), (plan_1, shape_1) = cluster_2.run(plan_and_shard)
    assert plan_0 == plan_1
    assert shape_0 == shape_1 == [(150_000, 16)]


def plan_in_a_group_without_rank_0() -> tuple[str, str] | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return None
    topology = Topology(world_size=2, compute_device="cpu")
    planner = fr.FusedShardingPlanner(topology=topology, constraints=only(a=FUSED, b="table_wise"))
    return str(planner.collective_plan(Model(), pg=group)), error_of_collective_plan(group)


def test_collective_plan_in_a_group_without_rank_0(cluster_4: Cluster) -> None:
    answers = cluster_4.run(plan_in_a_group_without_rank_0)
    assert answers == [None, answers[1], answers[1], None]
    plan, error = answers[1]
    assert FUSED in plan and "table_wise" in plan
    assert error.startswith("INSUFFICIENT_STORAGE: ")


def test_row_wise_is_planned_on_cpu_when_it_is_asked_for() -> None:
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]
            )
            for name, rows in ROWS.items()
        ],
        device=torch.device("meta"),
    )
    asked = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    planner = fr.FusedShardingPlanner(
        topology=Topology(world_size=2, compute_device="cpu"), constraints={"b": asked}
    )
    planned: Any = planner.plan(tables, fr.fused_sharders()).plan[""]
    assert planned["b"].sharding_type == "row_wise"
    assert [shard.shard_sizes for shard in planned["b"].sharding_spec.shards] == [[2500, 8]] * 2
    assert "row_wise" not in {planned["a"].sharding_type, planned["c"].sharding_type}


def error_of_collective_plan(group: dist.ProcessGroup | None = None) -> str:
    """Rank 0 cannot plan: the tables fit nowhere."""
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="huge", num_embeddings=10**9, embedding_dim=128, feature_names=["f"]
            )
        ],
        device=torch.device("meta"),
    )
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=1 << 20)
    try:
        fr.FusedShardingPlanner(topology=topology).collective_plan(tables, pg=group)
    except PlannerError as error:
        return f"{error.error_type.name}: {error}"
    return "no error"


def test_a_plan_that_fails_on_rank_0_fails_on_all_ranks(cluster_2: Cluster) -> None:
    first, second = cluster_2.run(error_of_collective_plan)
    assert first == second
    assert first.startswith("INSUFFICIENT_STORAGE: ")
