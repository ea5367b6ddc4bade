"""What one training run is: the tree behind ``configs/*.yaml`` and ``fusedrec train``."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from fusedrec_torchrec.codecs.threshold_options import ThresholdOptions
from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.core.device import Device
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.sharding.grid_options import GridOptions
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES, Sharding
from fusedrec_torchrec.training.data.data_config import DataConfig, TableConfig, copies_of
from fusedrec_torchrec.training.data.table_options import TAKEN

__all__ = [
    "BadBatchesConfig",
    "CheckpointConfig",
    "DenseOptimizerConfig",
    "LaunchConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "ShardingConfig",
    "TrainConfig",
]

ShardingKind = Literal[Sharding, "auto"]


@section
class ModelConfig:
    """Describes the model: a DLRM, and the sizes of its layers.

    Attributes:
        architecture: TorchRec's DLRM (dot products), DLRM_DCN (low-rank cross net) or
            DLRM_Projection.
        embedding_dim: Columns of every embedding table.
        dense_arch: Layer sizes of the bottom MLP; the last must equal embedding_dim.
        over_arch: Layer sizes of the top MLP; the last must be 1, the click.
        dcn_layers: dlrm_dcn: number of cross layers.
        dcn_low_rank: dlrm_dcn: rank of the cross layers' weights.
        projection_branches: dlrm_projection: layer sizes of the two interaction branches; each must
            end in a multiple of embedding_dim.
    """

    architecture: Literal["dlrm", "dlrm_dcn", "dlrm_projection"] = "dlrm"
    embedding_dim: int = Field(default=16, ge=4, multiple_of=4)
    dense_arch: list[int] = Field(default=[64, 16], min_length=1)
    over_arch: list[int] = Field(default=[64, 32, 1], min_length=2)
    dcn_layers: int = Field(default=3, ge=1)
    dcn_low_rank: int = Field(default=64, ge=1)
    projection_branches: list[list[int]] = Field(default=[[64], [64]], min_length=2, max_length=2)

    def __post_init__(self) -> None:
        if self.dense_arch[-1] != self.embedding_dim:
            raise ValueError(
                f"dense_arch ends in {self.dense_arch[-1]}, must end in embedding_dim, "
                f"{self.embedding_dim}"
            )
        if self.over_arch[-1] != 1:
            raise ValueError(f"over_arch ends in {self.over_arch[-1]}, must end in 1")
        for sizes in (self.dense_arch, self.over_arch, *self.projection_branches):
            if not sizes or min(sizes) < 1:
                raise ValueError(f"layer sizes {sizes} must be 1 or more each")
        for branch in self.projection_branches:
            if self.architecture == "dlrm_projection" and branch[-1] % self.embedding_dim:
                raise ValueError(
                    f"projection_branches has a branch that ends in {branch[-1]}, must end in a "
                    f"multiple of embedding_dim, {self.embedding_dim}"
                )


@section
class ShardingConfig:
    """Says how tables are sharded, and how rows and gradients travel.

    Attributes:
        type: Sharding of all tables; auto leaves it to the planner.
        tables: Sharding types of single tables, by table name.
        exchange: How ids, rows and gradients of fused tables travel.
        hot: Which rows are replicated on every rank.
        grid: 2D parallelism: tables are sharded over groups of ranks, which are replicas of each
            other; none is one group of all ranks.
        dense_gradients: Only the largest entries of the dense part's gradients travel; none sends
            all of them.
        early_rows: Rows of the next batch that the current one does not touch travel while that one
            is computed; the result is the same. On CPU, without grid.
    """

    type: ShardingKind = "fused_row_wise"
    tables: dict[str, ShardingKind] = Field(default={})
    exchange: ExchangeOptions = ExchangeOptions()
    hot: HotOptions = HotOptions()
    grid: GridOptions | None = None
    dense_gradients: ThresholdOptions | None = None
    early_rows: bool = False


@section
class DenseOptimizerConfig:
    """Chooses the optimizer of the dense part of the model.

    Attributes:
        type: Optimizer of the MLPs.
        learning_rate: Before the schedule.
    """

    type: Literal["adam", "adagrad", "sgd"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0)


@section
class ScheduleConfig:
    """Says how learning rates change in the course of a run.

    Attributes:
        warmup_steps: Steps in which the learning rates rise linearly.
        warmup_start: Factor of the learning rates in the first step of the warm-up.
        decay_start: Step at which the learning rates begin to fall linearly; none is no decay.
        decay_end: Step at which they reach decay_factor; the last step of the run if none.
        decay_factor: Factor of the learning rates after the decay.
    """

    warmup_steps: int = Field(default=0, ge=0)
    warmup_start: float = Field(default=0.1, ge=0, le=1)
    decay_start: int | None = Field(default=None, ge=0)
    decay_end: int | None = Field(default=None, ge=1)
    decay_factor: float = Field(default=0.1, ge=0, le=1)

    def __post_init__(self) -> None:
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"decay_start is {self.decay_start}, must not be before warmup_steps, "
                f"{self.warmup_steps}"
            )
        if self.decay_end is not None and self.decay_start is None:
            raise ValueError("decay_end needs decay_start")
        if (
            self.decay_start is not None
            and self.decay_end is not None
            and self.decay_end <= self.decay_start
        ):
            raise ValueError(
                f"decay_end is {self.decay_end}, must be after decay_start, {self.decay_start}"
            )


@section
class OptimizerConfig:
    """Holds the optimizers of a run and the schedule of their learning rates.

    Attributes:
        embedding: Of the tables.
        dense: Of the MLPs.
        schedule: Of all learning rates.
    """

    embedding: EmbeddingOptimizerConfig = EmbeddingOptimizerConfig()
    dense: DenseOptimizerConfig = DenseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()


@section
class LaunchConfig:
    """Says on which machines and devices ranks are started, and how they meet.

    Attributes:
        ranks: Processes on each machine.
        nodes: Number of machines.
        min_nodes: Elastic training: goes on with as few machines as this; nodes if none.
        rendezvous: host:port that all machines can reach, for more than one machine; the machine
            that has this address hosts the rendezvous.
        is_host: Whether this machine hosts the rendezvous; none finds out by its addresses.
        interface: Network interface, such as eth0, that ranks talk through; none takes the one that
            leads to the rendezvous.
        job: Name of the job at the rendezvous.
        max_restarts: How often ranks are started again after a failure; they go on from the last
            checkpoint.
        device: auto is cuda where there is one.
        backend: auto is nccl on cuda, gloo on cpu.
        threads: Threads of each rank on the CPU.
        timeout_seconds: How long a collective may take, and how long machines wait for each other
            at the start.
    """

    ranks: int = Field(default=2, ge=1)
    nodes: int = Field(default=1, ge=1)
    min_nodes: int | None = Field(default=None, ge=1)
    rendezvous: str | None = None
    is_host: bool | None = None
    interface: str | None = Field(default=None, min_length=1)
    job: str = Field(default="fusedrec", min_length=1)
    max_restarts: int = Field(default=0, ge=0)
    device: Literal["auto", Device] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    threads: int = Field(default=1, ge=1)
    timeout_seconds: int = Field(default=600, ge=1)

    def __post_init__(self) -> None:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(
                f"min_nodes is {self.min_nodes}, must not be more than nodes, {self.nodes}"
            )
        if self.nodes > 1:
            address = re.fullmatch(r".+:(\d+)", self.rendezvous or "")
            if address is None or not 1 <= int(address[1]) <= 65535:
                raise ValueError(
                    f"rendezvous is {self.rendezvous!r}, must be host:port with a port from 1 to "
                    f"65535 when nodes is {self.nodes}"
                )


@section
class LoggingConfig:
    """Says where a run writes, and what.

    Attributes:
        directory: Where the run writes: configuration, plan, logs, plots and checkpoints.
        log_every: Steps between two records of loss and throughput.
        tensorboard: Writes TensorBoard logs beside metrics.jsonl.
        plots: Draws curves.png at the end.
    """

    directory: Path = Path("runs/default")
    log_every: int = Field(default=50, ge=1)
    tensorboard: bool = True
    plots: bool = True


@section
class CheckpointConfig:
    """Says when checkpoints are saved, and how many are kept.

    Attributes:
        every: Steps between two checkpoints, the last of which is at the end; 0 saves none.
        keep: How many of the latest checkpoints stay.
        asynchronous: Writes in the background while training goes on.
        on_error: When a save fails, as the disk is full: stop ends the run, warn reports it and
            trains on.
        verify: Compares checksums before a run goes on from a checkpoint.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    asynchronous: bool = True
    on_error: Literal["stop", "warn"] = "stop"
    verify: bool = True


@section
class BadBatchesConfig:
    """Says what happens when a batch or its gradients cannot be used.

    Attributes:
        policy: A batch with ids out of range, NaN or infinity, or gradients that are not finite:
            error ends the run, on all ranks; skip leaves the step out, on all ranks, and counts it.
        gradients: Checks gradients, too, before tables are updated: one small collective a step.
        most: Steps that may be skipped before it is an error after all; none is no limit.
    """

    policy: Literal["error", "skip"] = "error"
    gradients: bool = True
    most: int | None = Field(default=100, ge=0)


@section
class TrainConfig:
    """Describes one training run.

    Attributes:
        model: What is trained.
        tables: Tables of generated data, and of batches of a Python program; data in files brings
            its own.
        data: What it is trained on.
        sharding: How tables are sharded.
        optimizer: How weights are updated.
        launch: Where ranks run.
        logging: Where the run writes.
        checkpoint: When the run is saved.
        bad_batches: What is done about bad batches.
        plan: Plan file (`fusedrec plan`, or of an earlier run): how tables are sharded, hot rows
            and 2D parallelism; sharding then has but the exchange's settings.
        steps: Training steps; if none, `epochs` decides.
        epochs: Passes over the training data, when steps is none.
        eval_every: Steps between two evaluations on held-out data; there is always one at the end.
        eval_batches: Most batches of an evaluation; all whole batches of the held-out data if none.
        seed: Of the initial weights.
    """

    model: ModelConfig = ModelConfig()
    tables: list[TableConfig] = Field(default=[])
    data: DataConfig = DataConfig()
    sharding: ShardingConfig = ShardingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    bad_batches: BadBatchesConfig = BadBatchesConfig()
    plan: Path | None = None
    steps: int | None = Field(default=None, ge=1)
    epochs: int = Field(default=1, ge=1)
    eval_every: int = Field(default=0, ge=0)
    eval_batches: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 31)

    def __post_init__(self) -> None:
        if self.data.source in ("synthetic", "python") and not self.tables:
            raise ValueError(
                f"tables is empty, must list at least one when data.source is {self.data.source}"
            )
        if self.data.source in ("criteo", "table") and self.tables:
            raise ValueError("tables must be left out: data in files brings its own")
        if self.plan is not None:
            for name in ("type", "tables", "hot", "grid"):
                given = getattr(self.sharding, name)
                if name == "hot":
                    given = replace(given, codec=None)  # which plans do not have
                if given != getattr(ShardingConfig(), name):
                    raise ValueError(
                        f"sharding.{name} and plan are both set: the plan says how tables are "
                        "sharded; leave out one of them"
                    )
        exchange = self.sharding.exchange
        is_fused = {*FUSED_TYPES, "auto"} & {self.sharding.type, *self.sharding.tables.values()}
        if (exchange.codecs or exchange.table_codecs) and not is_fused and self.plan is None:
            raise ValueError(
                f"sharding.exchange has codecs, but no table is fused (sharding.type is "
                f"{self.sharding.type}), must be left out: codecs are of fused tables"
            )
        if self.sharding.early_rows and not is_fused and self.plan is None:
            raise ValueError(
                "sharding.early_rows is true, but no table is fused (sharding.type is "
                f"{self.sharding.type}), must be false: rows of fused tables arrive early"
            )
        hot = self.data.hot_batches
        if hot.order != "mixed" and (
            self.sharding.hot.hot_set is None or not self.sharding.hot.hot_batches
        ):
            raise ValueError(
                f"data.hot_batches.order is {hot.order}, which needs sharding.hot.hot_set, the "
                "rows that are hot, and sharding.hot.hot_batches: true"
            )
        if hot.adaptive and not self.eval_every:
            raise ValueError("data.hot_batches.adaptive needs eval_every, the losses to go by")
        if (
            self.bad_batches.policy == "skip"
            and self.bad_batches.gradients
            and self.optimizer.embedding.type != "sgd"
            and not self.optimizer.embedding.eps
        ):
            raise ValueError(
                "optimizer.embedding.eps is 0, must be more where bad_batches.policy is skip: "
                "a gradient of zero divided by a state of zero is no number"
            )
        names = self.table_names
        taken = [name for name in names if name in TAKEN]
        if taken:
            raise ValueError(
                f"tables has {taken[0]!r}, a name that torch needs for itself, must have another: "
                f"{taken[0]}_table or the like"
            )
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tables has the name {twice[0]!r} more than once")

    @property
    def table_names(self) -> list[str]:
        """The names of the tables of generated data."""
        return [name for table in self.tables for name in copies_of(table)]
