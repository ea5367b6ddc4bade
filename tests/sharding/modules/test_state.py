"""State dicts, optimizers, learning rates, evaluation: as with TorchRec's own shardings."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import fusedrec_torchrec as fr
from tests.case import (
    Case,
    Table,
    Wrapper,
    batch,
    initial_weight,
    outputs_by_name,
    parallel,
    prefix,
    sharded,
    unsharded,
)
from tests.cluster import Cluster
from tests.parity import check, local_parts, optimizer_states, train_step
from tests.reference import unsharded_run

TABLES = (Table("a", 50, dim=8), Table("b", 33, dim=16, pooling="mean"), Table("c", 20, dim=8))


def case_of(kind: str = "ebc", **kwargs: Any) -> Case:
    tables = TABLES if kind == "ebc" else tuple(Table(t.name, t.rows) for t in TABLES)
    return Case(tables=tables, batch_sizes=(5, 5), kind=kind, **kwargs)


def metadata(state: Any) -> Any:
    """Names, shapes, types and placement of a state dict, without the numbers."""
    if isinstance(state, ShardedTensor):
        return [
            (tuple(s.shard_offsets), tuple(s.shard_sizes), str(s.placement))
            for s in state.metadata().shards_metadata
        ], state.dtype
    if isinstance(state, torch.Tensor):
        return tuple(state.shape), state.dtype
    if isinstance(state, dict):
        return {key: metadata(value) for key, value in state.items()}
    return state


def same_names_as_row_wise(case: Case) -> None:
    ours, stock = sharded(case), sharded(case.only("row_wise"))
    assert metadata(ours.state_dict()) == metadata(stock.state_dict())
    got, want = ours.fused_optimizer.state_dict(), stock.fused_optimizer.state_dict()
    assert metadata(got["state"]) == metadata(want["state"])
    for group in ours.fused_optimizer.param_groups:
        assert group["lr"] == case.learning_rate
    assert list(ours.fused_optimizer.params) == list(stock.fused_optimizer.params)
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in stock.named_parameters()}
    # TorchRec keeps the order of features in a buffer, from the first batch on, if it needs one.
    buffers = {n for n, _ in ours.named_buffers() if not n.endswith("_features_order_tensor")}
    assert buffers == {n for n, _ in stock.named_buffers()}


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_names_shapes_and_types_are_those_of_stock_row_wise(
    cluster_2: Cluster, kind: str, optimizer: str
) -> None:
    cluster_2.run(same_names_as_row_wise, case_of(kind, optimizer=optimizer))


def same_names_as(case: Case, stock: str) -> None:
    """The state is described as that of the stock sharding with the same shards."""
    ours, theirs = sharded(case.only(f"fused_{stock}")), sharded(case.only(stock))
    assert metadata(ours.state_dict()) == metadata(theirs.state_dict())
    got, want = ours.fused_optimizer.state_dict(), theirs.fused_optimizer.state_dict()
    assert metadata(got["state"]) == metadata(want["state"])
    assert list(ours.fused_optimizer.params) == list(theirs.fused_optimizer.params)
    names = [[n for n, _ in model.named_parameters()] for model in (ours, theirs)]
    assert names[0] == names[1]
    # There and back, to the last bit.
    train_step(case, theirs, 0)
    ours.load_state_dict(theirs.state_dict())
    ours.fused_optimizer.load_state_dict(theirs.fused_optimizer.state_dict())
    for step in (1, 2):
        got, want = train_step(case, ours, step), train_step(case, theirs, step)
        assert all(torch.equal(got[name], want[name]) for name in want)
    theirs.load_state_dict(ours.state_dict())
    theirs.fused_optimizer.load_state_dict(ours.fused_optimizer.state_dict())
    got, want = train_step(case, ours, 3), train_step(case, theirs, 3)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stock", ["table_wise", "column_wise"])
def test_names_shapes_and_types_of_owner_pooled_tables_are_those_of_stock_ones(
    clusters: Callable[[int], Cluster], stock: str, world_size: int, optimizer: str
) -> None:
    # The test's stock column shards have four columns each, from the first rank on.
    tables = TABLES if stock == "table_wise" else (Table("a", 50, dim=4 * world_size),)
    case = Case(tables=tables, batch_sizes=(5,) * world_size, optimizer=optimizer, repeated=True)
    clusters(world_size).run(same_names_as, case, stock)


def stop_and_resume(case: Case, resume_as: str) -> None:
    """Half of the steps, state moved to a new model, other half: equals an uninterrupted run."""
    run = unsharded_run(case, dist.get_world_size())
    first = sharded(case)
    half = case.steps // 2
    outputs = [train_step(case, first, step) for step in range(half)]
    second_case = case if resume_as == "fused_row_wise" else case.only(resume_as)
    second = sharded(second_case)
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    outputs += [train_step(second_case, second, step) for step in range(half, case.steps)]
    check(second_case, run, outputs, second)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("resume_as", ["fused_row_wise", "row_wise"])
def test_training_resumes_from_a_state_dict(cluster_2: Cluster, kind: str, resume_as: str) -> None:
    case = case_of(kind, optimizer="adagrad", steps=6)
    if kind == "ebc" and resume_as == "row_wise":
        case = Case(
            tables=(Table("a", 50), Table("b", 33), Table("c", 20)),
            batch_sizes=(5, 5),
            optimizer="adagrad",
            steps=6,
        )
    cluster_2.run(stop_and_resume, case, resume_as)


def with_learning_rates(case: Case) -> None:
    rates = [0.5, 0.25, 0.125, 1.0, 0.5]
    run = unsharded_run(case, dist.get_world_size(), learning_rates=rates)
    model = sharded(case)
    optimizer = model.fused_optimizer
    outputs = []
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        outputs.append(train_step(case, model, step, optimizer))
    check(case, run, outputs, model)


def test_learning_rate_schedules(cluster_2: Cluster) -> None:
    cluster_2.run(with_learning_rates, case_of(optimizer="sgd"))
    mix = (
        replace(TABLES[0], sharding="fused_column_wise"),
        replace(TABLES[1], sharding="fused_table_wise"),
        TABLES[2],
    )
    cluster_2.run(with_learning_rates, Case(tables=mix, batch_sizes=(5, 5)))


def with_warmup_and_dense_optimizer(case: Case) -> None:
    """TorchRec's own stack of optimizers: keyed, combined, with warm-up."""
    model = sharded(case)
    dense = nn.Linear(2, 2)
    optimizer = WarmupOptimizer(
        CombinedOptimizer(
            [
                ("sparse", model.fused_optimizer),
                (
                    "dense",
                    KeyedOptimizerWrapper(
                        dict(dense.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.25)
                    ),
                ),
            ]
        ),
        [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.25, lr_scale=1.0)],
        lr=case.learning_rate,
    )
    seen, outputs = [], []
    for step in range(case.steps):
        optimizer.zero_grad()
        seen.append(optimizer.param_groups[0]["lr"])
        result = train_step(case, model, step)
        dense(torch.ones(2)).sum().backward()
        optimizer.step()
        outputs.append(result)
    assert len(set(seen)) > 1
    run = unsharded_run(case, dist.get_world_size(), learning_rates=seen)
    check(case, run, outputs, model)


def test_warmup_over_combined_optimizers(cluster_2: Cluster) -> None:
    cluster_2.run(with_warmup_and_dense_optimizer, case_of(optimizer="sgd"))


def optimizer_in_backward(case: Case) -> None:
    """apply_optimizer_in_backward: different optimizers for different tables."""
    module = unsharded(case)
    weights = {t.name: dict(module.named_parameters())[f"{prefix(case)}.{t.name}.weight"]
               for t in case.tables}  # fmt: skip
    apply_optimizer_in_backward(
        RowWiseAdagrad, [weights["a"]], {"lr": case.learning_rate, "eps": case.eps}
    )
    apply_optimizer_in_backward(
        torch.optim.SGD, [weights["b"], weights["c"]], {"lr": case.learning_rate}
    )
    sharders = fr.fused_sharders()
    sharder = next(s for s in sharders if s.module_type is type(module))
    made = {
        "fused_row_wise": fr.fused_row_wise(),
        "fused_table_wise": fr.fused_table_wise(0),
        "fused_column_wise": fr.fused_column_wise([1, 0]),
    }
    plan = construct_module_sharding_plan(
        module, {t.name: made[t.sharding] for t in case.tables}, sharder, device_type="cpu"
    )
    model = parallel(Wrapper(module), ShardingPlan({"sparse": plan}), sharders)
    model.load_state_dict(sharded(case).state_dict())
    for step in range(case.steps):
        train_step(case, model, step)
    for optimizer, tables in (("rowwise_adagrad", "a"), ("sgd", "bc")):
        one = Case(**{**case.__dict__, "optimizer": optimizer})
        run = unsharded_run(one, dist.get_world_size())
        state_dict, states = model.state_dict(), optimizer_states(model)
        for name in tables:
            key = f"sparse.{prefix(case)}.{name}.weight"
            for where, part in local_parts(state_dict[key]):
                torch.testing.assert_close(part, run.weights[name][where], rtol=1e-6, atol=1e-6)
            has_it = optimizer != "sgd" and bool(local_parts(state_dict[key]))
            assert (name in states) == has_it


def test_apply_optimizer_in_backward(cluster_2: Cluster) -> None:
    cluster_2.run(optimizer_in_backward, case_of())
    a, b, c = TABLES
    for first, second in (("fused_table_wise", "fused_column_wise"), ("fused_row_wise",) * 2):
        tables = (replace(a, sharding=first), replace(b, sharding=second), c)
        cluster_2.run(optimizer_in_backward, Case(tables=tables, batch_sizes=(5, 5)))


def evaluate(case: Case) -> None:
    model = sharded(case)
    features = batch(case, 0, dist.get_rank())
    before = {k: [p.clone() for _, p in local_parts(v)] for k, v in model.state_dict().items()}
    want = model(features)
    model.eval()
    assert all(torch.equal(want[k], v) for k, v in model(features).items())
    with torch.no_grad():
        got = model(features)
    assert all(torch.equal(want[k], v) and not v.requires_grad for k, v in got.items())
    for key, value in model.state_dict().items():
        for (_, part), old in zip(local_parts(value), before[key], strict=True):
            assert torch.equal(part, old)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_eval_and_no_grad_change_nothing(cluster_2: Cluster, kind: str) -> None:
    cluster_2.run(evaluate, case_of(kind))


def as_tensor_dict(case: Case) -> None:
    model = sharded(case)
    features = batch(case, 0, dist.get_rank())
    want = model(features)
    jagged = {
        key: torch.nested.nested_tensor_from_jagged(value.values(), lengths=value.lengths())
        for key, value in features.to_dict().items()
    }
    # In another order than the tables, on purpose.
    got = model(TensorDict(dict(reversed(jagged.items()))))
    assert all(torch.equal(want[k], v) for k, v in got.items())


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_tensor_dict_input(cluster_2: Cluster, kind: str) -> None:
    cluster_2.run(as_tensor_dict, case_of(kind))


def two_forwards_one_backward(case: Case) -> None:
    """Both batches are in flight at once; gradients of both reach the tables."""
    model = sharded(case)
    rank = dist.get_rank()
    first, second = model(batch(case, 0, rank)), model(batch(case, 1, rank))
    loss = sum(v.sum() for v in first.values()) + sum(v.sum() for v in second.values())
    loss.backward()

    reference = unsharded(case, "cpu")
    weights = dict(reference.named_parameters())
    with torch.no_grad():
        for i, t in enumerate(case.tables):
            weights[f"{prefix(case)}.{t.name}.weight"].copy_(initial_weight(case, i))
    total = torch.zeros(())
    for r in range(dist.get_world_size()):
        for step in (0, 1):
            total = total + sum(
                v.sum() for v in outputs_by_name(reference(batch(case, step, r))).values()
            )
    (total / dist.get_world_size()).backward()
    for t in case.tables:
        key = f"{prefix(case)}.{t.name}.weight"
        weight, grad = weights[key], weights[key].grad
        assert grad is not None
        want = weight.detach() - case.learning_rate * grad
        for where, part in local_parts(model.state_dict()[f"sparse.{key}"]):
            assert torch.equal(part, want[where])


def test_two_batches_in_flight(cluster_2: Cluster) -> None:
    cluster_2.run(two_forwards_one_backward, case_of(optimizer="sgd"))


class Three(nn.Module):
    """Fused bags, bags of a stock table only, and fused sequences, all fed the same batch."""

    def __init__(self) -> None:
        super().__init__()

        def table(kind: type, name: str) -> Any:
            return kind(name=name, num_embeddings=10, embedding_dim=4, feature_names=[f"f_{name}"])

        meta = torch.device("meta")
        self.x = EmbeddingBagCollection([table(EmbeddingBagConfig, "a")], device=meta)
        self.y = EmbeddingBagCollection([table(EmbeddingBagConfig, "b")], device=meta)
        self.z = EmbeddingCollection([table(EmbeddingConfig, "c")], device=meta)

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        modules = (self.x, self.y, self.z)
        return {k: v for m in modules for k, v in outputs_by_name(m(features)).items()}


def three_modules_share_a_batch() -> None:
    tables = tuple(Table(name, 10, dim=4) for name in "abc")
    case = Case(tables=tables, batch_sizes=(3, 3))
    model, sharders = Three(), fr.fused_sharders()
    generators = {
        "x": {"a": fr.fused_row_wise()},
        "y": {"b": table_wise(rank=0, compute_kernel="fused")},
        "z": {"c": fr.fused_row_wise()},
    }
    plans = {}
    for path, per_table in generators.items():
        module = getattr(model, path)
        sharder = next(s for s in sharders if s.module_type is type(module))
        plans[path] = construct_module_sharding_plan(module, per_table, sharder, device_type="cpu")
    shared = parallel(model, ShardingPlan(plans), sharders)
    weights = [initial_weight(case, i) for i in range(3)]
    keys = ("x.embedding_bags.a", "y.embedding_bags.b", "z.embeddings.c")
    shared.load_state_dict({f"{k}.weight": w for k, w in zip(keys, weights, strict=True)})
    features = batch(case, 0, dist.get_rank())
    got = shared(features)
    for name, weight in zip(("f_a", "f_b"), weights, strict=False):
        bags = features[name]
        want = torch.zeros(3, 4).index_add(
            0, torch.repeat_interleave(bags.lengths()), weight[bags.values()]
        )
        assert torch.equal(got[name], want)
    assert torch.equal(got["f_c"], weights[2][features["f_c"].values()])


def test_modules_can_share_a_batch(cluster_2: Cluster) -> None:
    cluster_2.run(three_modules_share_a_batch)


def index_dedup_beside_stock(case: Case) -> None:
    """The option has no CPU kernel for stock tables; it changes no result and is left out."""
    module = unsharded(case)
    sharder = fr.FusedEmbeddingCollectionSharder(
        {"learning_rate": case.learning_rate}, use_index_dedup=True
    )
    plan = construct_module_sharding_plan(
        module,
        {"a": fr.fused_row_wise(), "b": table_wise(rank=1, compute_kernel="fused")},
        sharder,
        device_type="cpu",
    )
    model = parallel(Wrapper(module), ShardingPlan({"sparse": plan}), [sharder])
    model.load_state_dict(
        {
            f"sparse.embeddings.{t.name}.weight": initial_weight(case, i)
            for i, t in enumerate(case.tables)
        }
    )
    run = unsharded_run(case, dist.get_world_size())
    check(case, run, [train_step(case, model, step) for step in range(case.steps)], model)


def test_index_dedup_on_cpu(cluster_2: Cluster) -> None:
    tables = (Table("a", 50), Table("b", 20, sharding="table_wise"))
    cluster_2.run(index_dedup_beside_stock, Case(tables=tables, batch_sizes=(5, 5), kind="ec"))


def wait_twice(case: Case) -> None:
    sparse = sharded(case).module.sparse
    ctx = sparse.create_context()
    received = sparse.input_dist(ctx, batch(case, 0, dist.get_rank())).wait().wait()
    awaitable = sparse.compute_and_output_dist(ctx, received)._awaitables[0]
    assert awaitable.wait() is awaitable.wait()


def test_waiting_twice_gives_the_same(cluster_2: Cluster) -> None:
    cluster_2.run(wait_twice, case_of())


def recorded_streams(case: Case) -> None:
    """On CUDA, tensors that cross streams must say so; here we only see that all do."""
    sparse, seen = sharded(case).module.sparse, set()
    ctx = sparse.create_context()
    received = sparse.input_dist(ctx, batch(case, 0, dist.get_rank())).wait().wait()
    with mock.patch.object(
        torch.Tensor, "record_stream", lambda tensor, stream: seen.add(tensor.data_ptr())
    ):
        ctx.record_stream(None)
        received.record_stream(None)
    context = ctx.sharding_contexts[0]
    wanted = list(received[0].segments)
    of_rows = context.bags + [bags.copies for bags in context.bags if bags.copies is not None]
    for bags in of_rows:
        wanted += [bags.rows_N, bags.offsets_B1, bags.divisor_B, bags.order_N]
    pointers = {tensor.data_ptr() for tensor in wanted if tensor is not None}
    assert len(pointers) > 5
    assert pointers <= seen


def test_streams_are_recorded(cluster_2: Cluster) -> None:
    cluster_2.run(recorded_streams, case_of())
    a, b, c = TABLES
    tables = (a, replace(b, sharding="fused_column_wise"), replace(c, sharding="fused_table_wise"))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(4,), repeated=True)
    cluster_2.run(recorded_streams, case)
