"""TorchRec's training pipelines give what the plain loop gives, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.case import Case, Table, batch, local_device, outputs_by_name, sharded
from tests.cluster import Cluster
from tests.parity import local_parts, optimizer_states, same_sums, within_roundings

TABLES = (
    Table("a", 50, dim=8, pooling="mean"),
    Table("b", 33, dim=16),
    Table("c", 20, dim=8, sharding="table_wise"),
)
MIX = (
    TABLES[1],
    Table("a", 50, dim=8, pooling="mean", sharding="fused_table_wise"),
    Table("d", 40, dim=16, sharding="fused_column_wise"),
)
STEPS = 8


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)

    def pin_memory(self) -> "Batch":
        return self


@torch.fx.wrap
def squares(output: Any) -> torch.Tensor:
    """All outputs of a module, squared; the pipelines trace models, so this is one leaf."""
    outputs = outputs_by_name(output)
    return torch.cat([value.flatten() for _, value in sorted(outputs.items())]) ** 2


class LossOf(nn.Module):
    """The wrapped model with a loss that is not linear, so that the order of updates matters."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        values = squares(self.sparse(batch.features))
        return values.mean(), values.detach()


def build(case: Case) -> DistributedModelParallel:
    model = sharded(case)
    inner = model._dmp_wrapped_module
    while not hasattr(inner, "sparse"):
        inner = inner.module
    model._dmp_wrapped_module = LossOf(inner.sparse)
    return model


def batches(case: Case) -> Iterator[Batch]:
    for step in range(STEPS):
        yield Batch(batch(case, step, dist.get_rank()))


def on_device(case: Case) -> Iterator[Batch]:
    return (item.to(local_device(case)) for item in batches(case))


def snapshot(model: DistributedModelParallel) -> list[torch.Tensor]:
    states = [*model.state_dict().values(), *optimizer_states(model).values()]
    return [part.clone() for value in states for _, part in local_parts(value)]


def plain_loop(case: Case, steps: int = STEPS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = build(case)
    outputs = []
    for item in islice(on_device(case), steps):
        model.fused_optimizer.zero_grad()
        loss, output = model(item)
        loss.backward()
        model.fused_optimizer.step()
        outputs.append(output)
    return outputs, snapshot(model)


def pipelined(case: Case, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = build(case)
    pipeline: Any = getattr(train_pipelines, name)(model, model.fused_optimizer, local_device(case))
    iterator = batches(case)
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs, snapshot(model)


def interrupted(case: Case) -> None:
    """A pipeline is detached for an evaluation in the midst of an epoch, and attached again."""
    device, (want, _), (_, want_states) = local_device(case), plain_loop(case), plain_loop(case)
    model = build(case)
    training = train_pipelines.TrainPipelineSparseDist(model, model.fused_optimizer, device)
    iterator = batches(case)
    outputs = [training.progress(iterator) for _ in range(3)]
    training.detach()
    model.eval()
    evaluation = train_pipelines.EvalPipelineSparseDist(model, model.fused_optimizer, device)
    held_out = batches(case)
    for _ in range(STEPS):
        evaluation.progress(held_out)
    evaluation.detach()
    model.train()
    outputs += [training.progress(iterator) for _ in range(3, STEPS)]
    for got, expected in zip(outputs, want, strict=True):
        same_sums(got, expected)
    for got, expected in zip(snapshot(model), want_states, strict=True):
        same_sums(got, expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(TABLES[:2], (6, 4)),
        Case(TABLES, (6, 6)),  # stock tables forget the batch sizes of other ranks there
        Case(TABLES[:2], (6, 4), vbe=True),
        Case((Table("a", 50), Table("b", 33)), (6, 4), kind="ec"),
        Case(MIX, (6, 4), repeated=True),
        Case((Table("a", 50, hot=(0, 1, 7)), TABLES[1]), (6, 4)),
    ],
    ids=["ebc", "stock", "vbe", "ec", "mix", "hot"],
)
def test_a_pipeline_can_be_interrupted_by_an_evaluation(cluster_2: Cluster, case: Case) -> None:
    cluster_2.run(interrupted, case)


def compare(case: Case, name: str) -> None:
    want_outputs, want_states = plain_loop(case)
    got_outputs, got_states = pipelined(case, name)
    assert len(got_outputs) == STEPS
    for got, want in zip(got_outputs, want_outputs, strict=True):
        same_sums(got, want)
    assert len(want_states) > 3
    for got, want in zip(got_states, want_states, strict=True):
        same_sums(got, want)


def one_step_less(case: Case) -> None:
    """What is off by one update is off by more than roundings: the bound for GPUs notices it."""
    (_, states), (_, fewer) = plain_loop(case), plain_loop(case, steps=STEPS - 1)
    with pytest.raises(AssertionError, match="not close"):
        within_roundings(
            *(torch.cat([part.flatten() for part in all_]) for all_ in (fewer, states))
        )


@pytest.mark.parametrize("kind", ["ebc", "ec", "mix"])
def test_the_bound_for_gpus_notices_an_update_that_is_missing(
    cluster_2: Cluster, kind: str
) -> None:
    cluster_2.run(one_step_less, case_of(kind))


def evaluate(case: Case) -> None:
    """EvalPipelineSparseDist: outputs as in the plain loop without training, and no update."""
    model = build(case).eval()
    before = snapshot(model)
    with torch.no_grad():
        want = [model(item)[1] for item in on_device(case)]
    pipeline: Any = train_pipelines.EvalPipelineSparseDist(
        model, model.fused_optimizer, local_device(case)
    )
    iterator, got = batches(case), []
    while True:
        try:
            got.append(pipeline.progress(iterator))
        except StopIteration:
            break
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True))


def case_of(kind: str) -> Case:
    if kind == "mix":
        return Case((*MIX, TABLES[2]), (6, 6), optimizer="adagrad", integers=False, repeated=True)
    tables = (
        TABLES
        if kind == "ebc"
        else tuple(Table(t.name, t.rows, t.dim) for t in TABLES)
        if kind == "fp_ebc"
        else tuple(Table(t.name, t.rows, sharding=t.sharding) for t in TABLES)
    )
    return Case(
        tables=tables, batch_sizes=(6, 6), kind=kind, optimizer="rowwise_adagrad", integers=False
    )


# TorchRec's other pipelines do not run on CPU, with stock shardings neither.
@pytest.mark.parametrize(
    "name", ["TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"]
)
@pytest.mark.parametrize("kind", ["ebc", "ec", "fp_ebc", "mix"])
def test_pipeline_equals_plain_loop(cluster_2: Cluster, name: str, kind: str) -> None:
    cluster_2.run(compare, case_of(kind), name)


@pytest.mark.parametrize("kind", ["ebc", "ec", "mix"])
def test_eval_pipeline_equals_plain_loop_and_updates_nothing(cluster_2: Cluster, kind: str) -> None:
    cluster_2.run(evaluate, case_of(kind))


def bad_batch_in_pipeline(case: Case, name: str) -> tuple[int, str]:
    """Returns the number of steps before the error, and its text; trains on afterwards."""
    model = build(case)
    pipeline: Any = getattr(train_pipelines, name)(model, model.fused_optimizer, local_device(case))

    def with_one_bad() -> Iterator[Batch]:
        for step, item in enumerate(batches(case)):
            if step == 4 and dist.get_rank() == 1:
                values = item.features.values()
                first = sum(item.features.length_per_key()[: item.features.keys().index("f_a")])
                values[first] = 10**6
            yield item

    iterator, steps = with_one_bad(), 0
    try:
        while True:
            pipeline.progress(iterator)
            steps += 1
    except ValueError as error:
        text = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    plain_loop(case)
    return steps, text


@pytest.mark.parametrize(
    "name", ["TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"]
)
@pytest.mark.parametrize("kind", ["ebc", "ec", "mix"])
def test_bad_batch_raises_the_same_error_on_all_ranks(
    cluster_2: Cluster, name: str, kind: str
) -> None:
    (steps_0, text_0), (steps_1, text_1) = cluster_2.run(bad_batch_in_pipeline, case_of(kind), name)
    assert steps_0 == steps_1 <= 4
    assert text_0 == text_1
    assert text_0.startswith("bad input on rank 1: feature 'f_a' of table 'a': id 1000000 ")
