"""What to plan for whom: the tree behind ``configs/planner/*.yaml`` and ``fusedrec plan``."""

from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter

from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig

__all__ = ["DenseConfig", "PlannedTable", "PlannerConfig", "schema"]


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


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of planner configurations, for editors."""
    described = TypeAdapter(PlannerConfig).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
