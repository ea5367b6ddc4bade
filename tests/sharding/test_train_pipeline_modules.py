"""Rows that arrive early, and gradients that are awaited late, in models of several modules."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import fusedrec_torchrec as fr
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import local_parts
from tests.sharding.modules.test_pipelines import STEPS, Batch, batches, squares
from tests.sharding.test_train_pipeline import all_same

CPU = torch.device("cpu")
torch.fx.wrap("squares")


class Several(nn.Module):
    """Two collections that are pooled and one that is not, between layers of a dense part."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.bottom = nn.Linear(1, 1)
        self.first = EmbeddingBagCollection([pooled("a", 50, 8)], device=meta)
        self.second = EmbeddingBagCollection([pooled("b", 33, 16), pooled("c", 40, 8)], device=meta)
        rows = EmbeddingConfig(name="d", num_embeddings=60, embedding_dim=8, feature_names=["f_d"])
        self.rows = EmbeddingCollection([rows], device=meta)
        self.over = nn.Linear(4, 1)

    def forward(self, item: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        bottom = self.bottom(torch.ones(1, 1)).sum()
        first = squares(self.first(item.features)).mean()
        second = squares(self.second(item.features)).mean()
        third = squares(self.rows(item.features)).mean()
        loss = self.over(torch.stack([bottom, first, second, third])).square().sum()
        return loss, loss.detach()


class Unused(Several):
    """No gradient comes back to one of the collections."""

    def forward(self, item: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        bottom = self.bottom(torch.ones(1, 1)).sum()
        first = squares(self.first(item.features)).mean()
        second = squares(self.second(item.features)).mean().detach()
        third = squares(self.rows(item.features)).mean()
        loss = self.over(torch.stack([bottom, first, second, third])).square().sum()
        return loss, loss.detach()


def pooled(name: str, rows: int, dim: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
    )


def several(kind: type[Several]) -> tuple[DistributedModelParallel, KeyedOptimizer]:
    """The model, sharded, and the optimizer of all its parameters."""
    torch.manual_seed(0)
    model = kind()
    sharders = fr.fused_sharders({"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.5})
    by_type = {sharder.module_type: sharder for sharder in sharders}
    plan = {}
    for path, tables in (("first", "a"), ("second", "bc"), ("rows", "d")):
        module = getattr(model, path)
        plan[path] = construct_module_sharding_plan(
            module,
            {table: fr.fused_row_wise() for table in tables},
            by_type[type(module)],
            device_type="cpu",
        )
    parallel = DistributedModelParallel(
        model, plan=ShardingPlan(plan), sharders=sharders, device=CPU
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


SEVERAL = Case(tuple(Table(t, n) for t, n in zip("abcd", (50, 33, 40, 60), strict=True)), (6, 4))


def train_several(kind: type[Several]) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the number of all-to-alls in steps, and of each module rows and early ones."""
    runs = []
    for pipeline_type in (TrainPipelineSparseDist, fr.FusedTrainPipeline):
        model, optimizer = several(kind)
        pipeline: Any = pipeline_type(model, optimizer, CPU)
        iterator, outputs, counts = batches(SEVERAL), [], []
        for _ in range(STEPS):
            with CollectiveCounter() as counter:
                outputs.append(pipeline.progress(iterator))
            counts.append(sum(c.name == "all_to_all" for c in counter.collectives))
        runs.append((outputs, states_of(model)))
    (want_outputs, want_states), (outputs, states) = runs
    all_same(outputs, want_outputs)
    all_same(states, want_states)
    return counts, [(count.rows, count.early) for count in pipeline.early_rows]


def states_of(model: DistributedModelParallel) -> list[torch.Tensor]:
    """This rank's part of weights and of the tables' optimizer state."""
    of_tables = model.fused_optimizer.state_dict()["state"].values()
    values = [*model.state_dict().values(), *(v for state in of_tables for v in state.values())]
    return [part.clone() for value in values for _, part in local_parts(value)]


def test_modules_have_early_rows_of_their_own(cluster_2: Cluster) -> None:
    for counts, modules in cluster_2.run(train_several, Several):
        assert len(modules) == 3
        assert all(0 < rows_early < rows for rows, rows_early in modules)
        # Ids, late rows, bits, early rows, gradients; the last step says that it is one.
        assert counts[3:] == [15] * (STEPS - 4) + [9]


def test_a_module_that_gets_no_gradient_is_left_alone(cluster_2: Cluster) -> None:
    for counts, _ in cluster_2.run(train_several, Unused):
        assert counts[3:] == [14] * (STEPS - 4) + [8]


def order_in_backward(early: bool) -> list[str]:
    """Returns in which order things happen in a step: layers get gradients, and so do lookups."""
    model, optimizer = several(Several)
    log: list[str] = []
    for name, parameter in model.named_parameters():
        if name in ("bottom.weight", "over.weight"):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
    for lookup in lookups_of(model):
        lookup.register_forward_hook(
            lambda _module, _inputs, rows: rows.register_hook(lambda _: log.append("rows")) and None
        )
    pipeline: Any = (fr.FusedTrainPipeline if early else TrainPipelineSparseDist)(
        model, optimizer, CPU
    )
    pipeline.progress(batches(SEVERAL))
    return log


@pytest.mark.parametrize("early", [False, True])
def test_gradients_are_awaited_when_the_dense_part_is_done(cluster_2: Cluster, early: bool) -> None:
    dense, rows = ["over.weight", "bottom.weight"], ["rows"] * 3
    want = [*dense, *rows] if early else [dense[0], *rows, dense[1]]
    assert cluster_2.run(order_in_backward, early) == [want] * 2
