"""What TorchRec 1.9 has and 1.8 has not, beside fused tables."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingEnv
from torchrec.modules import embedding_modules
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.save import save_checkpoint
from tests.case import Case, Table, batch, outputs_by_name, sharded, unsharded
from tests.checkpoint.models import optimizer_of, whole_weights
from tests.cluster import Cluster
from tests.parity import train_step

SEQUENCES = Case(tables=(Table("a", 50), Table("b", 30)), batch_sizes=(6, 4), kind="ec")
BAGS = Case(tables=(Table("c", 50), Table("d", 30, dim=16)), batch_sizes=(6, 4))


class TwoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prioritized = PECEmbeddingCollection(unsharded(SEQUENCES, "cpu"))
        self.bags = unsharded(BAGS, "cpu")

    def forward(
        self, sequences: KeyedJaggedTensor, bags: KeyedJaggedTensor
    ) -> dict[str, torch.Tensor]:
        return outputs_by_name(self.prioritized(sequences)) | outputs_by_name(self.bags(bags))


def plan_and_look_up() -> dict[str, str]:
    """The sharding type of each table; what is looked up is checked here."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    batches = batch(SEQUENCES, 0, rank), batch(BAGS, 0, rank)
    want = TwoModules()(*batches)
    model, sharders = TwoModules(), fr.fused_sharders()
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    plan = fr.FusedShardingPlanner(topology).collective_plan(model, sharders, group)
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        plan=plan,
        sharders=sharders,
        device=torch.device("cpu"),
        init_parameters=False,
    )
    parallel.load_state_dict(TwoModules().state_dict())
    got = parallel(*batches)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)
    torch.cat([value.flatten() for value in got.values()]).sum().backward()
    return {
        name: str(sharding.sharding_type)
        for of_module in plan.plan.values()
        for name, sharding in of_module.items()
    }


@pytest.mark.skipif(
    not any("PEC" in type(sharder).__name__ for sharder in get_default_sharders()),
    reason="since TorchRec 1.9",
)
def test_prioritized_embeddings_stay_stock_beside_fused_tables(cluster_2: Cluster) -> None:
    stock = {"a": "row_wise", "b": "row_wise"}
    fused = {"c": "fused_row_wise", "d": "fused_row_wise"}
    assert cluster_2.run(plan_and_look_up) == [stock | fused] * 2


def marked(case: Case) -> nn.Module:
    module = unsharded(case)
    embedding_modules.mark_data_parallel_skip_grad_sync(module)
    return module


def train_without_gradient_sync(case: Case, folder: str) -> None:
    with patch("tests.case.unsharded", marked):
        model, other = sharded(case), sharded(case)
    lookups = model.module.sparse._lookups
    assert not any(isinstance(lookup, DistributedDataParallel) for lookup in lookups)
    optimizer = optimizer_of(case, model)
    before = whole_weights(case, model)
    train_step(case, model, 0)
    after = whole_weights(case, model)
    assert not torch.equal(after["a"], before["a"])
    assert torch.equal(after["b"], before["b"])  # nobody trains it: that is what the mark is for
    save_checkpoint(folder, model, optimizer)
    load_checkpoint(folder, other, optimizer_of(case, other))
    for name, weight in whole_weights(case, other).items():
        assert torch.equal(weight, after[name]), name


@pytest.mark.skipif(
    not hasattr(embedding_modules, "mark_data_parallel_skip_grad_sync"),
    reason="since TorchRec 1.9",
)
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_data_parallel_tables_need_not_be_wrapped(
    cluster_2: Cluster, tmp_path: Path, kind: str
) -> None:
    tables = (Table("a", 50), Table("b", 9, sharding="data_parallel"))
    case = Case(tables=tables, batch_sizes=(6, 4), kind=kind)
    cluster_2.run(train_without_gradient_sync, case, str(tmp_path / "it"))
