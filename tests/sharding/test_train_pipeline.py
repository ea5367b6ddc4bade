"""Rows that arrive early change nothing: outputs, weights and optimizer state, bit for bit."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.collective_counter import Collective, CollectiveCounter
from tests.case import Case, Table, batch
from tests.cluster import Cluster
from tests.parity import local_parts
from tests.sharding.modules.test_pipelines import (
    MIX,
    STEPS,
    TABLES,
    Batch,
    batches,
    build,
    plain_loop,
    snapshot,
)

CPU = torch.device("cpu")
FUSED = TABLES[:2]
OWNERS_POOL = (
    Table("a", 400, dim=8, pooling="mean", sharding="fused_table_wise"),
    Table("d", 300, dim=16, sharding="fused_column_wise"),
)
HOT = (Table("a", 50, hot=(0, 1, 7)), TABLES[1])
FLOATS: dict[str, Any] = {"integers": False, "optimizer": "rowwise_adagrad"}
ADAPTING = fr.HotOptions(adapt=fr.AdaptOptions(every=3, sample=1))
SCALED = fr.CodecOptions(type="fp16", loss_scale=2.0)


def coded(forward: fr.CodecOptions) -> fr.Codecs:
    return fr.Codecs(forward=forward, backward=fr.CodecOptions())


EARLY = {
    "ebc": Case(FUSED, (6, 4), **FLOATS),
    "adagrad": Case(FUSED, (6, 4), integers=False, optimizer="adagrad"),
    "one dim": Case((Table("a", 50, 16), Table("b", 33, 16)), (6, 4), integers=False),
    "weighted": Case(FUSED, (6, 4), weighted=True, **FLOATS),
    "stock beside": Case(TABLES, (6, 6), **FLOATS),
    "owners pool beside": Case(MIX, (6, 4), repeated=True, **FLOATS),
    "owners pool": Case(OWNERS_POOL, (6, 4), **FLOATS),
    "owners pool with weights": Case(OWNERS_POOL, (6, 4), weighted=True, **FLOATS),
    "owners pool variable batches": Case(OWNERS_POOL, (6, 4), vbe=True, **FLOATS),
    "ec": Case((Table("a", 50), Table("b", 33)), (6, 4), kind="ec", **FLOATS),
    "stock beside ec": Case(
        (Table("a", 50), Table("b", 33, sharding="table_wise")), (6, 6), kind="ec", **FLOATS
    ),
    "fp_ebc": Case(tuple(Table(t.name, t.rows, t.dim) for t in FUSED), (6, 4), "fp_ebc", **FLOATS),
    "vbe": Case(FUSED, (6, 4), vbe=True, **FLOATS),
    "no samples on a rank": Case(FUSED, (6, 0), **FLOATS),
    "exact counts": Case(FUSED, (6, 4), input_dist="exact_counts", **FLOATS),
    "fp16 rows": Case(
        tuple(Table(t.name, t.rows, t.dim, dtype="fp16") for t in FUSED), (6, 4), **FLOATS
    ),
    "fp16 output": Case(FUSED, (6, 4), output_dtype="fp16", integers=False),
    "frozen": Case((Table("a", 50, frozen=True), TABLES[1]), (6, 4), **FLOATS),
    "hot": Case(HOT, (6, 4), **FLOATS),
    "hot batches": Case(HOT, (6, 4), hot_options=fr.HotOptions(hot_batches=True), **FLOATS),
    "adapting": Case(HOT, (6, 4), hot_options=ADAPTING, **FLOATS),
    "bf16": Case(FUSED, (6, 4), codecs=coded(fr.CodecOptions(type="bf16")), **FLOATS),
    "fp16 with a scale": Case(FUSED, (6, 4), codecs=coded(SCALED), **FLOATS),
}
LATE = {
    "fp16": Case(FUSED, (6, 4), codecs=coded(fr.CodecOptions(type="fp16")), **FLOATS),
    "int8": Case(FUSED, (6, 4), codecs=coded(fr.CodecOptions(type="int8")), **FLOATS),
    "dct": Case(FUSED, (6, 4), codecs=coded(fr.CodecOptions(type="dct", density=0.5)), **FLOATS),
}


def early(model: DistributedModelParallel, **settings: Any) -> fr.FusedTrainPipeline[Any, Any]:
    return fr.FusedTrainPipeline(model, model.fused_optimizer, CPU, **settings)


def stock(model: DistributedModelParallel) -> TrainPipelineSparseDist[Any, Any]:
    return TrainPipelineSparseDist(model, model.fused_optimizer, CPU)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Also of zeros, which have a sign."""
    got_bits, want_bits = (x.flatten().contiguous().view(torch.uint8) for x in (got, want))
    return got.shape == want.shape and torch.equal(got_bits, want_bits)


def all_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want) > 1
    for one, other in zip(got, want, strict=True):
        assert same_bits(one, other)


def to_the_end(pipeline: Any, iterator: Iterator[Batch]) -> list[torch.Tensor]:
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs


def compare(case: Case, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns how many rows came, and how many of them early, of each module."""
    want_outputs, want_states = plain_loop(case)
    model = build(case)
    pipeline = early(model, **settings)
    all_same(to_the_end(pipeline, batches(case)), want_outputs)
    all_same(snapshot(model), want_states)
    return [(count.rows, count.early) for count in pipeline.early_rows]


@pytest.mark.parametrize("name", EARLY)
def test_early_rows_change_nothing(cluster_2: Cluster, name: str) -> None:
    for ((rows, rows_early),) in cluster_2.run(compare, EARLY[name], {}):
        if name != "no samples on a rank":
            assert 0 < rows_early < rows


@pytest.mark.parametrize("name", LATE)
def test_rows_that_must_not_be_early_are_late(cluster_2: Cluster, name: str) -> None:
    assert cluster_2.run(compare, LATE[name], {}) == [[], []]


@pytest.mark.parametrize("name", ["ebc", "stock beside", "ec", "hot", "owners pool beside"])
def test_four_ranks(cluster_4: Cluster, name: str) -> None:
    case = EARLY[name]
    tables = tuple(dataclasses.replace(table, rows=8 * table.rows) for table in case.tables)
    sizes = (5,) * 4 if name == "stock beside" else (6, 0, 3, 5)
    case = dataclasses.replace(case, tables=tables, batch_sizes=sizes)
    for ((rows, rows_early),) in cluster_4.run(compare, case, {}):
        assert rows == 0 or 0 < rows_early < rows


@pytest.mark.parametrize("world_size", [1, 3])
def test_numbers_of_ranks_that_divide_otherwise(clusters: Any, world_size: int) -> None:
    case = dataclasses.replace(EARLY["ebc"], batch_sizes=(6, 4, 5)[:world_size])
    for ((rows, rows_early),) in clusters(world_size).run(compare, case, {}):
        assert (rows, rows_early) == (0, 0) if world_size == 1 else 0 < rows_early < rows


def test_batches_may_be_read_after_the_forward_pass(cluster_2: Cluster) -> None:
    for ((_, rows_early),) in cluster_2.run(
        compare, EARLY["ebc"], {"enqueue_batch_after_forward": True}
    ):
        assert rows_early


# ---------------------------------------------------------------- between two steps


def in_between(
    case: Case,
    make: Callable[[DistributedModelParallel], Any],
    event: Callable[[Case, DistributedModelParallel, Any], None],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Collective]]:
    """Trains with a pipeline; something happens after the third step and after the fifth."""
    model = build(case)
    pipeline, iterator = make(model), batches(case)
    outputs = []
    with CollectiveCounter() as counter:
        for step in range(STEPS):
            if step in (3, 5):
                event(case, model, pipeline)
            outputs.append(pipeline.progress(iterator))
    return outputs, snapshot(model), counter.collectives


def evaluate(case: Case, model: DistributedModelParallel, pipeline: Any) -> None:
    """Evaluates with gradients enabled, which nobody asks for and which train nothing."""
    pipeline.detach()
    model.eval()
    evaluation = EvalPipelineSparseDist(model, model.fused_optimizer, CPU)
    held_out = batches(case)
    for _ in range(3):
        evaluation.progress(held_out)
    evaluation.detach()
    model.train()


def save(case: Case, model: DistributedModelParallel, pipeline: Any) -> None:
    assert snapshot(model)


def load(case: Case, model: DistributedModelParallel, pipeline: Any) -> None:
    """Other weights, in a state dict."""
    state = model.state_dict()
    for value in state.values():
        for _, part in local_parts(value):
            part.detach().mul_(0.5).sub_(dist.get_rank() / 8)
    model.load_state_dict(state)


def change_rate(case: Case, model: DistributedModelParallel, pipeline: Any) -> None:
    for group in model.fused_optimizer.param_groups:
        group["lr"] *= 0.5


def train_otherwise(case: Case, model: DistributedModelParallel, pipeline: Any) -> None:
    """Batches in the plain way, which update rows that were sent already."""
    pipeline.detach()
    for item in islice(batches(case), 4):
        model.fused_optimizer.zero_grad()
        loss, _ = model(item)
        loss.backward()
        model.fused_optimizer.step()


EVENTS = (evaluate, save, load, change_rate, train_otherwise)
KEEP = (evaluate, save, change_rate)


def same_in_between(case: Case, event: Any) -> tuple[list[Collective], list[Collective]]:
    want_outputs, want_states, want_collectives = in_between(case, stock, event)
    outputs, states, collectives = in_between(case, early, event)
    all_same(outputs, want_outputs)
    all_same(states, want_states)
    return collectives, want_collectives


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", ["ebc", "ec", "hot", "owners pool"])
def test_what_happens_between_steps(cluster_2: Cluster, name: str, event: Any) -> None:
    for got, want in cluster_2.run(same_in_between, EARLY[name], event):
        bits = sum(c.bytes_sent for c in got if c.dtype == torch.uint8)
        assert bits > 0
        more = sum(c.bytes_sent for c in got) - sum(c.bytes_sent for c in want) - bits
        # Early rows that are thrown away have travelled in vain.
        assert (more == 0) if event in KEEP else (more > 0)


# ---------------------------------------------------------------- what travels


def asked(case: Case, step: int) -> dict[tuple[int, int], set[tuple[str, int]]]:
    """Returns rows that each rank asks of each owner: by (requester, owner), by hand."""
    ranks = dist.get_world_size()
    rows: dict[tuple[int, int], set[tuple[str, int]]] = {
        (r, o): set() for r in range(ranks) for o in range(ranks)
    }
    for rank in range(ranks):
        features = batch(case, step, rank)
        for table in case.tables:
            for feature in table.feature_names:
                for row in features[feature].values().tolist():
                    rows[rank, row // -(-table.rows // ranks)].add((table.name, row))
    return rows


def bytes_of_steps(case: Case) -> list[tuple[list[tuple[Any, int]], list[int]]]:
    """Returns for each step but the first and the last messages, and their bytes by hand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dims = {table.name: table.dim for table in case.tables}
    model = build(case)
    pipeline, iterator = early(model), batches(case)
    steps, rows_by_hand, early_by_hand, late_now = [], 0, 0, 0
    for step in range(STEPS - 1):
        with CollectiveCounter() as counter:
            pipeline.progress(iterator)
        now, coming = asked(case, step), asked(case, step + 1)
        touched = set().union(*now.values())
        final = {pair: rows - touched for pair, rows in coming.items()}
        others = [other for other in range(ranks) if other != rank]
        bits = sum(-(-len(coming[other, rank]) // 8) for other in others)
        sent = [dims[t] * 4 for other in others for t, _ in final[other, rank]]
        late = [
            dims[t] * 4 for other in others for t, _ in coming[other, rank] - final[other, rank]
        ]
        gradients = [dims[t] * 4 for other in others for t, _ in now[rank, other]]
        if step:
            messages = [(c.dtype, c.bytes_sent) for c in counter.collectives]
            steps.append((messages, [late_now, bits, sum(sent), sum(gradients)]))
        late_now = sum(late)
        rows_by_hand += sum(len(coming[rank, other]) for other in others)
        early_by_hand += sum(len(final[rank, other]) for other in others)
    (count,) = pipeline.early_rows
    assert (count.rows, count.early) == (rows_by_hand, early_by_hand)
    assert 0 < count.early < count.rows
    count.reset()
    assert (count.rows, count.early) == (0, 0)
    return steps


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_more_collectives_and_no_row_twice(clusters: Any, world_size: int) -> None:
    tables = (Table("a", 400, dim=8, features=("f", "g")), Table("b", 300, dim=16))
    case = Case(tables, (12,) * world_size, lengths=(3,), integers=False)
    for steps in clusters(world_size).run(bytes_of_steps, case):
        for messages, by_hand in steps:
            numbers = torch.float32
            others = [message for message in messages if message[0] != torch.int32]
            assert [dtype for dtype, _ in others] == [numbers, torch.uint8, numbers, numbers]
            assert [sent for _, sent in others] == by_hand


# ---------------------------------------------------------------- what goes wrong


def ends(case: Case, steps: list[int], make: Any) -> tuple[int, str]:
    """Returns the number of steps of this rank, and how they ended; afterwards the group works."""
    model = build(case)
    pipeline, done = make(model), 0
    iterator = islice(batches(case), steps[dist.get_rank()])
    try:
        while True:
            pipeline.progress(iterator)
            done += 1
    except StopIteration:
        text = "all done"
    except ValueError as error:
        text = str(error)
    dist.barrier()
    plain_loop(case)
    return done, text


@pytest.mark.parametrize("steps", [[5, 2], [3, 7], [1, 4], [4, 4], [1, 1]])
@pytest.mark.parametrize("name", ["ebc", "stock beside", "ec", "exact counts", "adapting"])
def test_the_end_of_data_is_as_in_torchrecs_pipeline(
    cluster_2: Cluster, name: str, steps: list[int]
) -> None:
    want = cluster_2.run(ends, EARLY[name], steps, stock)
    got = cluster_2.run(ends, EARLY[name], steps, early)
    assert got == want
    assert got[0] == got[1]
    assert ("ran out of batches" in got[0][1]) == (steps[0] != steps[1])


def bad_batch(case: Case, make: Any) -> tuple[int, str]:
    """One rank has an id that is out of range, in the fifth batch."""

    def with_one_bad() -> Iterator[Batch]:
        for step, item in enumerate(batches(case)):
            if step == 4 and dist.get_rank() == 1:
                values = item.features.values()
                first = sum(item.features.length_per_key()[: item.features.keys().index("f_a")])
                values[first] = 10**6
            yield item

    model = build(case)
    pipeline, iterator, done = make(model), with_one_bad(), 0
    try:
        while True:
            pipeline.progress(iterator)
            done += 1
    except ValueError as error:
        text = str(error)
    dist.barrier()
    plain_loop(case)
    return done, text


@pytest.mark.parametrize("name", ["ebc", "ec", "hot"])
def test_bad_input_is_as_in_torchrecs_pipeline(cluster_2: Cluster, name: str) -> None:
    want = cluster_2.run(bad_batch, EARLY[name], stock)
    got = cluster_2.run(bad_batch, EARLY[name], early)
    assert got == want
    assert got[0] == got[1]
    assert got[0][1].startswith("bad input on rank 1: feature 'f_a' of table 'a': id 1000000 ")


def epochs(case: Case) -> None:
    """One pipeline, several times through the data, and an evaluation by the same pipeline."""
    runs = []
    for make in (stock, early):
        model = build(case)
        pipeline, outputs = make(model), []
        for steps, training in ((5, True), (3, False), (1, True), (4, True)):
            model.train(training)
            outputs += to_the_end(pipeline, islice(batches(case), steps))
        runs.append((outputs, snapshot(model)))
    for want, got in zip(*runs, strict=True):
        all_same(got, want)


@pytest.mark.parametrize("name", ["ebc", "ec", "adapting"])
def test_several_epochs_with_one_pipeline(cluster_2: Cluster, name: str) -> None:
    cluster_2.run(epochs, EARLY[name])
