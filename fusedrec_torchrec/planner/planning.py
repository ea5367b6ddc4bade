"""A planning task, and the model that stands for tables which a file lists."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from fusedrec_torchrec.planner.config import PlannerConfig
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.fit_tables import unfit_tables
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.search_config import SearchConfig

__all__ = ["Planning", "model_of_tables"]


@dataclass
class Planning:
    """Is a planning task, with all that its files say.

    Attributes:
        config: of the planner.
        cluster: with the ranks to plan for.
        model: on the meta device.
        sharders: of its modules.
        loads: of its tables.
        batch: samples of a rank.
    """

    config: PlannerConfig
    cluster: ClusterConfig
    model: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    loads: list[TableLoad]
    batch: int

    def decide(self, search: SearchConfig | None = None) -> Decision:
        """Returns the best plan, with another search than the configured one if it is given."""
        unfit = unfit_tables(self.model, self.sharders, self.cluster.device)
        search = search or self.config.search
        return decide(self.loads, self.batch, self.cluster, search, sorted(unfit))


def model_of_tables(
    config: PlannerConfig,
) -> tuple[nn.Module, dict[str, float], dict[str, float]]:
    """Returns a model of the listed tables, their ids in a sample and their Zipf exponents."""
    pooled: list[EmbeddingBagConfig] = []
    sequences: list[EmbeddingConfig] = []
    poolings, zipf = {}, {}
    for table in config.tables:
        names = (
            [f"{table.name}_{i}" for i in range(table.copies)] if table.copies > 1 else [table.name]
        )
        for name in names:
            given: dict[str, Any] = {
                "name": name,
                "num_embeddings": table.rows,
                "embedding_dim": table.dim,
                "feature_names": [f"{name}.{i}" for i in range(table.features)],
            }
            if name in poolings:
                raise ValueError(f"tables has the name {name!r} more than once")
            poolings[name] = table.pooling * table.features
            zipf[name] = (config.zipf or 0.0) if table.zipf is None else table.zipf
            if table.sequence:
                sequences.append(EmbeddingConfig(**given))
            else:
                pooled.append(EmbeddingBagConfig(**given))
    meta, model = torch.device("meta"), nn.Module()
    if pooled:
        model.embedding_bags = EmbeddingBagCollection(tables=pooled, device=meta)
    by_dim: dict[int, list[EmbeddingConfig]] = {}
    for sequence in sequences:
        by_dim.setdefault(sequence.embedding_dim, []).append(sequence)
    for dim, tables in by_dim.items():  # of which a collection has one
        setattr(model, f"embeddings_{dim}", EmbeddingCollection(tables=tables, device=meta))
    return model, poolings, zipf
