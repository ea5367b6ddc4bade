"""What to plan for whom: the tree behind ``configs/planner/*.yaml`` and ``fusedrec plan``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, TypeAdapter
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from fusedrec_torchrec.config import from_mapping, load_yaml, section, with_overrides
from fusedrec_torchrec.data.access_profile import AccessProfile
from fusedrec_torchrec.planner.cluster import ClusterConfig
from fusedrec_torchrec.planner.decide import Decision, decide
from fusedrec_torchrec.planner.enumerator import unfit_tables
from fusedrec_torchrec.planner.model_tables import table_loads
from fusedrec_torchrec.planner.search_config import SearchConfig
from fusedrec_torchrec.planner.table_load import TableLoad
from fusedrec_torchrec.sharders import fused_sharders
from fusedrec_torchrec.training.config import EmbeddingOptimizerConfig, TrainConfig, copies_of
from fusedrec_torchrec.training.model import build_model, fused_params
from fusedrec_torchrec.training.source import open_source

__all__ = ["DenseConfig", "PlannedTable", "PlannerConfig", "Planning", "load_planning", "schema"]


@section
class PlannedTable:
    name: str = Field(min_length=1)
    """Name of the table."""
    rows: int = Field(ge=1)
    """Number of rows."""
    dim: int = Field(default=64, ge=1)
    """Number of columns."""
    copies: int = Field(default=1, ge=1)
    """Makes this many tables of the kind, name_0, name_1 and so on."""
    features: int = Field(default=1, ge=1)
    """Features that look up the table."""
    pooling: float = Field(default=1.0, ge=0)
    """Ids of a sample and feature, on average."""
    zipf: float | None = Field(default=None, ge=0, le=4)
    """Exponent of the Zipf law of its ids; that of all tables if none."""
    sequence: bool = False
    """A row of output for every id (EmbeddingCollection) instead of one for each bag."""


@section
class DenseConfig:
    milliseconds: float = Field(default=0.0, ge=0)
    """Of a step, for the rest of the model, on each rank."""
    gradients_mb: float = Field(default=0.0, ge=0)
    """MB of its gradients, which an all-reduce sums up."""
    hidden: float = Field(default=0.8, ge=0, le=1)
    """Share of this all-reduce that runs beside the backward pass."""


@section
class PlannerConfig:
    cluster: Path = Path("../clusters/cpu_ethernet.yaml")
    """File of the cluster, relative to this one: of configs/clusters or `fusedrec calibrate`."""
    ranks: int | None = Field(default=None, ge=1)
    """Ranks to plan for; those of the training or, without one, of the cluster if none."""
    train: Path | None = None
    """Training configuration, relative to this file, whose tables, batch and optimizer are
    planned."""
    tables: list[PlannedTable] = Field(default=[])
    """Tables to plan, where there is no training configuration."""
    batch_size: int | None = Field(default=None, ge=1)
    """Samples of a rank; the training's if none."""
    optimizer: EmbeddingOptimizerConfig | None = None
    """Optimizer of the tables; the training's, or row-wise AdaGrad, if none."""
    profile: Path | None = None
    """Access profile, relative to this file (`fusedrec profile --save`)."""
    zipf: float | None = Field(default=None, ge=0, le=4)
    """Exponent of the Zipf law of ids, where there is no profile; if none, that of generated data,
    or all rows are used alike."""
    dense: DenseConfig = DenseConfig()
    search: SearchConfig = SearchConfig()

    def __post_init__(self) -> None:
        if (self.train is None) == (not self.tables):
            raise ValueError("exactly one of train and tables must say what to plan")
        if self.train is None and self.batch_size is None:
            raise ValueError("batch_size is missing, must be given with tables")


@dataclass
class Planning:
    """A planning task, with all that its files say.

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
        unfit = unfit_tables(self.model, self.sharders, self.cluster.device)
        search = search or self.config.search
        return decide(self.loads, self.batch, self.cluster, search, sorted(unfit))


def load_planning(path: Path, overrides: Sequence[str] = (), progress: bool = False) -> Planning:
    """
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
        model, poolings, zipf = _tables_model(config)
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


def _tables_model(config: PlannerConfig) -> tuple[nn.Module, dict[str, float], dict[str, float]]:
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
    for each in sequences:
        by_dim.setdefault(each.embedding_dim, []).append(each)
    for dim, tables in by_dim.items():  # of which a collection has one
        setattr(model, f"embeddings_{dim}", EmbeddingCollection(tables=tables, device=meta))
    return model, poolings, zipf


def schema() -> dict[str, Any]:
    """JSON Schema of planner configurations, for editors."""
    found = TypeAdapter(PlannerConfig).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
