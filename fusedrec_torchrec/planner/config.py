"""What to plan for whom: the tree behind ``configs/planner/*.yaml`` and ``fusedrec plan``."""

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, TypeAdapter

from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig

__all__ = ["SCALINGS", "DenseConfig", "PlannedTable", "PlannerConfig", "Scaling", "schema"]

Scaling = Literal["weak", "strong"]  # as many samples for each rank, or as many in all
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


@section
class PlannedTable:
    """Describes a table to plan, or several of a kind.

    Attributes:
        name: Name of the table.
        rows: Number of rows.
        dim: Number of columns.
        copies: Makes this many tables of the kind, name_0, name_1 and so on.
        features: Features that look up the table.
        pooling: Ids of a sample and feature, on average.
        zipf: Exponent of the Zipf law of its ids; that of all tables if none.
        sequence: A row of output for every id (EmbeddingCollection) instead of one for each bag.
    """

    name: str = Field(min_length=1)
    rows: int = Field(ge=1)
    dim: int = Field(default=64, ge=1)
    copies: int = Field(default=1, ge=1)
    features: int = Field(default=1, ge=1)
    pooling: float = Field(default=1.0, ge=0)
    zipf: float | None = Field(default=None, ge=0, le=4)
    sequence: bool = False


@section
class DenseConfig:
    """Describes the rest of the model, as far as it takes time in a step.

    Attributes:
        milliseconds: Of a step, for the rest of the model, on each rank.
        gradients_mb: MB of its gradients, which an all-reduce sums up.
        hidden: Share of this all-reduce that runs beside the backward pass.
    """

    milliseconds: float = Field(default=0.0, ge=0)
    gradients_mb: float = Field(default=0.0, ge=0)
    hidden: float = Field(default=0.8, ge=0, le=1)


@section
class PlannerConfig:
    """Says what is planned, and for which cluster.

    Attributes:
        cluster: File of the cluster, relative to this one: of configs/clusters or `fusedrec
            calibrate`.
        ranks: Ranks to plan for; those of the training or, without one, of the cluster if none.
        train: Training configuration, relative to this file, whose tables, batch and optimizer are
            planned.
        tables: Tables to plan, where there is no training configuration.
        batch_size: Samples of a rank; the training's if none.
        optimizer: Optimizer of the tables; the training's, or row-wise AdaGrad, if none.
        profile: Access profile, relative to this file (`fusedrec profile --save`).
        zipf: Exponent of the Zipf law of ids, where there is no profile; if none, that of generated
            data, or all rows are used alike.
        dense: The rest of the model.
        search: What the planner may decide.
    """

    cluster: Path = Path("../clusters/cpu_ethernet.yaml")
    ranks: int | None = Field(default=None, ge=1)
    train: Path | None = None
    tables: list[PlannedTable] = Field(default=[])
    batch_size: int | None = Field(default=None, ge=1)
    optimizer: EmbeddingOptimizerConfig | None = None
    profile: Path | None = None
    zipf: float | None = Field(default=None, ge=0, le=4)
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
