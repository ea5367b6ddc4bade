"""torch.distributed.checkpoint and stock TorchRec read what we write, and we read what they do."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.convert import convert, plan_for
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.manifest import read_manifest
from fusedrec_torchrec.checkpoint.save import SaveError, save_checkpoint
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.sharding.plan_file import read_plan
from tests.case import Case, Table, parallel, sharded, unsharded
from tests.checkpoint.models import case_of, optimizer_of, trained, whole_states, whole_weights
from tests.checkpoint.test_round_trips import (
    OWNER_POOLED,
    STOCK,
    Numbers,
    equal,
    load_and_save,
    train_and_save,
)
from tests.cluster import Cluster
from tests.parity import train_step

Clusters = Callable[[int], Cluster]


def load_plainly(sharding: str, ranks: int, folder: str) -> Numbers:
    """As a training without this package would."""
    case = case_of(sharding, ranks)
    model, optimizer = trained(case, steps=1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return whole_weights(case, model), whole_states(case, optimizer)


def save_plainly(sharding: str, ranks: int, folder: str) -> Numbers:
    case = case_of(sharding, ranks)
    model, optimizer = trained(case)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    return whole_weights(case, model), whole_states(case, optimizer)


@pytest.mark.parametrize(
    "sharding", ["fused_row_wise", "fused_table_wise", "table_wise", "row_wise"]
)
def test_torch_alone_loads_a_checkpoint(cluster_2: Cluster, tmp_path: Path, sharding: str) -> None:
    want = cluster_2.run(train_and_save, "fused_row_wise", 2, str(tmp_path / "it"), {})[0]
    equal(cluster_2.run(load_plainly, sharding, 2, str(tmp_path / "it"))[0], want)


@pytest.mark.parametrize("sharding", STOCK)
def test_a_checkpoint_of_torch_alone_is_loaded(
    cluster_2: Cluster, tmp_path: Path, sharding: str
) -> None:
    want = cluster_2.run(save_plainly, sharding, 2, str(tmp_path))[0]
    (got, converted), *_ = cluster_2.run(
        load_and_save, "fused_row_wise", 2, str(tmp_path), None, {}
    )
    for name, weight in want[0].items():
        assert torch.equal(got[0][name], weight)
    assert bool(converted) == (sharding in ("column_wise", "data_parallel"))
    if sharding != "column_wise":
        equal(got, want)
        return
    for table in case_of(sharding, 2).tables:
        # Of each column shard the mean of squares of its own columns: all are four wide.
        of_shards = want[1][table.name].view(-1, table.rows)
        assert of_shards.size(0) == table.dim // 4
        torch.testing.assert_close(
            got[1][table.name], of_shards.mean(0), rtol=1e-6, atol=0, check_dtype=False
        )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharding", ["fused_row_wise", *OWNER_POOLED, *STOCK])
def test_converted_checkpoints_are_what_the_sharding_would_have_written(
    clusters: Clusters, tmp_path: Path, sharding: str, ranks: int
) -> None:
    want = clusters(2).run(train_and_save, "fused_row_wise", 2, str(tmp_path / "it"), {})[0]
    contents = Contents(tmp_path / "it")
    if sharding == "column_wise":  # the test's models have shards of four columns
        clusters(ranks).run(train_and_save, sharding, ranks, str(tmp_path / "planned"), {})
        plan, _ = read_plan(tmp_path / "planned" / "plan.yaml")
    else:
        plan = plan_for(contents, ranks, sharding)
    convert(contents, tmp_path / "other", plan)
    assert verify(tmp_path / "other") == []
    got = clusters(ranks).run(load_plainly, sharding, ranks, str(tmp_path / "other"))[0]
    for name, weight in want[0].items():
        assert torch.equal(got[0][name], weight)
    back = tmp_path / "back"
    converted = Contents(tmp_path / "other")
    convert(converted, back, plan_for(converted, 2, "fused_row_wise"))
    equal(clusters(2).run(load_plainly, "fused_row_wise", 2, str(back))[0], want)


def other_layout(folder: str) -> Numbers:
    """Other row ranges and other buckets than those that wrote the checkpoint."""
    case = case_of("fused_row_wise", 2)
    a, b, c, d = case.tables
    other = dataclasses.replace(
        case,
        tables=(
            dataclasses.replace(d, rows_per_rank=(0, 41)),
            dataclasses.replace(b, rows_per_rank=(30, 3)),
            dataclasses.replace(a, rows_per_rank=(1, 49), hot=(0, 1, 49)),
            dataclasses.replace(c, sharding="table_wise"),
        ),
    )
    model, optimizer = trained(other, steps=2)
    load_checkpoint(folder, model, optimizer)
    return whole_weights(other, model), whole_states(other, optimizer)


def test_other_buckets_ranges_and_hot_rows(cluster_2: Cluster, tmp_path: Path) -> None:
    want = cluster_2.run(train_and_save, "fused_row_wise", 2, str(tmp_path / "it"), {})[0]
    equal(cluster_2.run(other_layout, str(tmp_path / "it"))[0], want)


def dtensor_model(case: Case) -> DistributedModelParallel:
    """State dicts of DTensors, if the environment asks for them."""
    made: list[ShardingEnv] = []
    original = ShardingEnv.from_process_group

    def with_dtensor(group: dist.ProcessGroup) -> ShardingEnv:
        env = original(group)
        env.output_dtensor = True
        env.device_mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        made.append(env)
        return env

    ShardingEnv.from_process_group = with_dtensor
    try:
        return sharded(case)
    finally:
        ShardingEnv.from_process_group = original
        assert made


def through_dtensors(folder: str, sharding: str) -> tuple[Numbers, Numbers, Numbers, bool]:
    case = case_of(sharding, 2)
    model = dtensor_model(case)
    optimizer = optimizer_of(case, model)
    for step in range(3):
        train_step(case, model, step, optimizer)
    is_dtensor = all(isinstance(v, DTensor) for v in model.state_dict().values())
    want = whole_weights(case, model), whole_states(case, optimizer)
    save_checkpoint(f"{folder}/of_dtensors", model, optimizer)
    plain, plain_optimizer = trained(case, steps=1)
    load_checkpoint(f"{folder}/of_dtensors", plain, plain_optimizer)
    first = whole_weights(case, plain), whole_states(case, plain_optimizer)
    save_checkpoint(f"{folder}/of_shards", plain, plain_optimizer)
    train_step(case, model, 5, optimizer)
    load_checkpoint(f"{folder}/of_shards", model, optimizer)
    return want, first, (whole_weights(case, model), whole_states(case, optimizer)), is_dtensor


def described(value: Any) -> Any:
    """Names, shapes, types and placement of a state dict, without the numbers."""
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        parts = [(tuple(o), tuple(s)) for o, s in zip(
            local.local_offsets(), local.local_sizes(), strict=True
        )]  # fmt: skip
        return tuple(value.size()), value.dtype, str(value.placements), parts
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return value if not isinstance(value, torch.Tensor) else (tuple(value.shape), value.dtype)


def same_as(stock_sharding: str) -> None:
    ours, stock = (dtensor_model(case_of(f"{s}{stock_sharding}", 2)) for s in ("fused_", ""))
    assert described(ours.state_dict()) == described(stock.state_dict())
    got, want = (m.fused_optimizer.state_dict()["state"] for m in (ours, stock))
    assert described(got) == described(want) and got


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_dtensors_are_those_of_stock_tables(cluster_2: Cluster, sharding: str) -> None:
    cluster_2.run(same_as, sharding)


@pytest.mark.parametrize("sharding", ["fused_row_wise", *OWNER_POOLED])
def test_dtensors_and_sharded_tensors(cluster_2: Cluster, tmp_path: Path, sharding: str) -> None:
    want, first, second, is_dtensor = cluster_2.run(through_dtensors, str(tmp_path), sharding)[0]
    assert is_dtensor
    equal(first, want)
    equal(second, want)


def save_with_hot_rows(folder: str) -> None:
    tables = (Table("a", 50, hot=(3, 5, 40)), Table("b", 33))
    model = sharded(Case(tables=tables, batch_sizes=(5, 5), optimizer="adagrad"))
    save_checkpoint(folder, model, model.fused_optimizer)


def test_a_conversion_keeps_the_hot_rows(cluster_2: Cluster, tmp_path: Path) -> None:
    cluster_2.run(save_with_hot_rows, str(tmp_path / "it"))
    assert (
        main(["checkpoint", "convert", str(tmp_path / "it"), str(tmp_path / "new"), "--quiet"]) == 0
    )
    manifest = read_manifest(tmp_path / "new")
    assert manifest is not None and manifest.hot_rows is not None
    found = HotSet.load(tmp_path / "new" / manifest.hot_rows)
    assert found.ids["a"].tolist() == [3, 5, 40]
    assert manifest.tables["a"].hot_rows == 3


class Named(nn.Module):
    """A model whose dense part has names like those of tables."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse
        self.embeddings = nn.ModuleDict({"LayerNorm": nn.LayerNorm(8), "words": nn.Embedding(5, 8)})

    def forward(self, features: Any) -> Any:
        return self.sparse(features)


def save_named(folder: str) -> list[str]:
    case = Case(tables=(Table("a", 50),), batch_sizes=(5, 5))
    sharders = fr.fused_sharders()
    module = unsharded(case)
    plan = construct_module_sharding_plan(
        module, {"a": fr.fused_row_wise()}, sharder=sharders[0], local_size=2, world_size=2,
        device_type="cpu",
    )  # fmt: skip
    model = parallel(Named(module), ShardingPlan({"sparse": plan}), sharders)
    save_checkpoint(folder, model)
    load_checkpoint(folder, model)
    return list(Contents(Path(folder)).tables)


def test_dense_parts_with_names_of_tables(cluster_2: Cluster, tmp_path: Path) -> None:
    assert cluster_2.run(save_named, str(tmp_path / "it")) == [["a"], ["a"]]


def save_something_else(folder: str) -> str:
    model = sharded(Case(tables=(Table("a", 50),), batch_sizes=(5, 5)))
    files: Any = {"name": b"no text"}
    try:
        save_checkpoint(folder, model, files=files)
    except SaveError as error:
        return str(error)
    return ""


def test_any_error_of_one_rank_while_saving_is_one_of_all(
    cluster_2: Cluster, tmp_path: Path
) -> None:
    first, second = cluster_2.run(save_something_else, str(tmp_path / "it"))
    assert first == second and "could not be saved" in first
    assert not list(tmp_path.iterdir())
