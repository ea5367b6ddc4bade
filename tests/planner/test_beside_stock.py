"""Plans without a cluster, beside TorchRec's shardings, by the cost model.

The workloads are those of the benchmarks, whose measurements say the same in docs/performance.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.stages import Groups
from fusedrec_torchrec.planner.cost.stock import STOCK, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.sharding.sharding_type import OWNER_POOLED
from tests.planner.cost.test_owners import repeated
from tests.planner.search.test_never_longer import ROWS
from tests.planner.test_planner import planner

ROOT = Path(__file__).parents[2]
MOST_TABLES = 100  # of more, making a plan takes TorchRec long


def workloads() -> Iterator[WorkloadConfig]:
    """Yields the workloads, once where they only differ in the link."""
    known = set()
    for suite in ("crossover", "mlperf", "workloads"):
        path = ROOT / "benchmarks" / f"{suite}.yaml"
        for workload in from_mapping(SuiteConfig, load_yaml(path), str(path)).workloads:
            for config in workload.expanded():
                key = (config.name.split(", 1gbit")[0], config.batch_size)
                if config.tables <= MOST_TABLES and key not in known:
                    known.add(key)
                    yield config


def loads(config: WorkloadConfig) -> list[TableLoad]:
    """Returns what a workload asks of its tables; of Criteo's by a law, as there is no data."""
    criteo = config.data == "criteo"
    rows = list(ROWS) if criteo else [config.rows] * config.tables
    dims = [config.dims[t % len(config.dims)] for t in range(len(rows))]
    tables = []
    for t, pooling in enumerate(config.pooling_of(len(rows))):
        law = RowClasses.zipf(rows[t], 1.05 if criteo else config.zipf)
        load = TableLoad(f"t{t}", rows[t], dims[t], pooling, law, pooled=config.module == "ebc")
        if criteo or config.bags == "repeated":  # an id has the same bag whenever it comes
            bags = round(BagsByChance(law, 1.0).distinct(config.batch_size).bags)
            load = replace(load, bag_use=repeated("", bags, pooling).bag_use)
        tables.append(load)
    return tables


def plan_of(config: WorkloadConfig, tables: list[TableLoad]) -> Decision:
    """Returns what ``FusedShardingPlanner`` plans without a cluster, as the cost model sees it."""
    model, sizes = nn.Module(), [(load.name, load.rows, load.dim) for load in tables]
    meta = torch.device("meta")
    kind: Any = EmbeddingBagConfig if tables[0].pooled else EmbeddingConfig
    configs = [
        kind(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows, dim in sizes
    ]
    collection: Any = EmbeddingBagCollection if tables[0].pooled else EmbeddingCollection
    if tables[0].pooled:
        model.tables = collection(tables=configs, device=meta)
    else:  # whose tables are of one size
        for dim in dict.fromkeys(load.dim for load in tables):
            same = [c for c in configs if c.embedding_dim == dim]
            setattr(model, f"tables_{dim}", collection(tables=same, device=meta))
    constraints = {
        load.name: ParameterConstraints(pooling_factors=[load.pooling]) for load in tables
    }
    one = planner(config.ranks, constraints=constraints, batch_size=config.batch_size)
    planned: Any = one.plan(model, fr.fused_sharders())
    entries: dict[str, Any] = {
        name: entry for module in planned.plan.values() for name, entry in module.items()
    }
    with_owners = ("table_wise", *OWNER_POOLED)
    whole = [entries[load.name].sharding_type in with_owners for load in tables]
    cluster = ClusterConfig(device="cpu", ranks=config.ranks, ranks_per_node=config.ranks)
    return Decision(
        tables=tuple(tables),
        batch=config.batch_size,
        cluster=cluster,
        groups=Groups(config.ranks),
        systems=tuple(entries[load.name].sharding_type for load in tables),
        owners=tuple(
            tuple(entries[load.name].ranks) if own else ()
            for load, own in zip(tables, whole, strict=True)
        ),
        on_host=(False,) * len(tables),
    )


@pytest.mark.parametrize("config", workloads(), ids=lambda config: config.name)
def test_no_stock_sharding_of_all_tables_is_shorter(config: WorkloadConfig) -> None:
    """On a machine that does everybody's work at the same rates, and on one that was measured."""
    tables = loads(config)
    decision = plan_of(config, tables)
    path = ROOT / "configs" / "clusters" / "one_machine.yaml"
    measured = from_mapping(ClusterConfig, load_yaml(path), str(path))
    for cluster in (decision.cluster, replace(measured, ranks=config.ranks)):
        picked = replace(decision, cluster=cluster).seconds
        for system in STOCK:
            if system == "data_parallel":
                continue
            step = stock_step(system, tables, config.batch_size, config.ranks)
            assert picked <= step.seconds(cluster), (cluster.name, system, set(decision.systems))
