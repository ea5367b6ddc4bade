"""Reads planning tasks from files, for a training configuration or for listed tables."""

from typing import Any

import torch
from torch import nn

from fusedrec_torchrec.planner.model_tables import table_loads
from fusedrec_torchrec.planner.planning import Planning, model_of_tables
from fusedrec_torchrec.sharding.fused_params import fused_params
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.training.data.data_config import copies_of
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.model import build_model
from fusedrec_torchrec.training.planner_files import PlannerFiles
from fusedrec_torchrec.training.source import open_source

__all__ = ["planning_of"]


def planning_of(files: PlannerFiles, progress: bool = False) -> Planning:
    """Opens the data of a planning task, and counts what tables are used for.

    Raises:
        ValueError: a file is missing, or something in it is unknown or out of range.
    """
    config, cluster, train, profile = files.config, files.cluster, files.train, files.profile
    optimizer = config.optimizer or (
        train.optimizer.embedding if train else EmbeddingOptimizerConfig()
    )
    sharders = fused_sharders(fused_params=fused_params(optimizer))
    zipf: Any = config.zipf
    poolings: dict[str, float] = {}
    scattered = False
    if train is not None:
        source = open_source(train, progress)
        model: nn.Module = build_model(train.model, source, torch.device("meta"))
        batch = config.batch_size or train.data.batch_size // cluster.ranks
        generated = [(name, table) for table in train.tables for name in copies_of(table)]
        poolings = {name: table.pooling for name, table in generated}
        scattered = bool(generated) and profile is None
        if isinstance(source, PreparedData):
            for feature, table_name in source.features.items():
                pooling = source.poolings[feature]
                poolings[table_name] = poolings.get(table_name, 0.0) + pooling
        if zipf is None and profile is None:
            zipf = {name: table.zipf for name, table in generated}
    else:
        model, poolings, zipf = model_of_tables(config)
        batch = config.batch_size or 0
    given = {} if profile else poolings  # a profile has counted
    loads = table_loads(
        model,
        sharders,
        profile,
        None if profile else zipf,
        poolings=given,
        scattered=scattered,
    )
    return Planning(config, cluster, model, sharders, loads, batch)
