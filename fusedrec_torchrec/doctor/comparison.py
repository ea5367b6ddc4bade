"""Trains small modules sharded and unsharded on the same device, and compares them.

All ranks' batches are known to all ranks, so that each has the unsharded module for itself: a plain
module of torch on the rank's device, whose optimizer is written out.  Outputs of every step and
weights after the last one are compared, and what a step asks of the machine is counted.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.sharding.plan_entries import fused_row_wise
from fusedrec_torchrec.sharding.sharders import (
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)

__all__ = ["COMPARISONS", "CONTROL", "Comparison", "Tolerance", "compare"]

ROWS = (4000, 500, 30)
LENGTHS = (0, 1, 2, 5)
MEAN_TABLE = 2
SAMPLES, STEPS, LEARNING_RATE, EPS = 48, 6, 0.125, 2.0**-10
Tolerance = 2e-5
"""How far apart numbers may be, in units of the largest one: sums run in another order."""


@dataclass(frozen=True)
class Comparison:
    """Is what is trained.

    Attributes:
        name: for people.
        kind: EmbeddingBagCollection or EmbeddingCollection.
        ours: whether the fused sharder shards it, or TorchRec's row_wise, as a control: if that
            is off, too, the fault is not this package's.
        hot: how many rows of each table are hot.
    """

    name: str
    kind: Literal["ebc", "ec"] = "ebc"
    ours: bool = True
    hot: int = 0


CONTROL = "TorchRec's row_wise as unsharded"
COMPARISONS = (
    Comparison("fused_row_wise as unsharded"),
    Comparison("fused_row_wise, sequences, as unsharded", kind="ec"),
    Comparison("fused_row_wise, hot rows, as unsharded", hot=10),
    Comparison(CONTROL, ours=False),
)


def compare(comparison: Comparison, device: torch.device) -> dict[str, Any]:
    """Trains both on this rank, all ranks at the same time; returns how far apart they are."""
    unsharded, sharded = _unsharded(comparison, device), _sharded(comparison, device)
    sharded.load_state_dict(
        {name: value.detach().clone() for name, value in unsharded.state_dict().items()}
    )
    states = {name: torch.zeros(len(p), device=device) for name, p in unsharded.named_parameters()}
    outputs = 0.0
    for step in range(STEPS - 1):
        outputs = max(outputs, _train_both(comparison, unsharded, sharded, states, step))
    counts: dict[str, Any] = {}
    outputs = max(outputs, _train_both(comparison, unsharded, sharded, states, STEPS - 1, counts))
    weights, compared = _weights_apart(unsharded, sharded)
    total = sum(p.numel() for p in unsharded.parameters())
    return {
        "outputs": outputs, "weights": weights, "compared": compared, "elements": total, **counts
    }  # fmt: skip


def _train_both(
    comparison: Comparison,
    unsharded: torch.nn.Module,
    sharded: torch.nn.Module,
    states: dict[str, torch.Tensor],
    step: int,
    counts: dict[str, Any] | None = None,
) -> float:
    """Returns how far the outputs of a step are apart, and has both updated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = next(iter(states.values())).device
    batches = [_batch(step, r).to(device) for r in range(ranks)]

    with torch.no_grad():
        want = _outputs(unsharded(batches[rank]))
    gradients = [_gradient(output, step, rank) for output in want]

    def train() -> list[torch.Tensor]:
        outputs = _outputs(sharded(batches[rank]))
        torch.autograd.backward(outputs, gradients)
        return outputs

    got = train() if counts is None else _counted(train, device, counts)
    apart = max(_apart(g, w) for g, w in zip(got, want, strict=True))
    with torch.no_grad():
        for table, (name, weight) in enumerate(unsharded.named_parameters()):
            gradient = torch.zeros_like(weight)
            for r, batch in enumerate(batches):
                # TorchRec takes the mean of all ranks' gradients.
                gradient += _row_gradient(comparison, weight, table, batch, step, r) / ranks
            states[name] += gradient.square().mean(1)
            weight.sub_(LEARNING_RATE * gradient / (states[name].sqrt() + EPS)[:, None])
    return apart


def _row_gradient(
    comparison: Comparison,
    weight: torch.Tensor,
    table: int,
    batch: KeyedJaggedTensor,
    step: int,
    rank: int,
) -> torch.Tensor:
    """Returns what a rank's batch adds to the gradient of each row of a table, written out."""
    feature = batch[f"f{table}"]
    ids, lengths = feature.values(), feature.lengths().long()
    if comparison.kind == "ec":
        gradient = _gradient(weight.new_empty(len(ids), weight.size(1)), step, rank)
    else:
        gradient = _gradient(weight.new_empty(SAMPLES, weight.size(1)), step, rank)
        if table == MEAN_TABLE:
            gradient = gradient / lengths.clamp_min(1)[:, None]
        bag = torch.arange(SAMPLES, device=ids.device).repeat_interleave(lengths)
        gradient = gradient.index_select(0, bag)
    return torch.zeros_like(weight).index_add_(0, ids, gradient)


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the largest difference in units of the largest number; infinite if shapes differ."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    if not got.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def _weights_apart(unsharded: torch.nn.Module, sharded: torch.nn.Module) -> tuple[float, int]:
    """Returns how far this rank's rows are from the unsharded ones, and how many numbers it has."""
    apart, compared = 0.0, 0
    theirs = sharded.state_dict()
    for name, want in unsharded.state_dict().items():
        for shard in theirs[name].local_shards():
            first, count = shard.metadata.shard_offsets[0], shard.tensor.size(0)
            apart = max(apart, _apart(shard.tensor, want[first : first + count]))
            compared += shard.tensor.numel()
    return apart, compared


def _counted(
    train: Callable[[], list[torch.Tensor]], device: torch.device, counts: dict[str, Any]
) -> list[torch.Tensor]:
    """Counts collectives, their bytes, and on CUDA the waits of the host and memory."""
    if device.type == "cpu":
        with CollectiveCounter() as counter:
            outputs = train()
    else:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.reset_peak_memory_stats(device)
        with warnings.catch_warnings(record=True) as noted, CollectiveCounter() as counter:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outputs = train()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        counts["waits of the host"] = sum("synchroniz" in str(w.message) for w in noted)
        counts["peak device memory"] = torch.cuda.max_memory_allocated(device)
    counts["collectives"] = len(counter.collectives)
    counts["bytes sent"] = counter.bytes_sent()
    return outputs


def _batch(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths, ids = [], []
    for rows in ROWS:
        length = torch.tensor(LENGTHS)[torch.randint(len(LENGTHS), (SAMPLES,), generator=generator)]
        skewed = torch.rand(int(length.sum()), generator=generator) ** 3
        lengths.append(length)
        ids.append((skewed * rows).long().clamp_(max=rows - 1))
    return KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(len(ROWS))],
        values=torch.cat(ids),
        lengths=torch.cat(lengths).int(),
    )


def _gradient(output: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank + 500)
    return torch.rand(output.shape, generator=generator).add_(0.5).to(output.device)


def _outputs(result: Any) -> list[torch.Tensor]:
    """Waits for what a module returned, and returns its tensors in the order of their names."""
    result = result.wait() if hasattr(result, "wait") else result
    if isinstance(result, KeyedTensor):
        named = result.to_dict()  # modules have columns in orders of their own
        return [named[name] for name in sorted(named)]
    return [result[name].values() for name in sorted(result)]


def _unsharded(comparison: Comparison, device: torch.device) -> torch.nn.Module:
    """Returns the module with weights that are the same on all ranks."""
    module = _module(comparison, device)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return module


def _module(comparison: Comparison, device: torch.device) -> torch.nn.Module:
    dims = (16, 16, 16) if comparison.kind == "ec" else (16, 64, 16)
    tables: list[dict[str, Any]] = [
        {"name": f"t{i}", "num_embeddings": rows, "embedding_dim": dim, "feature_names": [f"f{i}"]}
        for i, (rows, dim) in enumerate(zip(ROWS, dims, strict=True))
    ]
    if comparison.kind == "ec":
        return EmbeddingCollection(tables=[EmbeddingConfig(**t) for t in tables], device=device)
    pooling = [PoolingType.MEAN if i == MEAN_TABLE else PoolingType.SUM for i in range(len(tables))]
    configs = [EmbeddingBagConfig(**t, pooling=p) for t, p in zip(tables, pooling, strict=True)]
    return EmbeddingBagCollection(tables=configs, device=device)


def _sharded(comparison: Comparison, device: torch.device) -> DistributedModelParallel:
    sharder = _sharder(comparison)
    module, ranks = _module(comparison, torch.device("meta")), dist.get_world_size()
    hot = range(comparison.hot) if comparison.hot else None
    plan = construct_module_sharding_plan(
        module,
        {
            f"t{i}": fused_row_wise(hot_rows=hot)
            if comparison.ours
            else row_wise(compute_kernel="fused")
            for i in range(len(ROWS))
        },
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type=device.type,
    )
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def _sharder(comparison: Comparison) -> Any:
    params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": LEARNING_RATE,
        "eps": EPS,
    }
    if comparison.ours:
        fused = FusedEmbeddingCollectionSharder, FusedEmbeddingBagCollectionSharder
        return fused[comparison.kind == "ebc"](params)
    stock = EmbeddingCollectionSharder, EmbeddingBagCollectionSharder
    return stock[comparison.kind == "ebc"](params)
