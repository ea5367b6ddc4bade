"""FBGEMM's fused optimizer for the tables, torch's for the rest, both on one schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from fusedrec_torchrec.compat.momentum_scale import MomentumScaledRowWiseAdagrad
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig
from fusedrec_torchrec.training.config import (
    DenseOptimizerConfig,
    OptimizerConfig,
    ScheduleConfig,
)

__all__ = ["build_optimizer", "learning_rates", "schedule_position", "schedule_stages"]

FOREVER = 1 << 62
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def schedule_stages(config: ScheduleConfig, steps: int) -> list[WarmupStage]:
    """The schedule in TorchRec's terms; a decay after the run's last step does not happen."""
    stages: list[WarmupStage] = []
    if config.warmup_steps:
        stages.append(
            WarmupStage(
                policy=WarmupPolicy.LINEAR,
                max_iters=config.warmup_steps,
                value=config.warmup_start,
            )
        )
    end = config.decay_end or steps
    if config.decay_start is None or config.decay_start >= end:
        return stages
    if config.decay_start > config.warmup_steps:
        stages.append(WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=config.decay_start))
    stages.append(
        WarmupStage(
            policy=WarmupPolicy.INTERPOLATE,
            max_iters=end,
            value=1.0,
            end_value=config.decay_factor,
            start_interpolating_iters=config.decay_start,
        )
    )
    # TorchRec goes back to the full rate after the last stage.
    last = WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=FOREVER, value=config.decay_factor)
    return [*stages, last]


def build_optimizer(
    model: DistributedModelParallel, config: OptimizerConfig, steps: int
) -> CombinedOptimizer:
    """One optimizer for all parameters."""
    stages = schedule_stages(config.schedule, steps)
    unfused = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated = {key: value for key, value in unfused.items() if ".embedding_bags." in key}
    dense = {key: value for key, value in unfused.items() if key not in replicated}
    embedding_rate = config.embedding.learning_rate
    parts: list[tuple[str, KeyedOptimizer, float]] = [
        ("tables", model.fused_optimizer, embedding_rate),
        (
            "dense",
            KeyedOptimizerWrapper(dense, _dense_factory(config.dense)),
            config.dense.learning_rate,
        ),
    ]
    if replicated:
        wrapped = KeyedOptimizerWrapper(replicated, _table_factory(config.embedding))
        parts.append(("replicated_tables", wrapped, embedding_rate))
    return CombinedOptimizer(
        [
            WarmupOptimizer(part, list(stages), lr=rate, param_name=f"__{name}_schedule")
            for name, part, rate in parts
            if part.params
        ]
    )


def schedule_position(config: ScheduleConfig, steps: int, at: int) -> torch.Tensor:
    """TorchRec's state of a schedule after ``at`` steps: step and stage."""
    return torch.tensor([at, sum(stage.max_iters < at for stage in schedule_stages(config, steps))])


def learning_rates(optimizer: CombinedOptimizer) -> dict[str, float]:
    """The learning rate of the next step, of each part."""
    rates = {}
    for _, part in optimizer.optimizers:
        name = next(key for key in part.params if key.startswith("__"))
        groups: Any = part.param_groups
        rates[name.removeprefix("__").removesuffix("_schedule")] = float(groups[0]["lr"])
    return rates


def _dense_factory(config: DenseOptimizerConfig) -> Factory:
    optimizers: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    return lambda parameters: optimizers[config.type](parameters, lr=config.learning_rate)


def _table_factory(config: EmbeddingOptimizerConfig) -> Factory:
    """For tables that every rank holds whole: the fused optimizer's arithmetic in plain torch."""
    rate, eps = config.learning_rate, config.eps
    factories: dict[str, Factory] = {
        "rowwise_adagrad": lambda parameters: RowWiseAdagrad(parameters, lr=rate, eps=eps),
        "momentum_scaled_rowwise_adagrad": lambda parameters: MomentumScaledRowWiseAdagrad(
            parameters, lr=rate, eps=eps, momentum_scale=config.momentum_scale
        ),
        "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=rate, eps=eps),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=rate),
    }
    return factories[config.type]
