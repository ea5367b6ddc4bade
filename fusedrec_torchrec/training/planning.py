"""Reads planning tasks from files, for a training configuration or for listed tables."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.core.config import from_mapping, load_yaml, with_overrides
from fusedrec_torchrec.planner.config import PlannerConfig
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.model_tables import table_loads
from fusedrec_torchrec.planner.planning import Planning, model_of_tables
from fusedrec_torchrec.sharding.fused_params import fused_params
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.training.config import TrainConfig, copies_of
from fusedrec_torchrec.training.model import build_model
from fusedrec_torchrec.training.source import open_source

__all__ = ["load_planning"]


def load_planning(path: Path, overrides: Sequence[str] = (), progress: bool = False) -> Planning:
    """Reads a planner configuration and all files that it names.

    Raises:
        ValueError: a file is missing, or something in it is unknown or out of range.
    """
    config = from_mapping(PlannerConfig, with_overrides(load_yaml(path), overrides), str(path))
    folder = path.parent
    cluster_path = folder / config.cluster
    cluster = from_mapping(ClusterConfig, load_yaml(cluster_path), str(cluster_path))
    train = None
    if config.train is not None:
        where = folder / config.train
        train = from_mapping(TrainConfig, load_yaml(where), str(where))
        launched = train.launch.ranks * train.launch.nodes
        cluster = _with_ranks(cluster, config.ranks or launched)
        if train.data.batch_size % cluster.ranks:
            raise ValueError(
                f"{where}: data.batch_size is {train.data.batch_size}, must be a multiple of "
                f"{cluster.ranks} ranks"
            )
    elif config.ranks is not None:
        cluster = _with_ranks(cluster, config.ranks)
    optimizer = config.optimizer or (
        train.optimizer.embedding if train else EmbeddingOptimizerConfig()
    )
    sharders = fused_sharders(fused_params=fused_params(optimizer))
    profile = None
    if config.profile is not None:
        profile = AccessProfile.load(folder / config.profile)
    zipf: Any = config.zipf
    poolings: dict[str, float] = {}
    if train is not None:
        source = open_source(train, progress)
        model: nn.Module = build_model(train.model, source, torch.device("meta"))
        batch = config.batch_size or train.data.batch_size // cluster.ranks
        generated = [(name, table) for table in train.tables for name in copies_of(table)]
        poolings = {name: table.pooling for name, table in generated}
        if zipf is None and profile is None:
            zipf = {name: table.zipf for name, table in generated}
    else:
        model, poolings, zipf = model_of_tables(config)
        batch = config.batch_size or 0
    given = {} if profile else poolings  # a profile has counted
    loads = table_loads(model, sharders, profile, None if profile else zipf, poolings=given)
    return Planning(config, cluster, model, sharders, loads, batch)


def _with_ranks(cluster: ClusterConfig, ranks: int) -> ClusterConfig:
    per_node = cluster.ranks_per_node
    if ranks > per_node and ranks % per_node:
        raise ValueError(
            f"ranks is {ranks}, must be at most {per_node} or a multiple of it, the ranks of a "
            f"node of {cluster.name}"
        )
    return replace(cluster, ranks=ranks)
