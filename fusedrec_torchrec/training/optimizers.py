"""Builds FBGEMM's fused optimizer for tables and torch's for the rest, on one schedule."""

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
    """Returns the schedule in TorchRec's terms; a decay after the last step does not happen."""
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
    """Builds one optimizer for all parameters."""
    stages = schedule_stages(config.schedule, steps)
    unfused = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated = {key: value for key, value in unfused.items() if ".embedding_bags." in key}
    dense = {key: value for key, value in unfused.items() if key not in replicated}
    embedding_rate = config.embedding.learning_rate
    optimizers: list[tuple[str, KeyedOptimizer, float]] = [
        ("tables", model.fused_optimizer, embedding_rate),
        (
            "dense",
            KeyedOptimizerWrapper(dense, _dense_factory(config.dense)),
            config.dense.learning_rate,
        ),
    ]
    if replicated:
        wrapped = KeyedOptimizerWrapper(replicated, _table_factory(config.embedding))
        optimizers.append(("replicated_tables", wrapped, embedding_rate))
    return CombinedOptimizer(
        [
            WarmupOptimizer(optimizer, list(stages), lr=rate, param_name=f"__{name}_schedule")
            for name, optimizer, rate in optimizers
            if optimizer.params
        ]
    )


def schedule_position(config: ScheduleConfig, steps: int, at: int) -> torch.Tensor:
    """Returns TorchRec's state of a schedule after ``at`` steps: step and stage."""
    return torch.tensor([at, sum(stage.max_iters < at for stage in schedule_stages(config, steps))])


def learning_rates(optimizer: CombinedOptimizer) -> dict[str, float]:
    """Returns the learning rate of the next step, for each of the combined optimizers."""
    rates = {}
    for _, single in optimizer.optimizers:
        name = next(key for key in single.params if key.startswith("__"))
        groups: Any = single.param_groups
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
    """Returns the fused optimizer's arithmetic in torch, for tables that every rank holds whole."""
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
