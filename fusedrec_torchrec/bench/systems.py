"""Builds the systems under comparison: one model, sharded in different ways.

All have FBGEMM's fused row-wise AdaGrad, except data_parallel: TorchRec runs it on dense gradients
and a dense optimizer, here the cheapest, SGD.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.bench.models import Model
from fusedrec_torchrec.bench.suite import (
    CODEC_SYSTEMS,
    DEDUP_PER_TABLE,
    FUSED_PLANNER,
    FUSED_PROFILED,
    HOT_SYSTEMS,
    OURS,
    STOCK_DEDUP,
)
from fusedrec_torchrec.bench.workload import Workload, outputs_of
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.planner.planner import FusedShardingPlanner
from fusedrec_torchrec.planner.search.owners import FUSED_MIXED, owners_in_turn
from fusedrec_torchrec.sharding.plan_entries import fused_by_owners
from fusedrec_torchrec.sharding.sharders import (
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
)

__all__ = ["System", "balanced", "build", "fused_owners", "planner_picks"]

OPTIMIZER = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}


class System:
    """Holds a sharded model and its training step."""

    def __init__(self, name: str, model: DistributedModelParallel) -> None:
        self.name = name
        self.model = model
        self.device: torch.device = model.device
        dense = [p for p in model.parameters() if name == "data_parallel"]
        self._optimizer = torch.optim.SGD(dense, lr=0.02) if dense else None
        self._noise = torch.empty(0, device=self.device)

    @property
    def plan(self) -> Mapping[str, ParameterSharding]:
        """How each table is sharded."""
        tables: dict[str, ParameterSharding] = {}
        for plan in self.model.plan.plan.values():
            assert isinstance(plan, dict)
            tables.update(plan)
        return tables

    def step(self, batch: KeyedJaggedTensor) -> None:
        """Does forward, backward from a fixed gradient, and update."""
        self.backward(self.forward(batch))

    def forward(self, batch: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Returns the embeddings of a batch."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        return outputs_of(self.model(_fresh(batch)))

    def backward(self, outputs: list[torch.Tensor]) -> None:
        """Sends a fixed gradient back, and updates the tables."""
        torch.autograd.backward(outputs, [self._gradient(output.shape) for output in outputs])
        if self._optimizer is not None:
            self._optimizer.step()

    def _gradient(self, shape: torch.Size) -> torch.Tensor:
        """Returns what the rest of a network would send back; making it is not what is measured.

        Shapes of sequences differ from batch to batch, so all are cut from one piece.
        """
        if self._noise.numel() < shape.numel():
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(2 * shape.numel(), generator=generator).div_(1024)
            self._noise = noise.to(self.device)
        return self._noise[: shape.numel()].view(shape)


def _fresh(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the batch as a data loader would give it: nothing computed from it yet."""
    return KeyedJaggedTensor(
        keys=batch.keys(), values=batch.values(), lengths=batch.lengths(), stride=batch.stride()
    )


def build(name: str, workload: Workload, device: torch.device) -> System:
    """Shards the workload's model on this rank's device; must be called on all ranks."""
    model = workload.model(per_table=name == DEDUP_PER_TABLE)
    with _emulated_nodes(2 if name == "table_row_wise" else 1):
        sharder = _sharder(name, workload)
        plan = _plan(name, workload, model, sharder, device.type)
        sharded = DistributedModelParallel(
            module=model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=plan,
            sharders=[sharder],
        )
    return System(name, sharded)


def _sharder(name: str, workload: Workload) -> ModuleSharder[torch.nn.Module]:
    is_ec = workload.config.module == "ec"
    if name in (*OURS, *HOT_SYSTEMS, *CODEC_SYSTEMS, DEDUP_PER_TABLE):
        fused = FusedEmbeddingCollectionSharder if is_ec else FusedEmbeddingBagCollectionSharder
        hot = None
        if name in HOT_SYSTEMS:
            assert workload.hot is not None
            hot = workload.hot.options(name)
        options = ExchangeOptions(codecs=CODEC_SYSTEMS.get(name))
        return fused(fused_params=dict(OPTIMIZER), options=options, hot=hot)
    stock = EmbeddingCollectionSharder if is_ec else EmbeddingBagCollectionSharder
    if name in STOCK_DEDUP:
        assert is_ec, name
        return EmbeddingCollectionSharder(fused_params=dict(OPTIMIZER), use_index_dedup=True)
    return stock(fused_params=dict(OPTIMIZER))


def _plan(
    name: str,
    workload: Workload,
    model: Model,
    sharder: ModuleSharder[torch.nn.Module],
    device_type: str,
) -> ShardingPlan:
    ranks, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if name == "planner":
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=ranks, compute_device=device_type, local_world_size=local),
            batch_size=workload.config.batch_size,
            constraints=_constraints(workload),
            debug=False,
        )
        group = dist.group.WORLD
        assert group is not None
        return planner.collective_plan(model, [sharder], group)
    if name in (FUSED_PLANNER, FUSED_PROFILED):
        fused_planner = _fused_planner(workload, name == FUSED_PROFILED, device_type)
        return fused_planner.collective_plan(model, [sharder], dist.group.WORLD)
    owners = _dealt_owners(name, workload)
    generators = {
        table: _stock_generator(name, t % ranks, ranks) or fused_by_owners(owners[t])
        for t, table in enumerate(workload.table_rows)
    }
    plans = {}
    for path, module in model.collections.items():
        own = sharder.shardable_parameters(module)
        plans[path] = construct_module_sharding_plan(
            module,
            {table: generators[table] for table in own},
            sharder=sharder,
            world_size=ranks,
            local_size=local,
            device_type=device_type,
        )
    return ShardingPlan(dict(plans))


def fused_owners(name: str, workload: Workload) -> list[tuple[int, ...]] | None:
    """Returns the ranks that pool each table in one of our systems; none where requesters do.

    The answer is None if our planner leaves a table to TorchRec.
    """
    if name not in (FUSED_PLANNER, FUSED_PROFILED):
        return _dealt_owners(name, workload)
    planner = _fused_planner(workload, profiled=name == FUSED_PROFILED)
    (tables,) = planner.plan(workload.model(), [_sharder(FUSED, workload)]).plan.values()
    entries = [tables[table] for table in workload.table_rows]
    if any(entry.sharding_type not in FUSED_TYPES for entry in entries):
        return None
    return [tuple(e.ranks) if e.sharding_type in OWNER_POOLED else () for e in entries]


def _dealt_owners(name: str, workload: Workload) -> list[tuple[int, ...]]:
    """Returns the same of systems that no planner has planned."""
    dims, ranks = workload.dims, workload.config.ranks
    if name == FUSED_TABLE_WISE:
        pooling = workload.config.pooling_of(len(dims))
        loads = [p * d for p, d in zip(pooling, dims, strict=True)]
        return [(owner,) for owner in balanced(loads, ranks)]
    if name in (FUSED_COLUMN_WISE, FUSED_MIXED):
        return [owners_in_turn(name, t, dim, ranks) for t, dim in enumerate(dims)]
    return [()] * len(dims)


def balanced(loads: Sequence[float], ranks: int) -> list[int]:
    """Deals tables to ranks, the largest load first, each to the rank that has the least so far."""
    totals, owners = [0.0] * ranks, [0] * len(loads)
    for table in sorted(range(len(loads)), key=lambda table: -loads[table]):
        owners[table] = totals.index(min(totals))
        totals[owners[table]] += loads[table]
    return owners


def planner_picks(workload: Workload) -> dict[str, int]:
    """Returns how many tables our planner would shard in which way, knowing no profile."""
    plan = _fused_planner(workload).plan(workload.model(), [_sharder(FUSED, workload)])
    (tables,) = plan.plan.values()
    return dict(Counter(sharding.sharding_type for sharding in tables.values()))


def _fused_planner(
    workload: Workload, profiled: bool = False, device_type: str = "cpu"
) -> FusedShardingPlanner:
    """Returns our planner, which is told as much as TorchRec's: how many ids a bag has.

    Args:
        workload: what to plan for.
        profiled: whether it is told more, how rows and bags of the batches are used.
        device_type: where tables live.
    """
    config = workload.config
    return FusedShardingPlanner(
        topology=Topology(
            world_size=config.ranks, compute_device=device_type, local_world_size=config.ranks
        ),
        batch_size=config.batch_size,
        constraints=None if profiled else _constraints(workload),
        profile=workload.profile() if profiled else None,
        debug=False,
    )


def _constraints(workload: Workload) -> dict[str, ParameterConstraints]:
    """Returns what planners are told about the tables: how many ids a bag has."""
    pooling = workload.config.pooling_of(len(workload.table_rows))
    return {
        table: ParameterConstraints(pooling_factors=[factor])
        for table, factor in zip(workload.table_rows, pooling, strict=True)
    }


def _stock_generator(name: str, owner: int, ranks: int) -> ParameterShardingGenerator | None:
    """Returns how a table is sharded; ``owner`` is the rank that has it, if one has all of it.

    None if the system is not one of TorchRec's.
    """
    name = STOCK_DEDUP.get(name, name)
    if name == "table_wise":
        return table_wise(rank=owner, compute_kernel="fused")
    if name == "column_wise":
        return column_wise(ranks=list(range(ranks)), compute_kernel="fused")
    if name == "row_wise":
        return row_wise(compute_kernel="fused")
    if name == "table_row_wise":
        return _fused_kernel(table_row_wise(host_index=owner % 2))
    if name == "data_parallel":
        return data_parallel()
    return None


def _fused_kernel(generator: ParameterShardingGenerator) -> ParameterShardingGenerator:
    """Sets the fused kernel: TorchRec's ``table_row_wise`` picks the dense one on CPU."""

    def generate(*args: Any) -> ParameterSharding:
        return dataclasses.replace(generator(*args), compute_kernel="fused")

    return generate


@contextmanager
def _emulated_nodes(nodes: int) -> Iterator[None]:
    """Makes TorchRec believe in several nodes; it learns the ranks of one from the environment."""
    before = os.environ["LOCAL_WORLD_SIZE"]
    if nodes > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(max(dist.get_world_size() // nodes, 1))
    try:
        yield
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
