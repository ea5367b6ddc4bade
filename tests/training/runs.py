"""Small runs for tests."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source
from tests.parity import local_parts

CPU = torch.device("cpu")


def small(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """A run of seconds on generated data, as YAML would hold it."""
    return {
        "model": {"embedding_dim": 8, "dense_arch": [16, 8], "over_arch": [16, 1]},
        "tables": [
            {"name": "a", "rows": 50},
            {"name": "b", "rows": 3000, "zipf": 0.8},
            {"name": "c", "rows": 400, "pooling": 3},
        ],
        "data": {
            "batch_size": 128,
            "lanes": 4,
            "workers": 0,
            "synthetic": {"samples": 20_000, "dense_features": 4, "signal": 2.0},
        },
        "optimizer": {"schedule": {"warmup_steps": 5, "decay_start": 10}},
        "steps": 24,
        "eval_every": 12,
        "eval_batches": 4,
        "logging": {"directory": str(folder), "log_every": 5, "tensorboard": False, "plots": False},
        **changes,
    }


def train(data: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    """Runs a configuration on this rank; returns the end result and all weights and states."""
    config = from_mapping(TrainConfig, data)
    training = Training(config, open_source(config), CPU, Path(resume) if resume else None)
    result = training.run()
    return {"result": result, "state": whole_state(training)}


def whole_state(training: Training) -> dict[str, torch.Tensor]:
    """This rank's part of weights and optimizer state."""
    found: dict[str, torch.Tensor] = {}
    collect(training.model.state_dict(), "model", found)
    collect(training.optimizer.state_dict()["state"], "optimizer", found)
    return found


def collect(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, ShardedTensor | DTensor):
        for i, (_, part) in enumerate(local_parts(value)):
            found[f"{name}/{i}"] = part.detach().clone()
    elif isinstance(value, torch.Tensor):
        found[name] = value.detach().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            collect(item, f"{name}.{key}", found)
